"""Describes gpt-oss (20b, 120b).

It has attention sinks, a sliding window in every second layer, biases, a clamped SwiGLU, and experts in stacked
tensors.
"""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, ModelFacts, yarn
from moe_rl.models.weight_table import Weight, grouped_query_attention, routed_mlp, stacked_experts

ARCHITECTURE = "GptOssForCausalLM"


def facts(read: Fields, *, layers: int, top_k: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of ModelFacts that are special to this family. Problems are collected in `read`."""
    read.only("attention_bias", True)
    read.only("swiglu_alpha", 1.702)
    if not rope:
        read.wrong("rope_scaling", None, "the published values: without the key transformers uses defaults of its own")
    if top_k == 1:
        read.wrong(
            "num_experts_per_tok", 1, "at least 2: with one expert its weight is always 1 and the router cannot learn"
        )
    kinds = read.raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not (isinstance(kinds, list) and len(kinds) == layers and all(kind in known for kind in kinds)):
        read.wrong("layer_types", kinds, f"{layers} of {' and '.join(known)}")
        kinds = []
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return {
        "moe_layers": tuple(range(layers)),
        "num_experts": read.count("num_local_experts", "num_experts", least=2, most=2048),
        "moe_intermediate_size": read.count("intermediate_size"),
        "score_function": "softmax",
        "norm_topk_prob": True,
        "routed_scaling": 1.0,
        "expert_bias": False,
        "groups": 1,
        "top_groups": 1,
        "shared_intermediate_size": 0,
        "attention_bias": True,
        "qk_norm": False,
        "rotary_fraction": 1.0,
        "mtp_layers": 0,
        "yarn": yarn(read, rope),
        "window": read.count("sliding_window") if windowed else 0,
        "windowed_layers": windowed,
        "sinks": True,
        "linear_bias": True,
        "glu_clamp": read.number("swiglu_limit", read.raw.get("swiglu_limit", 7.0)),
    }


def layer_weights(facts: ModelFacts, *, has_experts: bool) -> tuple[Weight, ...]:
    """Return the weights of a layer. All layers have experts."""
    return *grouped_query_attention(facts), *routed_mlp(facts, "router"), *stacked_experts(facts)
