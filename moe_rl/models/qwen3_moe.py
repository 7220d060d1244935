"""Describes Qwen3-MoE (30B-A3B, 235B-A22B): norms of queries and keys, softmax routing, and some dense layers."""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, ModelFacts, Rope, yarn_without_scales
from moe_rl.models.weight_table import Weight, dense_mlp, grouped_query_attention, routed_mlp, separate_experts

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPES = ("qwen3_moe",)
ROPE_THETA, ROTARY_FRACTION = 10000.0, 1.0  # where config.json has no such key


def facts(read: Fields, *, layers: int, top_k: int, rope: Rope) -> dict[str, Any]:
    """Read the fields of ModelFacts that are specific to this family. Problems are collected in `read`."""
    step, mlp_only = read.count("decoder_sparse_step", default=1), read.raw.get("mlp_only_layers")
    mlp_only = [] if mlp_only is None else mlp_only
    if not (isinstance(mlp_only, list) and all(type(n) is int and 0 <= n < layers for n in mlp_only)):
        read.wrong("mlp_only_layers", mlp_only, f"layer numbers from 0 to {layers - 1}")
        mlp_only = []
    moe_layers = tuple(n for n in range(layers) if n not in mlp_only and (n + 1) % step == 0)
    if not moe_layers:
        read.wrong("mlp_only_layers", mlp_only, "a layer with experts: a dense model has no routes to replay")
    norm_topk_prob = read.flag("norm_topk_prob", False)
    if top_k == 1 and norm_topk_prob:
        read.wrong(
            "norm_topk_prob",
            True,
            "false with one expert per token: its weight would always be 1, and the router could not learn",
        )
    read.only("attention_bias", False)
    read.only("use_sliding_window", False)
    if read.raw.get("sliding_window") is not None:  # has no effect, but must be a number
        read.count("sliding_window", least=0)
    read.only("shared_expert_intermediate_size", 0)
    rope.whole(read)
    return {
        "moe_layers": moe_layers,
        "num_experts": read.count("num_experts", "num_local_experts", least=2, most=2048),
        "moe_intermediate_size": read.count("moe_intermediate_size"),
        "score_function": "softmax",
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling": 1.0,
        "expert_bias": False,
        "groups": 1,
        "top_groups": 1,
        "shared_intermediate_size": 0,
        "attention_bias": False,
        "qk_norm": True,
        "mtp_layers": 0,
        "yarn": yarn_without_scales(read, rope),
    }


def layer_weights(facts: ModelFacts, *, has_experts: bool) -> tuple[Weight, ...]:
    """Return the weights of a layer."""
    attention = grouped_query_attention(facts)
    if not has_experts:
        return *attention, *dense_mlp(facts)
    return *attention, *routed_mlp(facts, "gate"), *separate_experts(facts)
