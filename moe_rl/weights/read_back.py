"""Checks that vLLM computes with the weights that were confirmed: sums of each part of the model, before and after.

    confirmed tensors --(vLLM loads, merges, packs)--> what its layers compute with --> sums of each part --\\
            |                                                                                            equal?
            `--> sums of each part ------------------------------------------------------------------------/

The sums are those of `conservation.py`. They do not depend on the order of the elements, so they hold in whatever
layout a kernel wants its weights. They are exact: one number that is off shows, at any learning rate and in any
precision, and rounding cannot raise an alarm.

On a CPU a layer keeps only a packed copy that nobody can read. Such a layer multiplies the identity matrix, which gives
its weights: every product is a weight or 0, and sums of one weight and zeros are not rounded. Only -0.0 becomes 0.0, so
the two count as equal here.

A part is read where this worker holds it whole and as it was sent. Tensor-parallel workers hold halves of matrices, and
vLLM's own quantisation changes the values. The engine's log says what is not read: only the canary compares it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from moe_rl.errors import first_of
from moe_rl.models.weight_table import EMBEDDING, HEAD
from moe_rl.weights.conservation import Content, PartSums, cut, differences, parts_of

_ROWS = 256
"""Rows of the identity that are multiplied at a time."""
_ONE_THREAD = 1 << 15
"""Elements up to which torch uses one thread. A sum takes many small calls, and an engine's threads, on a busy machine,
would wait for each other in each."""
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, type(None))


@dataclass(frozen=True, slots=True)
class _Reading:
    """Holds one place where a part of the model is computed with.

    part: its name. dtype: in which its elements are compared. read: yields tensors with all its elements, and perhaps
    padding of zeros.
    """

    part: str
    dtype: torch.dtype
    read: Callable[[], Iterator[Tensor]]


class ReadBack:
    """Sums up what is confirmed, and compares it with what the model computes with.

    Args:
        model: vLLM's.
        shapes: {Hugging Face name: shape} of all tensors that an update brings.
        dtype: that the sampler computes in.
        device: where the model is.
        on_part: called after each part that was read back.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        on_part: Callable[[], None] = lambda: None,
    ):
        self._device, self._on_part = device, on_part
        self._parts = {part: index for index, part in enumerate(dict.fromkeys(map(_joined, parts_of(shapes))))}
        self._readings = list(_readings(model, shapes, dtype))
        self._dtypes = {reading.part: reading.dtype for reading in self._readings}
        self._confirmed: PartSums | None = None
        self._before: tuple[int, Content] | None = None
        if unread := [part for part in self._parts if part not in self._dtypes]:
            print(f"weights: {len(unread)} of {len(self._parts)} parts cannot be read back here: {first_of(unread)}")

    def begin(self) -> None:
        """Forget what was confirmed: an update begins."""
        self._confirmed = self._sums(self._parts)

    def confirmed(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors whose digests are right, before vLLM gets them."""
        assert self._confirmed is not None
        for name, tensor in tensors.items():
            for piece_name, piece in cut(name, tensor):
                part = _joined(piece_name)
                if part in self._dtypes:
                    self._confirmed.add(part, piece, self._dtypes[part])

    def wrong(self, version: int) -> list[str]:
        """Name the parts that the model computes with otherwise than they were confirmed as `version`."""
        assert self._confirmed is not None
        held, self._confirmed = self._confirmed.content(), None
        live = self._sums({str(index): index for index in range(len(self._readings))})
        for index, reading in enumerate(self._readings):
            for tensor in reading.read():
                live.add(str(index), tensor, reading.dtype)
            self._on_part()
        table = held.table.clone()
        for reading, total in zip(self._readings, live.content().table[0].tolist(), strict=True):
            if total != held.table[0, self._parts[reading.part]]:
                table[0, self._parts[reading.part]] = total
        problems = differences(Content(self._parts, table.cpu()), Content(self._parts, held.table.cpu()), self._before)
        self._before = (version, Content(self._parts, held.table.cpu()))
        return problems

    def _sums(self, parts: Mapping[str, int]) -> PartSums:
        chunk = _ONE_THREAD if self._device.type == "cpu" else None
        return PartSums(parts, self._device, signed_zeros=False, chunk=chunk)


def _joined(part: str) -> str:
    """Return the name under which a part is compared: vLLM holds the gate and the up matrix of an expert as one."""
    match = _EXPERT.fullmatch(part)
    if match is None or match[3] == "down":
        return part
    return f"{match[1]}.experts.{match[2]}.gate_up_proj.{match[4]}"


def _readings(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[_Reading]:
    modules = dict(model.named_modules())
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = replace(mapper, orig_to_new_stacked={})  # it would hide which rows of a merged matrix are meant
    merged = {
        name: (whole, index)
        for whole, ones in getattr(model, "packed_modules_mapping", {}).items()
        for index, name in enumerate(ones)
    }
    seen = set[str]()
    for name, shape in shapes.items():
        for part in parts_of({name: shape}):
            if match := _EXPERT.fullmatch(part):
                if (joined := _joined(part)) not in seen:
                    seen.add(joined)
                    yield from _of_expert(modules, joined, match, dtype)
                continue
            vllm_name = name if mapper is None else mapper.map_name(name)
            yield from _of_module(modules, part, vllm_name or "", shape, merged, dtype)
            if name == EMBEDDING and HEAD not in shapes:
                yield from _of_module(modules, part, HEAD, shape, merged, dtype)


def _of_expert(
    modules: Mapping[str, nn.Module], part: str, match: re.Match[str], dtype: torch.dtype
) -> Iterator[_Reading]:
    prefix, kind, leaf = f"{match[1]}.experts", match[3], match[4]
    layers = [
        module
        for name, module in modules.items()
        if name.startswith(f"{prefix}.") and isinstance(module, RoutedExperts)
    ]
    layer = layers[0] if layers else modules.get(prefix)
    if not isinstance(layer, RoutedExperts) or not isinstance(layer.quant_method, _PLAIN):
        return
    config = layer.moe_config
    local_expert = layer._map_global_expert_id_to_local_expert_id(int(match[2]))
    if local_expert < 0 or config.moe_parallel_config.tp_size > 1 or config.num_experts != config.num_logical_experts:
        return
    parameter = f"{'w2' if kind == 'down' else 'w13'}_{leaf}"
    yield _Reading(part, dtype, lambda: iter([getattr(layer, parameter)[local_expert]]))


def _of_module(
    modules: Mapping[str, nn.Module],
    part: str,
    name: str,
    shape: tuple[int, ...],
    merged: Mapping[str, tuple[str, int]],
    dtype: torch.dtype,
) -> Iterator[_Reading]:
    """Yield the readings of a tensor that vLLM has as `name`, or as rows of a merged layer."""
    path, _, leaf = name.rpartition(".")
    module, first = modules.get(path), 0
    if module is None:
        above, _, last = path.rpartition(".")
        whole, index = merged.get(last, ("", 0))
        module = modules.get(f"{above}.{whole}")
        sizes = getattr(module, "output_partition_sizes", ())
        if index >= len(sizes) or sizes[index] != shape[0]:
            return  # another worker has a share of these rows
        first = sum(sizes[:index])
    parameter = getattr(module, leaf, None)
    if not isinstance(module, nn.Module) or not isinstance(parameter, Tensor):
        return
    if not isinstance(getattr(module, "quant_method", None), _PLAIN):
        return
    rows, kind = slice(first, first + shape[0]), dtype if leaf == "bias" else parameter.dtype
    if _outputs(module) < rows.stop:
        return  # tensor-parallel workers share the rows
    if leaf == "weight" and _packed(module) and _inputs(module) == shape[1]:
        yield _Reading(part, kind, partial(_by_identity, module, rows, kind))
    if parameter.numel() and parameter.shape[1:] == shape[1:] and len(parameter) >= rows.stop:
        yield _Reading(part, kind, lambda: iter([getattr(module, leaf)[rows]]))
    for candidate in modules.values():  # latent attention multiplies by halves of this matrix
        halves = getattr(candidate, "W_UV", None), getattr(candidate, "W_UK_T", None)
        if leaf == "weight" and getattr(candidate, "kv_b_proj", None) is module and None not in halves:
            yield _Reading(part, kind, partial(_halves, candidate))


def _packed(module: nn.Module) -> bool:
    """Return whether a layer multiplies by a packed copy of its matrix."""
    looks_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    return hasattr(module, "cpu_linear") and not looks_up


def _inputs(module: nn.Module) -> int:
    """Return how many columns of its matrix a layer has here."""
    if isinstance(module, VocabParallelEmbedding):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", module.input_size))  # of a row-parallel layer a share


def _outputs(module: nn.Module) -> float:
    """Return how many rows of its matrix a layer has here. A norm has all."""
    if isinstance(module, VocabParallelEmbedding):
        return int(module.num_embeddings_per_partition)
    return getattr(module, "output_size_per_partition", getattr(module, "output_size", math.inf))


def _halves(attention: nn.Module) -> Iterator[Tensor]:
    yield from (attention.W_UV, attention.W_UK_T)


def _by_identity(layer: nn.Module, rows: slice, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield some rows of a layer's matrix, as columns of what it makes of the identity."""
    for some in torch.eye(_inputs(layer), dtype=dtype).split(_ROWS):
        yield layer.cpu_linear(some, layer.weight, None)[:, rows]
