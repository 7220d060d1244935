"""Names and layouts: Hugging Face Qwen3-MoE <-> megatron GPTModel, both ways, for one expert-parallel rank.

A rank holds every dense tensor and the experts e with e // (num_experts / EP) equal to its expert rank.
Layout of linear_qkv: per key-value group its query heads, then k, then v. Of linear_fc1: gate above up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from moe_rl.config.hf import ModelFacts, checkpoint_tensors
from moe_rl.errors import ConfigError, describe

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # where TransformerEngine keeps it
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_GATE_UP = ("gate_proj.weight", "up_proj.weight")
# Experts one module each (SequentialMLP), and in one module (TransformerEngine's grouped linear).
_EXPERT = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc(?P<fc>[12])\.weight"),
    re.compile(r"mlp\.experts\.linear_fc(?P<fc>[12])\.weight(?P<expert>\d+)"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One megatron parameter and the Hugging Face tensors it is made of. layout: copy, qkv or gate_up."""

    parameter: torch.nn.Parameter
    names: tuple[str, ...]
    layout: str
    is_expert: bool


def entries(model: torch.nn.Module, facts: ModelFacts, *, first_expert: int) -> Iterator[Entry]:
    """Every parameter of an (unwrapped) GPTModel with its Hugging Face names. first_expert: this rank's lowest."""
    for name, parameter in model.named_parameters():
        if name in _TOP:
            yield Entry(parameter, (_TOP[name],), "copy", False)
            continue
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is None:
            raise ConfigError(describe("a megatron parameter has no Hugging Face name", got=name))
        rest, prefix = match[2], f"model.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."
        expert = next(filter(None, (pattern.fullmatch(rest) for pattern in _EXPERT)), None)
        if expert is not None:
            prefix += f"mlp.experts.{first_expert + int(expert['expert'])}."
            if expert["fc"] == "1":
                yield Entry(parameter, tuple(prefix + n for n in _GATE_UP), "gate_up", True)
            else:
                yield Entry(parameter, (prefix + "down_proj.weight",), "copy", True)
        elif rest == "self_attention.linear_qkv.weight":
            yield Entry(parameter, tuple(prefix + n for n in _QKV), "qkv", False)
        elif rest in _LAYER:
            yield Entry(parameter, (prefix + _LAYER[rest],), "copy", False)
        else:
            raise ConfigError(describe("a megatron parameter has no Hugging Face name", got=name))


def join(tensors: list[torch.Tensor], layout: str, facts: ModelFacts) -> torch.Tensor:
    """Hugging Face tensors -> one megatron tensor."""
    if layout == "copy":
        return tensors[0]
    if layout == "gate_up":
        return torch.cat(tensors, 0)
    groups, hidden = facts.kv_heads, tensors[0].shape[1]
    return torch.cat([t.view(groups, -1, hidden) for t in tensors], 1).reshape(-1, hidden)


def split(tensor: torch.Tensor, layout: str, facts: ModelFacts) -> list[torch.Tensor]:
    """One megatron tensor -> Hugging Face tensors, the inverse of `join`."""
    if layout == "copy":
        return [tensor]
    if layout == "gate_up":
        return list(tensor.chunk(2, 0))
    groups, head, hidden = facts.kv_heads, facts.head_dim, tensor.shape[1]
    queries = facts.heads // groups * head
    parts = tensor.view(groups, queries + 2 * head, hidden).split([queries, head, head], 1)
    return [part.reshape(-1, hidden) for part in parts]


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, path: Path, *, first_expert: int) -> None:
    """Fill a GPTModel from a Hugging Face checkpoint folder. Reads only this rank's tensors.

    Raises ConfigError naming a tensor that is missing or misshapen.
    """
    where = {name: file for name, (_, _, file) in checkpoint_tensors(path).items()}
    handles = {}
    for entry in entries(model, facts, first_expert=first_expert):
        tensors = []
        for name in entry.names:
            if name not in where:
                raise ConfigError(describe("the checkpoint lacks a tensor", where=str(path), expected=name))
            file = where[name]
            if file not in handles:
                handles[file] = safe_open(path / file, framework="pt")
            tensors.append(handles[file].get_tensor(name))
        tensor = join(tensors, entry.layout, facts)
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
    model: torch.nn.Module,
    facts: ModelFacts,
    *,
    first_expert: int,
    dense: bool,
    experts: bool,
    get: Callable[[torch.nn.Parameter], torch.Tensor] = lambda p: p.data,
) -> dict[str, torch.Tensor]:
    """This rank's share of the model under Hugging Face names.

    dense, experts: which of the two to give, so that replicas do not repeat each other. get: what to export of a
    parameter, its data by default.
    """
    tensors = {}
    for entry in entries(model, facts, first_expert=first_expert):
        if experts if entry.is_expert else dense:
            tensors.update(zip(entry.names, split(get(entry.parameter), entry.layout, facts), strict=True))
    return tensors
