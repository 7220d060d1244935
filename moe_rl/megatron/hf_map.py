"""Converts between Hugging Face tensors and the parameters of a Megatron GPTModel that one rank holds.

Names and layouts come from the table of the model's family, see `moe_rl/models/weight_table.py`. A rank holds the
experts in the slots s with s // (num_experts / EP) equal to its expert rank. The layer's dispatcher says which expert
is in a slot (`placement`); in a newly loaded model it is the expert with the slot's number. If ranks share a tensor,
each holds an equal range of its rows or columns, and reads only the bytes of that range. For query, key and value rows
the range covers whole key-value groups; for gate and up rows it is the same range of each.
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

from moe_rl.errors import ConfigError
from moe_rl.megatron import world
from moe_rl.megatron.adapters import merged
from moe_rl.megatron.hf_files import CheckpointReader
from moe_rl.models.hf import ModelFacts, layer_weights
from moe_rl.models.weight_table import Weight, ends
from moe_rl.weights.digest import stored_dtype
from moe_rl.weights.stream import Round


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes a weight on this rank.

    Attributes:
        parameters: One parameter; for stacked experts, the parameters of this rank's experts in order.
        names: The Hugging Face tensors that the weight is made of.
        axis: The axis of these tensors that the ranks of `group` split; None if they do not split it.
        order: int64 [E], for stacked experts the expert in each slot of all ranks; else None.
    """

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
        """Return the names and shapes of the Hugging Face tensors."""
        return zip(self.names, self.weight.tensors.values(), strict=True)


def entries(model: torch.nn.Module, facts: ModelFacts, *, fused: bool = HAVE_TE) -> Iterator[Entry]:
    """Yield an entry for every parameter of an (unwrapped) GPTModel but its adapters', and for its routers' expert
    biases.

    Args:
        fused: Whether the layers are TransformerEngine's.

    Raises:
        ConfigError: A parameter is missing in the family's table, or in the model. The message names it.
    """
    biases = (item for item in model.named_buffers() if item[0].endswith(".router.expert_bias"))
    weights = (item for item in model.named_parameters() if ".lora." not in item[0])
    left = dict(chain(weights, biases))
    slots = world.own_slots(facts.num_experts)
    for prefix, tensor_prefix, weight, layer in _weights_of(model, facts):
        order = layer.mlp.token_dispatcher.order if weight.experts else None
        yield from _entries_of(left, prefix, tensor_prefix, weight, slots, order, fused)
    if left:
        raise ConfigError(
            "megatron parameters have no Hugging Face name", got=", ".join(sorted(left)[:3]), expected="none"
        )


def _weights_of(model: torch.nn.Module, facts: ModelFacts) -> Iterator[tuple[str, str, Weight, torch.nn.Module]]:
    """Yield (prefix of Megatron's name, prefix of the Hugging Face names, weight, its layer or the model) for each
    weight on this rank."""
    front, back = ends(facts, first=model.pre_process, last=model.post_process)
    yield from (("", "", weight, model) for weight in front)
    for number, layer in enumerate(model.decoder.layers):
        layer_index = layer.layer_number - 1
        prefixes = f"decoder.layers.{number}.", f"model.layers.{layer_index}."
        yield from ((*prefixes, weight, layer) for weight in layer_weights(facts, layer_index))
    yield from (("", "", weight, model) for weight in back)


def _entries_of(
    left: dict, prefix: str, tensor_prefix: str, weight: Weight, slots: slice, order: np.ndarray | None, fused: bool
) -> Iterator[Entry]:
    parameter_name = prefix + (fused and weight.fused or weight.parameter)

    def take(name: str) -> torch.Tensor:
        if name not in left:
            raise ConfigError("the megatron model lacks a parameter", expected=name)
        return left.pop(name)

    names = tuple(tensor_prefix + name for name in weight.tensors)
    if order is None:  # the weight does not belong to an expert
        yield Entry(weight, (take(parameter_name),), names, weight.axis)
        return
    here = [take(parameter_name.format(expert=number)) for number in range(slots.stop - slots.start)]
    if weight.experts == "stacked":
        yield Entry(weight, tuple(here), names, 0, order)
        return
    for expert, parameter in zip(order[slots].tolist(), here, strict=True):
        yield Entry(weight, (parameter,), tuple(name.format(expert=expert) for name in names), weight.axis)


