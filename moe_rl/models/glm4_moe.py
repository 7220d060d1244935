"""Describes GLM-4.5 and GLM-4.5-Air.

They have leading dense layers, shared experts, sigmoid routing with an expert bias, and rotary position on a part of
each head.
"""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, ModelFacts, sigmoid_routing
from moe_rl.models.weight_table import Weight, dense_mlp, grouped_query_attention, routed_mlp, separate_experts

ARCHITECTURE = "Glm4MoeForCausalLM"


def facts(read: Fields, *, layers: int, top_k: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of ModelFacts that are special to this family. Problems are collected in `read`."""
    read.plain_rope(rope)
    fraction = rope.get("partial_rotary_factor", read.raw.get("partial_rotary_factor", 0.5))
    return sigmoid_routing(read, layers=layers, top_k=top_k, dense_default=1) | {
        "attention_bias": read.flag("attention_bias", False),
        "qk_norm": read.flag("use_qk_norm", False),
        "rotary_fraction": read.number("partial_rotary_factor", fraction),
        "mtp_layers": read.count("num_nextn_predict_layers", default=0, least=0, most=8),
    }


def layer_weights(facts: ModelFacts, *, has_experts: bool) -> tuple[Weight, ...]:
    """Return the weights of a layer."""
    attention = grouped_query_attention(facts)
    if not has_experts:
        return *attention, *dense_mlp(facts)
    return *attention, *routed_mlp(facts, "gate"), *separate_experts(facts)
