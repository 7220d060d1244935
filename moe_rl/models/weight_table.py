"""Builds the tables of a model's weights: their names and layouts in a Hugging Face checkpoint and in megatron.

A family's file composes the weights of its layers from the functions below. The tables give the tensors that a
checkpoint must have, the number of parameters, and what each rank reads and writes (`moe_rl/megatron/hf_map.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe_rl.models.facts import ModelFacts

Shape = tuple[int, ...]
Arrangement = Literal["copy", "qkv", "gate_up", "transposed", "gate_up_columns"]
Experts = Literal["", "each", "stacked"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Name the embedding and the output matrix in the checkpoints of all families."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Describes one megatron parameter (or expert bias) and the Hugging Face tensors that form it.

    parameter: the name within a layer, or within the model, for layers of torch operations.
    fused: the name for TransformerEngine layers, which merge some norms with the following projection, and all experts
        into one module. "": the same name.
    tensors: {name within the layer, or within the checkpoint: shape}.
    layout: how the tensors form the parameter:
        copy            the tensor unchanged
        qkv             for each key-value group its query heads, then its k, then its v
        gate_up         gate above up
        transposed      columns become rows
        gate_up_columns gate and up alternate as columns; they become rows, gate above up
    axis: the axis of the tensors along which tensor-parallel ranks hold equal parts. None: every rank holds all.
    experts: "each": {expert} in the names stands for the number of an expert. The parameter's name counts the experts
        of the rank, the tensors' names count all experts. "stacked": only the parameter's name has {expert}; the
        tensors have a leading axis of experts.
    copied: the first pipeline stage has a parameter with the same tensors, whose values count for both.
    """

    parameter: str
    tensors: Mapping[str, Shape]
    layout: Arrangement = "copy"
    axis: int | None = None
    experts: Experts = ""
    fused: str = ""
    copied: bool = False


def ends(facts: ModelFacts, *, first: bool, last: bool) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Return the weights before and after the layers of a pipeline stage.

    A tied embedding is also the output matrix. If the last stage is not the first, it has a copy.

    Args:
        first, last: whether the stage is the first, and whether it is the last.
    """
    matrix = (facts.vocab, facts.hidden_size)
    embedding = Weight("embedding.word_embeddings.weight", {EMBEDDING: matrix}, axis=0)
    norm = Weight("decoder.final_layernorm.weight", {"model.norm.weight": (facts.hidden_size,)})
    tied = facts.tie_word_embeddings
    head = Weight("output_layer.weight", {EMBEDDING if tied else HEAD: matrix}, axis=0, copied=tied)
    back = (norm,) if tied and first else (norm, head)
    return (embedding,) if first else (), back if last else ()


def grouped_query_attention(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return attention and its norm, with biases, norms of queries and keys, and sinks where the model has them."""
    hidden, head_dim, width = facts.hidden_size, facts.head_dim, facts.heads * facts.head_dim
    rows = {"q": width, "k": facts.kv_heads * head_dim, "v": facts.kv_heads * head_dim}
    fused_norm = "self_attention.linear_qkv.layer_norm_weight"
    out = [
        _norm("input_layernorm.weight", "input_layernorm.weight", hidden, fused_norm),
        Weight(
            "self_attention.linear_qkv.weight",
            {f"self_attn.{kind}_proj.weight": (count, hidden) for kind, count in rows.items()},
            "qkv",
            0,
        ),
        Weight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, width)}, axis=1),
    ]
    if facts.attention_bias:
        biases = {f"self_attn.{kind}_proj.bias": (count,) for kind, count in rows.items()}
        out.append(Weight("self_attention.linear_qkv.bias", biases, "qkv", 0))
    if facts.linear_bias:
        out.append(Weight("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": (hidden,)}))
    if facts.qk_norm:
        out += [
            _norm(f"self_attention.{kind}_layernorm.weight", f"self_attn.{kind}_norm.weight", head_dim) for kind in "qk"
        ]
    if facts.sinks:
        out.append(Weight("self_attention.core_attention.softmax_offset", {"self_attn.sinks": (facts.heads,)}, axis=0))
    return tuple(out)