def join(pieces: list[torch.Tensor], layout: str, kv_groups: int) -> torch.Tensor:
    """Join parts of Hugging Face tensors into the Megatron parameter. `kv_groups`: number of key-value groups in the
    parts."""
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
    """Split a Megatron parameter into parts of Hugging Face tensors; the inverse of `join`.

    Args:
        shares: The relative numbers of rows of these tensors.
    """
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
    """Fill a GPTModel from a Hugging Face checkpoint. Reads only what this rank holds.

    Raises:
        ConfigError: A parameter's shape differs from that of its tensors. The message names the tensors.
    """
    for entry in entries(model, facts):
        part, parts = (0, 1) if entry.axis is None else (entry.group.rank(), entry.group.size())
        pieces = [reader.read(name, _part(reader.tensors[name][1], entry.axis, part, parts)) for name in entry.names]
        stacked = entry.weight.experts == "stacked"
        for number, parameter in enumerate(entry.parameters):
            own_pieces = [piece[number] for piece in pieces] if stacked else pieces
            tensor = join(own_pieces, entry.weight.layout, facts.kv_heads // parts)
            if tensor.shape != parameter.shape:
                raise ConfigError(
                    "a tensor has the wrong shape",
                    where={"tensor": ", ".join(entry.names), "folder": reader.path},
                    got=tuple(tensor.shape),
                    expected=tuple(parameter.shape),
                )
            parameter.copy_(tensor)


def _part(shape: tuple[int, ...], axis: int | None, part: int, parts: int) -> tuple[slice, ...]:
    """Return the indices of rank `part` if `parts` ranks split the axis equally."""
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
    """Yield whole tensors under Hugging Face names, each on the first of the ranks that share it.

    The ranks that share tensors gather them together, one weight at a time. So all of them must exhaust the iterator,
    even those that yield nothing.

    Args:
        chunks: The (unwrapped) GPTModels that this rank holds.
        dense, experts: Which weights to export, so that replicas do not repeat each other. Must be equal on all ranks
            that share tensors.
        get: Returns what to export instead of a parameter with its adapter merged into it. Expert biases are then left
            out: they have only data.
    """
    return export_entries(_exported(chunks, facts), facts, dense=dense, experts=experts, get=get)


def _exported(chunks: Iterable[torch.nn.Module], facts: ModelFacts) -> Iterator[Entry]:
    return (entry for model in chunks for entry in entries(model, facts) if not entry.weight.copied)


def in_runs[T](items: Iterable[T], size: Callable[[T], int], limit: float) -> list[list[T]]:
    """Cut what this rank exports into runs of at most `limit` bytes, or of one item that is larger.

    Ranks that share tensors cut at the same items, so they can export a run together and then wait for others.

    Args:
        size: Returns the bytes of an item's whole tensors.
    """
    runs: list[list[T]] = [[]]
    held = 0
    for item in items:
        if runs[-1] and held + size(item) > limit:
            runs.append([])
            held = 0
        runs[-1].append(item)
        held += size(item)
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
    """Export the weights of (unwrapped) GPTModels in rounds of at most `limit` bytes, or of one weight that is larger.

    Ranks that share tensors have the same number of rounds, so that all ranks may wait for each other between rounds.

    Args:
        dtype, device: The dtype and device of the exported tensors. Expert biases are always float32.
        dense, experts: See `export`.
    """

    def size(entry: Entry) -> int:
        return sum(math.prod(shape) * stored_dtype(name, dtype).itemsize for name, shape in entry.whole)

    def stored(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(device, stored_dtype(name, dtype)).contiguous()

    out = []
    for run in in_runs(_exported(chunks, facts), size, limit):
        exported = [entry for entry in run if (experts if entry.weight.experts else dense) and entry.group.rank() == 0]
        whole = [(name, stored_dtype(name, dtype), shape) for entry in exported for name, shape in entry.whole]
        out.append(Round(whole, stored(export_entries(run, facts, dense=dense, experts=experts))))
    return out


@torch.no_grad()
def export_entries(
    run: Iterable[Entry], facts: ModelFacts, *, dense: bool, experts: bool, get=None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of these entries, like `export`."""
    for entry in run:
        if get is not None and not isinstance(entry.parameters[0], torch.nn.Parameter):
            continue
        if not (experts if entry.weight.experts else dense):
            continue
        parts = 1 if entry.axis is None else entry.group.size()
        for name, piece in zip(entry.names, _pieces(entry, facts, parts, get), strict=True):
            if parts > 1:
                piece = torch.cat(gather(piece, entry.group), entry.axis)
            if entry.order is not None:
                piece = piece[torch.from_numpy(np.argsort(entry.order)).to(piece.device)]
            if entry.group.rank() == 0:
                yield name, piece


def _pieces(entry: Entry, facts: ModelFacts, parts: int, get) -> list[torch.Tensor]:
    shares = [shape[0] for shape in entry.weight.tensors.values()]
    values = map(get or merged, entry.parameters)
    pieces = [split(value, entry.weight.layout, facts.kv_heads // parts, shares) for value in values]
    if entry.weight.experts == "stacked":
        return [torch.stack(same) for same in zip(*pieces, strict=True)]
    return pieces[0]


def gather(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the shards of all ranks of a group. They call this together."""
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
