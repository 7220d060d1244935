"""Sums up each part of the model as the trainer holds it, directly from Megatron's parameters.

`moe_rl/weights/conservation.py` compares these sums with those of the exported tensors. This module shares no code with
`hf_map.py`, so that a mistake in one of them is detected. It has its own table of parameter names, and only cuts pieces
out of single parameters. The ranks exchange nothing but sums. Megatron marks the parameters that ranks split: the marks
tell which rank's elements count. The dispatcher tells which expert each slot holds.

Two more comparisons are made on the way. Data-parallel and tensor-parallel ranks must hold the same copies. And the
parameters that the model computes with must be the float32 values that the optimizer wrote, rounded.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from torch import Tensor

from moe_rl.errors import WeightSyncError, first_of
from moe_rl.megatron import world
from moe_rl.megatron.adapters import merged
from moe_rl.models.hf import ModelFacts
from moe_rl.models.peft import of_first_expert
from moe_rl.models.weight_table import EMBEDDING, HEAD
from moe_rl.weights.conservation import Content, PartSums, place
from moe_rl.weights.digest import stored_dtype

type Cut = Callable[[Tensor], Sequence[Tensor]]

_GROUP = 1 << 18
"""Parameters that together have at most this many elements are compared in one call."""
_CHUNK = 1 << 22
"""Elements of a parameter that are compared at a time, to bound memory."""

# Maps parameters of torch's and TransformerEngine's layers to the tensors in them. Gate rows are above up rows; each
# key-value group has its queries, its key and its value. The model has one of the names separated by "|".
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight|model.embed_tokens.weight",
}
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight|self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
}
_LAYER = _NORMS | {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "mlp.router.weight": "mlp.gate.weight|mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_QKV_OF = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_MLP = re.compile(r"(mlp|mlp\.shared_experts)\.linear_fc([12])\.weight")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)|linear_fc([12])\.(weight|bias)(\d+))"
)
_OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, eq=False)
class _Owned:
    """Holds a parameter or an expert bias of this rank, with the parts of the model in it.

    Attributes:
        parts: Names of the parts.
        cut: Returns the elements of each part, in the order of `parts`.
        counts: Whether its elements count: not those of the last pipeline stage's copy of a tied embedding.
        shared: Whether it belongs to the adapters of all experts of a layer, on all ranks of the layer.
    """

    tensor: Tensor
    parts: tuple[str, ...]
    cut: Cut
    counts: bool = True
    shared: bool = False


class LiveWeights:
    """Sums up the parameters of this rank's share of a model, and remembers which parameter holds which parts."""

    def __init__(self, chunks: Iterable[torch.nn.Module], facts: ModelFacts, parts: Mapping[str, int]):
        """Remember the model; nothing is summed yet.

        Args:
            chunks: The (unwrapped) GPTModels of this rank.
            parts: {part of the model: its number}.
        """
        self._chunks, self._facts, self._parts = list(chunks), facts, parts
        self._layout: tuple[list[object], list[object]] = ([], [])
        self._held: list[_Owned] = []
        self._kinds = torch.empty(0)

    @torch.no_grad()
    def content(self, dtype: torch.dtype, optimizers: list[MegatronOptimizer], *, updated: bool) -> Content:
        """Sum up each part as all ranks hold it, cast to `dtype`. All ranks call this together.

        Args:
            updated: Whether the optimizers have written since the last call. The parameters must then equal what they
                wrote.

        Raises:
            WeightSyncError: Ranks hold different copies of a part, or a parameter is not what its optimizer wrote.
                Raised on all ranks.
        """
        device = world.device()
        # Thousands of small calls follow, and none names a device. The CPU back end's mode would double their time.
        with torch._C.DisableTorchFunction():
            self._look()
            sums = PartSums(self._parts, device)
            for held in self._held:
                for part, values in zip(held.parts, held.cut(merged(held.tensor)), strict=True):
                    sums.add(part, values, stored_dtype(part, dtype))
            late = torch.zeros(len(self._parts), dtype=torch.bool, device=device)
            adapters = list(_adapters(self._held))
            if updated and (names := _late([*self._held, *adapters], optimizers)):
                late[[self._parts[name] for name in names]] = True
        table = sums.content().table
        dense, expert, copied, counted, tied = self._kinds.to(device)
        # An adapter's whole part multiplies other rows or columns on each rank, so its copies do not show in the sums.
        whole = _whole_parts((adapter for adapter in adapters if not adapter.shared), self._parts, device)
        differs = _differs(whole * dense, parallel_state.get_tensor_model_parallel_group())
        differs |= _differs(whole * expert, parallel_state.get_expert_tensor_parallel_group())
        if shared := [adapter for adapter in adapters if adapter.shared]:
            whole = _whole_parts(shared, self._parts, device)
            differs |= _differs(whole, parallel_state.get_tensor_model_parallel_group())
            differs |= _differs(whole, parallel_state.get_data_parallel_group(with_context_parallel=True))
        copies = (
            (dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (expert, parallel_state.get_expert_data_parallel_group()),
            (dense & copied, parallel_state.get_tensor_model_parallel_group()),
            (expert & copied, parallel_state.get_expert_tensor_parallel_group()),
            *((tied, group) for group in _ends_of_the_pipeline()),
        )
        for mask, group in copies:
            differs |= _differs(table * mask, group)
        summed = torch.cat((table * counted, torch.stack((late, differs)).long()))
        dist.all_reduce(summed)
        summed = summed.cpu()
        _refuse(self._parts, late=summed[2], unlike=summed[3])
        return Content(self._parts, summed[:2])

    def _look(self) -> None:
        """Find out which parameter holds which parts, unless nothing has changed since the last call."""
        layout = _layout(self._chunks)
        (values, objects), (old_values, old_objects) = layout, self._layout
        if values == old_values and len(objects) == len(old_objects) and all(map(operator.is_, objects, old_objects)):
            return
        self._held = [held for model in self._chunks for held in _held(model, self._facts, self._parts)]
        self._kinds = _kinds(self._held, self._parts)
        self._layout = layout


def _layout(chunks: Iterable[torch.nn.Module]) -> tuple[list[object], list[object]]:
    """List everything that decides which parameter holds which parts.

    The first list has names, numbers of layers, and the experts in the slots: things to compare by value. The second
    has the modules, parameters and buffers of those names: things to compare by identity.
    """
    values: list[object] = []
    objects: list[object] = []
    for model in chunks:
        modules = [model]
        for module in modules:  # the list grows while the loop runs over it
            for members in (module._modules, module._parameters, module._buffers):
                values += members
                objects += members.values()
            modules += [child for child in module._modules.values() if child is not None]
        for layer in model.decoder.layers:
            values.append(layer.layer_number)
            if layer.is_moe_layer:
                values.append(layer.mlp.token_dispatcher.order.tolist())
    return values, objects


def _held(model: torch.nn.Module, facts: ModelFacts, parts: Mapping[str, int]) -> Iterator[_Owned]:
    """Yield every parameter of a model but its adapters', and every expert bias, with the parts in it."""
    tensors = {name: parameter for name, parameter in model.named_parameters() if ".lora." not in name}
    tensors |= {name: t for name, t in model.named_buffers() if name.endswith(".router.expert_bias")}
    for name, tensor in tensors.items():
        of_layer = _OF_LAYER.fullmatch(name)
        if of_layer is None:
            part = _existing("", _ENDS[name], parts)
            yield _Owned(tensor, (part,), _whole, counts=not (name == "output_layer.weight" and part == EMBEDDING))
            continue
        layer = model.decoder.layers[int(of_layer[1])]
        front = f"model.layers.{layer.layer_number - 1}."
        names, cut = _pieces(of_layer[2], layer, facts)
        yield _Owned(tensor, tuple(_existing(front, hf_name, parts) for hf_name in names), cut)


def _adapters(held: Iterable[_Owned]) -> Iterator[_Owned]:
    """Yield the parameters of adapters, with the parts that they change; one that a layer's experts share only once,
    with the parts of the layer's first expert."""
    shared: set[int] = set()
    for owned in held:
        if (adapter := getattr(owned.tensor, "adapter", None)) is None:
            continue
        for parameter in (adapter.a, adapter.b):
            if parameter is not adapter.outer:
                yield _Owned(parameter, owned.parts, owned.cut)
            elif id(parameter) not in shared:
                shared.add(id(parameter))
                parts = tuple(map(of_first_expert, owned.parts))
                yield _Owned(parameter, parts, owned.cut, shared=True)


def _whole_parts(adapters: Iterable[_Owned], parts: Mapping[str, int], device: torch.device) -> Tensor:
    """Return sums of the adapters' parameters that the ranks of a matrix do not split, by the first part of each."""
    sums = PartSums(parts, device)
    for adapter in adapters:
        if not _is_cut(adapter.tensor):
            sums.add(adapter.parts[0], adapter.tensor.data, adapter.tensor.dtype)
    return sums.content().table


def _kinds(held: Iterable[_Owned], parts: Mapping[str, int]) -> Tensor:
    """Return marks of the parts that this rank holds, bool [5, parts].

    The rows mark parts outside experts, parts of experts, parts of which tensor-parallel ranks hold copies, parts
    whose elements count on this rank, and the tied embedding.
    """
    dense, expert, copied, counted, tied = ([False] * len(parts) for _ in range(5))
    first_dense, first_experts = world.holds_first_replica()
    for owned in held:
        of_expert, is_cut = ".mlp.experts." in owned.parts[0], _is_cut(owned.tensor)
        alone = is_cut or _first_of_copies(of_expert)
        for part in owned.parts:
            column = parts[part]
            (expert if of_expert else dense)[column] = True
            copied[column] = not is_cut
            counted[column] = owned.counts and alone and (first_experts if of_expert else first_dense)
            tied[column] = part == EMBEDDING and HEAD not in parts
    return torch.tensor((dense, expert, copied, counted, tied))


def _ends_of_the_pipeline() -> Iterator[dist.ProcessGroup]:
    """Yield the group of the first and the last stage if this rank belongs to it. Both hold a tied embedding."""
    if parallel_state.is_rank_in_embedding_group():
        yield parallel_state.get_embedding_group()


def _pieces(name: str, layer: torch.nn.Module, facts: ModelFacts) -> tuple[tuple[str, ...], Cut]:
    """Name the tensors in a parameter of a layer, and say how it is cut into them."""
    if expert := _EXPERT.fullmatch(name):
        slot, fc, kind = (expert[1], expert[2], expert[3]) if expert[1] else (expert[6], expert[4], expert[5])
        first = layer.mlp.ep_group.rank() * layer.mlp.num_local_experts
        number = layer.mlp.token_dispatcher.order[first + int(slot)]
        return _swiglu(f"mlp.experts.{number}", fc, kind)
    if mlp := _MLP.fullmatch(name):
        return _swiglu(mlp[1], mlp[2], "weight")
    if qkv := _QKV_OF.fullmatch(name):
        return tuple(f"{projection}.{qkv[1]}" for projection in _QKV), partial(_queries_keys_values, facts)
    return (_LAYER[name],), _whole


def _swiglu(mlp: str, fc: str, kind: str) -> tuple[tuple[str, ...], Cut]:
    if fc == "2":
        return (f"{mlp}.down_proj.{kind}",), _whole
    return (f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}"), _halves


def _whole(values: Tensor) -> tuple[Tensor]:
    return (values,)


def _halves(values: Tensor) -> Sequence[Tensor]:
    return values.chunk(2)


def _queries_keys_values(facts: ModelFacts, values: Tensor) -> tuple[Tensor, ...]:
    groups = values.unflatten(0, (-1, facts.heads // facts.kv_heads + 2, facts.head_dim))
    return groups[:, :-2], groups[:, -2], groups[:, -1]


def _existing(front: str, names: str, parts: Mapping[str, int]) -> str:
    return next(front + name for name in names.split("|") if front + name in parts)


def _is_cut(parameter: Tensor) -> bool:
    """Return whether the ranks that compute a layer together hold different elements of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def _first_of_copies(of_expert: bool) -> bool:
    """Return whether this rank is the first of those that compute a layer, or its experts, together."""
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if of_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group.rank() == 0


def _late(held: Iterable[_Owned], optimizers: list[MegatronOptimizer]) -> list[str]:
    """Name the parts in parameters that are not what this rank's optimizers wrote last.

    An optimizer writes float32 values, and the parameter is their rounding. The optimizer writes a float32 parameter
    directly, so such parameters are skipped. The host waits for the device once, and then once for each parameter of a
    group that differs. Values in host memory are moved to the device a chunk at a time.
    """
    owners = {
        p: owner for owner in optimizers if isinstance(owner, DistributedOptimizer) for p in owner.model_param_gbuf_map
    }
    groups: list[list[_Written]] = []
    elements = 0
    for owned in held:
        if (main := _main_values(owned.tensor, owners.get(owned.tensor))) is None:
            continue
        values, main = owned.tensor.data.view(-1), main.view(-1)
        if owned.tensor in owners:
            there = owners[owned.tensor]._get_model_param_range_map(owned.tensor)["param"]
            values = values[there.start : there.end]
        elements += values.numel()
        last = groups[-1][0] if groups else None
        if last is None or elements > _GROUP or (values.dtype, main.device) != (last.has.dtype, last.wrote.device):
            groups.append([])
            elements = values.numel()
        groups[-1].append(_Written(owned.parts, values, main))
    wrong = torch.stack([_unlike(group) for group in groups]).tolist() if groups else []
    late = [
        entry for group, is_wrong in zip(groups, wrong, strict=True) if is_wrong for entry in group if _unlike([entry])
    ]
    return [part for entry in late for part in entry.parts]


def _main_values(parameter: Tensor, owner: DistributedOptimizer | None) -> Tensor | None:
    """Return what the optimizer wrote for this rank's elements of a parameter, on the device or in host memory.

    None if that is the parameter itself, or only the bits that it lacks of the float32 values.
    """
    main = getattr(parameter, "main_param", None)
    if main is None and owner is not None and owner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        main = owner._get_main_param_and_optimizer_states(parameter)["param"]
    return None if main is None or main.dtype is torch.int16 else main


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """Holds elements [n] of a parameter, and the float32 values [n] that the optimizer wrote for them."""

    parts: tuple[str, ...]
    has: Tensor
    wrote: Tensor


def _unlike(group: list[_Written]) -> Tensor:
    """Return bool [], whether an element of the group is not what the optimizer wrote. It stays on the device."""
    has, wrote = group[0].has, group[0].wrote
    if len(group) > 1:
        has, wrote = torch.cat([entry.has for entry in group]), torch.cat([entry.wrote for entry in group])
    chunks = zip(has.split(_CHUNK), wrote.split(_CHUNK), strict=True)
    return torch.stack([(main.to(values.device, values.dtype) != values).any() for values, main in chunks]).any()


def _differs(table: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return bool [parts], true where the ranks of a group have different sums; the same on all of them."""
    if group.size() == 1:
        return torch.zeros(table.shape[1], dtype=torch.bool, device=table.device)
    most = torch.stack((table, ~table))  # the largest ~value belongs to the smallest value
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return (most[0] != ~most[1]).any(0)


def _refuse(parts: Mapping[str, int], *, late: Tensor, unlike: Tensor) -> None:
    names = list(parts)
    for marks, what, expected, do in (
        (
            late,
            "the trainer computes with other weights than its optimizer wrote",
            "every parameter as the optimizer's float32 values, rounded",
            "look for parameters that an update has not refreshed; the run cannot continue with them",
        ),
        (
            unlike,
            "ranks hold different copies of the same weights",
            "the same bits on all ranks that hold a part",
            "look for a rank that missed an update, or for damaged memory; then resume, which loads all ranks again",
        ),
    ):
        wrong = [place(names[index]) for index in marks.nonzero().flatten().tolist()]
        if wrong:
            raise WeightSyncError(what, got=f"{len(wrong)} parts: {first_of(wrong)}", expected=expected, do=do)
