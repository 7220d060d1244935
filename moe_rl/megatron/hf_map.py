"""Names and layouts: Hugging Face MoE models <-> megatron GPTModel, both ways, for the part that one rank holds.

A rank holds the experts in the slots s with s // (num_experts / EP) equal to its expert rank; which expert lies in a
slot, the layer's dispatcher says (`placement`). Of a matrix it holds a run of rows or of columns: tensor-parallel ranks
share the dense ones, expert-tensor-parallel ranks those of the experts.
Layout of linear_qkv: per key-value group its query heads, then k, then v; a rank holds whole groups. Of linear_fc1:
gate above up; a rank holds its rows of gate above its rows of up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open

from moe_rl.config.hf import ModelFacts, checkpoint_tensors
from moe_rl.errors import ConfigError, describe

# Hugging Face name, and the axis along which tensor-parallel ranks cut it (None: whole on each).
_TOP = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "output_layer.weight": ("lm_head.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),  # where TransformerEngine keeps it
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),  # TransformerEngine's, dense layers
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight", 1),
}
_QKV = {
    f"self_attention.linear_qkv.{kind}": tuple(f"self_attn.{one}_proj.{kind}" for one in "qkv")
    for kind in ("weight", "bias")
}
_GATE_UP = ("gate_proj.weight", "up_proj.weight")
_GATE_UP_OF = {"mlp.linear_fc1.weight": "mlp.", "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts."}
# Experts one module each (SequentialMLP), and in one module (TransformerEngine's grouped linear).
_EXPERT = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc(?P<fc>[12])\.weight"),
    re.compile(r"mlp\.experts\.linear_fc(?P<fc>[12])\.weight(?P<expert>\d+)"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One megatron parameter, or expert bias, and the Hugging Face tensors it is made of.

    layout: copy, qkv or gate_up. axis: along which the ranks of its tensor-parallel group share it; None: they do not.
    """

    parameter: torch.Tensor
    names: tuple[str, ...]
    layout: str
    axis: int | None
    is_expert: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the matrices of this kind."""
        if self.is_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()


def entries(model: torch.nn.Module, facts: ModelFacts) -> Iterator[Entry]:
    """Every parameter of an (unwrapped) GPTModel, and its routers' expert biases, with their Hugging Face names."""
    experts_here = facts.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_slot = experts_here * parallel_state.get_expert_model_parallel_rank()
    biases = (item for item in model.named_buffers() if item[0].endswith(".router.expert_bias"))
    for name, parameter in chain(model.named_parameters(), biases):
        if name in _TOP:
            hf_name, axis = _TOP[name]
            yield Entry(parameter, (hf_name,), "copy", axis, False)
            continue
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is None:
            raise ConfigError(describe("a megatron parameter has no Hugging Face name", got=name))
        layer, rest = model.decoder.layers[int(match[1])], match[2]
        prefix = f"model.layers.{layer.layer_number - 1}."
        expert = next(filter(None, (pattern.fullmatch(rest) for pattern in _EXPERT)), None)
        if expert is not None:
            prefix += f"mlp.experts.{layer.mlp.token_dispatcher.order[first_slot + int(expert['expert'])]}."
            if expert["fc"] == "1":
                yield Entry(parameter, tuple(prefix + n for n in _GATE_UP), "gate_up", 0, True)
            else:
                yield Entry(parameter, (prefix + "down_proj.weight",), "copy", 1, True)
        elif rest in _QKV:
            yield Entry(parameter, tuple(prefix + n for n in _QKV[rest]), "qkv", 0, False)
        elif rest in _GATE_UP_OF:
            prefix += _GATE_UP_OF[rest]
            yield Entry(parameter, tuple(prefix + n for n in _GATE_UP), "gate_up", 0, False)
        elif rest in _LAYER:
            hf_name, axis = _LAYER[rest]
            yield Entry(parameter, (prefix + hf_name,), "copy", axis, False)
        else:
            raise ConfigError(describe("a megatron parameter has no Hugging Face name", got=name))


def join(
    tensors: list[torch.Tensor], layout: str, axis: int | None, facts: ModelFacts, *, part: int, parts: int
) -> torch.Tensor:
    """Whole Hugging Face tensors -> the megatron tensor of rank `part` of `parts`."""
    if axis is None:
        return tensors[0]
    if layout == "qkv":
        hidden = tensors[0].shape[1:]  # none of a bias
        tensors = [torch.cat([t.view(facts.kv_heads, -1, *hidden) for t in tensors], 1).reshape(-1, *hidden)]
    return torch.cat([t.chunk(parts, axis)[part] for t in tensors], 0)


def split(shards: list[torch.Tensor], layout: str, axis: int | None, facts: ModelFacts) -> list[torch.Tensor]:
    """The megatron tensors of all ranks that share one -> whole Hugging Face tensors, the inverse of `join`."""
    if layout == "gate_up":
        return [torch.cat(rows, 0) for rows in zip(*(shard.chunk(2, 0) for shard in shards), strict=True)]
    tensor = shards[0] if axis is None else torch.cat(shards, axis)
    if layout == "copy":
        return [tensor]
    groups, head, hidden = facts.kv_heads, facts.head_dim, tensor.shape[1:]
    queries = facts.heads // groups * head
    pieces = tensor.view(groups, queries + 2 * head, *hidden).split([queries, head, head], 1)
    return [piece.reshape(-1, *hidden) for piece in pieces]


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, path: Path) -> None:
    """Fill a GPTModel from a Hugging Face checkpoint folder. Reads only the tensors that this rank has a part of.

    Raises ConfigError naming a tensor that is missing or misshapen.
    """
    where = {name: file for name, (_, _, file) in checkpoint_tensors(path).items()}
    handles = {}
    for entry in entries(model, facts):
        tensors = []
        for name in entry.names:
            if name not in where:
                raise ConfigError(describe("the checkpoint lacks a tensor", where=str(path), expected=name))
            file = where[name]
            if file not in handles:
                handles[file] = safe_open(path / file, framework="pt")
            tensors.append(handles[file].get_tensor(name))
        part, parts = entry.group.rank(), entry.group.size()
        tensor = join(tensors, entry.layout, entry.axis, facts, part=part, parts=parts)
        if tensor.shape != entry.parameter.shape:
            raise ConfigError(
                describe(
                    "a tensor has the wrong shape",
                    where=f"{path}: {', '.join(entry.names)}",
                    got=tuple(tensor.shape),
                    expected=tuple(entry.parameter.shape),
                )
            )
        entry.parameter.copy_(tensor)


@torch.no_grad()
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
    share tensors. These gather them together, so all must exhaust the iterator, also those that get nothing.
    get: what to export of a parameter instead of its data; expert biases, which have nothing else, are then left out.
    """
    for entry in (entry for model in chunks for entry in entries(model, facts)):
        if get is not None and not isinstance(entry.parameter, torch.nn.Parameter):
            continue
        if experts if entry.is_expert else dense:
            shards = [entry.parameter.data if get is None else get(entry.parameter)]
            if entry.axis is not None and entry.group.size() > 1:
                shards = _gather(shards[0], entry.group)
            if entry.group.rank() == 0:
                yield from zip(entry.names, split(shards, entry.layout, entry.axis, facts), strict=True)


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
