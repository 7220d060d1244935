"""Hugging Face tensors <-> the parameters that one rank holds of a megatron GPTModel, both ways.

What they are called and how they are laid out is in the table of the model's family, see
`moe_rl/models/weight_table.py`. A rank holds the experts in the slots s with s // (num_experts / EP) equal to its
expert rank; which expert lies in a slot, the layer's dispatcher says (`placement`): when a model is loaded, that of
the slot's number. It holds an equal run of rows or of columns of a tensor that ranks share, and it reads no other
bytes of it; of query, key and value rows that is whole key-value groups, of gate and up rows its run of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE

from moe_rl.errors import ConfigError, describe
from moe_rl.megatron import world
from moe_rl.megatron.hf_files import CheckpointReader, stored_dtype
from moe_rl.models.hf import ModelFacts, layer_weights
from moe_rl.models.weight_table import Weight, ends
from moe_rl.weights.stream import Round


@dataclass(frozen=True, slots=True)
class Entry:
    """A weight on this rank. parameters: one; of stacked experts, those of the rank's experts in order. names: of the
    Hugging Face tensors that it is made of. axis: of these, along which the ranks of `group` share them; None: they do
    not. order: int64 [E], of stacked experts, the one in each slot of all ranks; else None."""

    weight: Weight
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    axis: int | None
    order: np.ndarray | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        if self.weight.experts == "stacked":
            return parallel_state.get_expert_model_parallel_group()
        if self.weight.experts:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def whole(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of the Hugging Face tensors."""
        return zip(self.names, self.weight.tensors.values(), strict=True)


def entries(model: torch.nn.Module, facts: ModelFacts, *, fused: bool = HAVE_TE) -> Iterator[Entry]:
    """Every parameter of an (unwrapped) GPTModel, and its routers' expert biases, by the table of its family.

    fused: whether its layers are TransformerEngine's. Raises ConfigError naming a parameter that the table lacks, or
    that the model does.
    """
    biases = (item for item in model.named_buffers() if item[0].endswith(".router.expert_bias"))
    left = dict(chain(model.named_parameters(), biases))
    slots = world.own_slots(facts.num_experts)
    for prefix, theirs, weight, layer in _weights_of(model, facts):
        order = layer.mlp.token_dispatcher.order if weight.experts else None
        yield from _entries_of(left, prefix, theirs, weight, slots, order, fused)
    if left:
        raise ConfigError(
            describe("megatron parameters have no Hugging Face name", got=", ".join(sorted(left)[:3]), expected="none")
        )


def _weights_of(model: torch.nn.Module, facts: ModelFacts) -> Iterator[tuple[str, str, Weight, torch.nn.Module]]:
    """(prefix of megatron's name, of the Hugging Face ones, weight, its layer or else the model) of what is here."""
    front, back = ends(facts)
    yield from (("", "", weight, model) for weight in front if model.pre_process)
    for number, layer in enumerate(model.decoder.layers):
        at = layer.layer_number - 1
        prefixes = f"decoder.layers.{number}.", f"model.layers.{at}."
        yield from ((*prefixes, weight, layer) for weight in layer_weights(facts, at))
    yield from (("", "", weight, model) for weight in back if model.post_process)


def _entries_of(
    left: dict, prefix: str, theirs: str, weight: Weight, slots: slice, order: np.ndarray | None, fused: bool
) -> Iterator[Entry]:
    ours = prefix + (fused and weight.fused or weight.parameter)

    def take(name: str) -> torch.Tensor:
        if name not in left:
            raise ConfigError(describe("the megatron model lacks a parameter", expected=name))
        return left.pop(name)

    names = tuple(theirs + name for name in weight.tensors)
    if order is None:  # no expert's
        yield Entry(weight, (take(ours),), names, weight.axis)
        return
    here = [take(ours.format(expert=number)) for number in range(slots.stop - slots.start)]
    if weight.experts == "stacked":
        yield Entry(weight, tuple(here), names, 0, order)
        return
    for expert, parameter in zip(order[slots].tolist(), here, strict=True):
        yield Entry(weight, (parameter,), tuple(name.format(expert=expert) for name in names), weight.axis)


def join(pieces: list[torch.Tensor], layout: str, kv_groups: int) -> torch.Tensor:
    """Parts of Hugging Face tensors -> the megatron parameter. kv_groups: how many key-value groups the parts have."""
    if layout == "qkv":
        return torch.cat([piece.unflatten(0, (kv_groups, -1)) for piece in pieces], 1).flatten(0, 1)
    if layout == "gate_up":
        return torch.cat(pieces)
    (piece,) = pieces
    if layout == "gate_up_columns":
        rows = piece.T if piece.ndim == 2 else piece
        return torch.cat((rows[::2], rows[1::2]))
    return piece.T if layout == "transposed" else piece


