"""What the trainer holds of each part of the model, taken from megatron's parameters themselves.

It is held against what is exported (`moe_rl/weights/conservation.py`), and so shares nothing with `hf_map.py`: it has
a table of its own of what each parameter is, cuts only what lies in one parameter, and gathers nothing but sums. Which
rank's elements count is told by the marks that megatron puts on parameters; which expert a slot has, by the dispatcher.

On the way it compares what the ranks hold twice: the copies of data- and tensor-parallel ranks with each other, and
the parameters that are computed with to those in float32 that the optimizer writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer

from moe_rl.errors import WeightSyncError, describe, first_of
from moe_rl.megatron import world
from moe_rl.megatron.hf_files import stored_dtype
from moe_rl.models.hf import ModelFacts
from moe_rl.weights.conservation import Content, PartSums, place

_CHUNK = 1 << 22

# Parameters of torch layers and of TransformerEngine's, and the tensors in them: rows of gate above those of up; for
# each key-value group its queries, its key, its value. "|": of these the one that the model has.
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
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


@torch.no_grad()
def content(
    chunks: Iterable[torch.nn.Module],
    facts: ModelFacts,
    parts: Mapping[str, int],
    dtype: torch.dtype,
    optimizers: list[MegatronOptimizer],
    *,
    updated: bool,
) -> Content:
    """What all ranks, which call it together, hold of each part, cast to `dtype`.

    chunks: the (unwrapped) GPTModels of this rank. updated: the optimizers have written since the last time, so that
    the parameters must be what they wrote.
    Raises WeightSyncError on all ranks for parts of which ranks hold different copies, or that the optimizer's float32
    values have not reached.
    """
    device = world.device()
    held = PartSums(parts, device)
    dense, expert, counted, copied = ([False] * len(parts) for _ in range(4))
    late: dict[str, torch.Tensor] = {}
    first_dense, first_experts = world.holds_first_replica()
    owners = {p: one for one in optimizers if isinstance(one, DistributedOptimizer) for p in one.model_param_gbuf_map}
    # Thousands of small calls: none asks for a device, and each costs twice as much under the CPU back end's mode.
    with torch._C.DisableTorchFunction():
        for parameter, pieces in _parameters(chunks, facts, parts):
            of_expert, is_cut = ".mlp.experts." in pieces[0][0], _is_cut(parameter)
            alone = is_cut or _first_of_copies(of_expert)
            for part, values in pieces:
                held.add(part, values, stored_dtype(part, dtype))
                at = parts[part]
                (expert if of_expert else dense)[at] = True
                copied[at] = not is_cut
                counted[at] = alone and (first_experts if of_expert else first_dense)
            if updated and (main := getattr(parameter, "main_param", None)) is not None:
                late |= dict.fromkeys((part for part, _ in pieces), _is_late(parameter, main, owners))
    table = held.content().table
    dense, expert, counted, copied = torch.tensor((dense, expert, counted, copied), device=device)
    stale = torch.zeros(len(parts), dtype=torch.bool, device=device)
    if late:
        stale[torch.tensor([parts[part] for part in late], device=device)] = torch.stack(list(late.values()))
    differs = torch.zeros_like(stale)
    copies = (
        (dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (expert, parallel_state.get_expert_data_parallel_group()),
        (dense & copied, parallel_state.get_tensor_model_parallel_group()),
        (expert & copied, parallel_state.get_expert_tensor_parallel_group()),
    )
    for mask, group in copies:
        differs |= _differs(table * mask, group)
    summed = torch.cat((table * counted, torch.stack((stale, differs)).long()))
    dist.all_reduce(summed)
    summed = summed.cpu()
    _refuse(parts, late=summed[2], unlike=summed[3])
    return Content(parts, summed[:2])


def _parameters(
    chunks: Iterable[torch.nn.Module], facts: ModelFacts, parts: Mapping[str, int]
) -> Iterator[tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]]:
    """(parameter or expert bias, [(part of the model, its elements)]) of all that this rank holds."""
    for model in chunks:
        tensors = dict(model.named_parameters())
        tensors |= {name: t for name, t in model.named_buffers() if name.endswith(".router.expert_bias")}
        for name, tensor in tensors.items():
            of_layer = _OF_LAYER.fullmatch(name)
            if of_layer is None:
                yield tensor, [(_ENDS[name], tensor.data)]
                continue
            layer = model.decoder.layers[int(of_layer[1])]
            front = f"model.layers.{layer.layer_number - 1}."
            pieces = list(_pieces(of_layer[2], tensor.data, layer, facts))
            named = [(_existing(front, theirs, parts), values) for theirs, values in pieces]
            yield tensor, named


def _pieces(
    name: str, values: torch.Tensor, layer: torch.nn.Module, facts: ModelFacts
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name of a tensor in the layer, its elements) in a parameter of a layer."""
    if expert := _EXPERT.fullmatch(name):
        slot, fc, kind = (expert[1], expert[2], expert[3]) if expert[1] else (expert[6], expert[4], expert[5])
        first = layer.mlp.ep_group.rank() * layer.mlp.num_local_experts
        number = layer.mlp.token_dispatcher.order[first + int(slot)]
        yield from _swiglu(f"mlp.experts.{number}", fc, kind, values)
    elif mlp := _MLP.fullmatch(name):
        yield from _swiglu(mlp[1], mlp[2], "weight", values)
    elif qkv := _QKV_OF.fullmatch(name):
        groups = values.unflatten(0, (-1, facts.heads // facts.kv_heads + 2, facts.head_dim))
        queries, keys, of_values = groups[:, :-2], groups[:, -2], groups[:, -1]
        for theirs, piece in zip(_QKV, (queries, keys, of_values), strict=True):
            yield f"{theirs}.{qkv[1]}", piece
    else:
        yield _LAYER[name], values


def _swiglu(mlp: str, fc: str, kind: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if fc == "2":
        yield f"{mlp}.down_proj.{kind}", values
        return
    gate, up = values.chunk(2)
    yield f"{mlp}.gate_proj.{kind}", gate
    yield f"{mlp}.up_proj.{kind}", up


def _existing(front: str, names: str, parts: Mapping[str, int]) -> str:
    return next(front + name for name in names.split("|") if front + name in parts)


def _is_cut(parameter: torch.Tensor) -> bool:
    """Whether the ranks that compute with a layer together have different elements of it."""
    return getattr(parameter, "tensor_model_parallel", False)


def _first_of_copies(of_expert: bool) -> bool:
    """Whether this rank is the first of those that compute with a layer together, or with its experts."""
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if of_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group.rank() == 0


def _is_late(
    parameter: torch.Tensor, main: torch.Tensor, owners: Mapping[torch.Tensor, DistributedOptimizer]
) -> torch.Tensor:
    """Whether a parameter is another than the optimizer wrote last, as far as this rank's optimizer has it. main: what
    it wrote, in float32; a parameter in float32 has none, being what it writes."""
    own, main = parameter.data.view(-1), main.view(-1)
    if parameter in owners:
        there = owners[parameter]._get_model_param_range_map(parameter)["param"]
        own = own[there.start : there.end]
    if own.numel() <= _CHUNK:
        return (main.to(own.dtype) != own).any()
    chunks = zip(main.split(_CHUNK), own.split(_CHUNK), strict=True)
    return torch.stack([(wrote.to(has.dtype) != has).any() for wrote, has in chunks]).any()


def _differs(table: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """bool [parts], where the ranks of a group have other sums; the same on all of them."""
    if group.size() == 1:
        return torch.zeros(table.shape[1], dtype=torch.bool, device=table.device)
    most = torch.stack((table, ~table))  # of ~table the largest is that of the smallest
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return (most[0] != ~most[1]).any(0)


def _refuse(parts: Mapping[str, int], *, late: torch.Tensor, unlike: torch.Tensor) -> None:
    names = list(parts)
    for found, what, expected, do in (
        (
            late,
            "the trainer computes with other weights than its optimizer wrote",
            "every parameter as the optimizer's float32 values, rounded",
            "look for parameters that an update has not refreshed; the run cannot go on with them",
        ),
        (
            unlike,
            "ranks hold different copies of the same weights",
            "the same bits on all ranks that hold a part",
            "look for a rank that missed an update, or for damaged memory; go on with --resume, which loads all ranks",
        ),
    ):
        wrong = [place(names[at]) for at in found.nonzero().flatten().tolist()]
        if wrong:
            raise WeightSyncError(
                describe(what, got=f"{len(wrong)} parts: {first_of(wrong)}", expected=expected, do=do)
            )