def latent_attention(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return multi-head latent attention and its norm. The down-projections are whole on every rank."""
    latent, hidden = facts.latent, facts.hidden_size
    assert latent is not None  # set by every family with this attention
    queries = facts.heads * (latent.nope_dim + latent.rope_dim)
    kv_up = (facts.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    ours, theirs = "self_attention.", "self_attn."
    out = [
        _norm("input_layernorm.weight", "input_layernorm.weight", hidden),
        Weight(
            ours + "linear_kv_down_proj.weight",
            {theirs + "kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope_dim, hidden)},
        ),
        _norm(
            ours + "kv_layernorm.weight",
            theirs + "kv_a_layernorm.weight",
            latent.kv_rank,
            ours + "linear_kv_up_proj.layer_norm_weight",
        ),
        Weight(ours + "linear_kv_up_proj.weight", {theirs + "kv_b_proj.weight": kv_up}, axis=0),
        Weight(
            ours + "linear_proj.weight", {theirs + "o_proj.weight": (hidden, facts.heads * latent.value_dim)}, axis=1
        ),
    ]
    if not latent.q_rank:
        out.append(Weight(ours + "linear_q_proj.weight", {theirs + "q_proj.weight": (queries, hidden)}, axis=0))
        return tuple(out)
    return (
        *out,
        Weight(ours + "linear_q_down_proj.weight", {theirs + "q_a_proj.weight": (latent.q_rank, hidden)}),
        _norm(
            ours + "q_layernorm.weight",
            theirs + "q_a_layernorm.weight",
            latent.q_rank,
            ours + "linear_q_up_proj.layer_norm_weight",
        ),
        Weight(ours + "linear_q_up_proj.weight", {theirs + "q_b_proj.weight": (queries, latent.q_rank)}, axis=0),
    )


def dense_mlp(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return the MLP of a layer without experts, and its norm."""
    norm = _norm(
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        facts.hidden_size,
        "mlp.linear_fc1.layer_norm_weight",
    )
    return norm, *_swiglu("mlp", "mlp", facts.hidden_size, facts.intermediate_size)


def routed_mlp(facts: ModelFacts, router: str) -> tuple[Weight, ...]:
    """Return the norm, the router and the shared experts of a layer with experts. router: its name in the
    checkpoint.
    """
    hidden, experts = facts.hidden_size, facts.num_experts
    out = [
        _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        Weight("mlp.router.weight", {f"mlp.{router}.weight": (experts, hidden)}),
    ]
    if facts.linear_bias:
        out.append(Weight("mlp.router.bias", {f"mlp.{router}.bias": (experts,)}))
    if facts.expert_bias:
        out.append(Weight("mlp.router.expert_bias", {f"mlp.{router}.e_score_correction_bias": (experts,)}))
    if facts.shared_intermediate_size:
        out += _swiglu("mlp.shared_experts", "mlp.shared_experts", hidden, facts.shared_intermediate_size)
    return tuple(out)


def separate_experts(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return the weights of experts that have their own tensors."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    ours, theirs = "mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"
    fused = ("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.linear_fc2.weight{expert}")
    return _swiglu(ours, theirs, hidden, width, experts="each", fused=fused)


def stacked_experts(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return the weights of experts in stacked tensors [experts, ...], whose matrices have inputs as rows, with
    biases.
    """
    experts, hidden, width = facts.num_experts, facts.hidden_size, facts.moe_intermediate_size
    rows: tuple[tuple[str, str, Shape, Arrangement], ...] = (
        ("linear_fc1.weight", "gate_up_proj", (experts, hidden, 2 * width), "gate_up_columns"),
        ("linear_fc1.bias", "gate_up_proj_bias", (experts, 2 * width), "gate_up_columns"),
        ("linear_fc2.weight", "down_proj", (experts, width, hidden), "transposed"),
        ("linear_fc2.bias", "down_proj_bias", (experts, hidden), "copy"),
    )
    return tuple(
        Weight(
            f"mlp.experts.local_experts.{{expert}}.{ours}",
            {f"mlp.experts.{theirs}": shape},
            layout,
            experts="stacked",
            fused=f"mlp.experts.{ours}{{expert}}",
        )
        for ours, theirs, shape, layout in rows
    )


def _norm(ours: str, theirs: str, width: int, fused: str = "") -> Weight:
    return Weight(ours, {theirs: (width,)}, fused=fused)


def _swiglu(
    ours: str, theirs: str, hidden: int, width: int, *, experts: Experts = "", fused: tuple[str, str] = ("", "")
) -> tuple[Weight, ...]:
    gate_up = {f"{theirs}.{kind}_proj.weight": (width, hidden) for kind in ("gate", "up")}
    down = {f"{theirs}.down_proj.weight": (hidden, width)}
    return (
        Weight(f"{ours}.linear_fc1.weight", gate_up, "gate_up", 0, experts, fused[0]),
        Weight(f"{ours}.linear_fc2.weight", down, "copy", 1, experts, fused[1]),
    )