def split(parameter: torch.Tensor, layout: str, kv_groups: int, shares: list[int]) -> list[torch.Tensor]:
    """The megatron parameter -> parts of Hugging Face tensors, the inverse of `join`. shares: of their rows, the sizes
    relative to each other."""
    if layout == "qkv":
        grouped = parameter.unflatten(0, (kv_groups, -1))
        sizes = [grouped.shape[1] * share // sum(shares) for share in shares]
        return [piece.flatten(0, 1) for piece in grouped.split(sizes, 1)]
    if layout == "gate_up":
        return list(parameter.chunk(2))
    if layout == "gate_up_columns":
        in_turns = torch.stack(parameter.chunk(2), 1).flatten(0, 1)
        return [in_turns.T if parameter.ndim == 2 else in_turns]
    return [parameter.T if layout == "transposed" else parameter]


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, reader: CheckpointReader) -> None:
    """Fill a GPTModel from a Hugging Face checkpoint. Reads nothing but what this rank holds.

    Raises ConfigError naming a parameter that has another shape than the tensors make.
    """
    for entry in entries(model, facts):
        part, parts = (0, 1) if entry.axis is None else (entry.group.rank(), entry.group.size())
        pieces = [reader.read(name, _part(reader.tensors[name][1], entry.axis, part, parts)) for name in entry.names]
        stacked = entry.weight.experts == "stacked"
        for number, parameter in enumerate(entry.parameters):
            own = [piece[number] for piece in pieces] if stacked else pieces
            tensor = join(own, entry.weight.layout, facts.kv_heads // parts)
            if tensor.shape != parameter.shape:
                raise ConfigError(
                    describe(
                        "a tensor has the wrong shape",
                        where=f"{reader.path}: {', '.join(entry.names)}",
                        got=tuple(tensor.shape),
                        expected=tuple(parameter.shape),
                    )
                )
            parameter.copy_(tensor)


def _part(shape: tuple[int, ...], axis: int | None, part: int, parts: int) -> tuple[slice, ...]:
    """The indices of rank `part` of `parts`, which share the axis equally."""
    index = [slice(0, size) for size in shape]
    if axis is not None:
        share = shape[axis] // parts
        index[axis] = slice(part * share, (part + 1) * share)
    return tuple(index)


def export(
    chunks: Iterable[torch.nn.Module],
    facts: ModelFacts,
    *,
    dense: bool,
    experts: bool,
    get: Callable[[torch.nn.Parameter], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors under Hugging Face names, each on the first of the ranks that share it and on no other.

    chunks: the (unwrapped) GPTModels that this rank holds.
    dense, experts: which of the two to give, so that replicas do not repeat each other; the same on all ranks that
    share tensors. These gather them together, one weight at a time, so all must exhaust the iterator, also those that
    get nothing.
    get: what to export of a parameter instead of its data; expert biases, which have nothing else, are then left out.
    """
    everything = (entry for model in chunks for entry in entries(model, facts))
    return export_entries(everything, facts, dense=dense, experts=experts, get=get)


def _runs(
    chunks: Iterable[torch.nn.Module], facts: ModelFacts, size: Callable[[str, tuple[int, ...]], int], limit: float
) -> list[list[Entry]]:
    """The entries of this rank cut into runs of at most `limit` bytes of whole tensors, or of one entry that is larger.

    size: bytes of a tensor by its Hugging Face name and shape. Ranks that share tensors cut at the same entries, so
    that they can export a run together and then wait for others.
    """
    runs: list[list[Entry]] = [[]]
    held = 0
    for entry in (entry for model in chunks for entry in entries(model, facts)):
        bytes_ = sum(size(*tensor) for tensor in entry.whole)
        if runs[-1] and held + bytes_ > limit:
            runs.append([])
            held = 0
        runs[-1].append(entry)
        held += bytes_
    return runs


def export_rounds(
    chunks: Iterable[torch.nn.Module],
    facts: ModelFacts,
    dtype: torch.dtype,
    limit: float,
    *,
    dense: bool,
    experts: bool,
    device: torch.device,
) -> list[Round]:
    """The weights of (unwrapped) GPTModels in `dtype` on `device`, in rounds of at most `limit` bytes, or of one weight
    that is larger. Expert biases are float32 in any precision. dense, experts: as for `export`.

    Ranks that share tensors have the same number of rounds, so that all may wait for one another between two.
    """

    def size(name: str, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * stored_dtype(name, dtype).itemsize

    def stored(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(device, stored_dtype(name, dtype)).contiguous()

    out = []
    for run in _runs(chunks, facts, size, limit):
        given = [entry for entry in run if (experts if entry.weight.experts else dense) and entry.group.rank() == 0]
        whole = [(name, stored_dtype(name, dtype), shape) for entry in given for name, shape in entry.whole]
        out.append(Round(whole, stored(export_entries(run, facts, dense=dense, experts=experts))))
    return out


@torch.no_grad()
def export_entries(
    run: Iterable[Entry], facts: ModelFacts, *, dense: bool, experts: bool, get=None
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `export`, of these entries."""
    for entry in run:
        if get is not None and not isinstance(entry.parameters[0], torch.nn.Parameter):
            continue
        if not (experts if entry.weight.experts else dense):
            continue
        parts = 1 if entry.axis is None else entry.group.size()
        for name, piece in zip(entry.names, _pieces(entry, facts, parts, get), strict=True):
            if parts > 1:
                piece = torch.cat(_gather(piece, entry.group), entry.axis)
            if entry.order is not None:
                piece = piece[torch.from_numpy(np.argsort(entry.order)).to(piece.device)]
            if entry.group.rank() == 0:
                yield name, piece


def _pieces(entry: Entry, facts: ModelFacts, parts: int, get) -> list[torch.Tensor]:
    shares = [shape[0] for shape in entry.weight.tensors.values()]
    values = (parameter.data if get is None else get(parameter) for parameter in entry.parameters)
    pieces = [split(value, entry.weight.layout, facts.kv_heads // parts, shares) for value in values]
    if entry.weight.experts == "stacked":
        return [torch.stack(same) for same in zip(*pieces, strict=True)]
    return pieces[0]


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
