"""gpt-oss (20b, 120b): attention sinks, a sliding window in every second layer, biases, a clamped SwiGLU, experts in
stacked tensors."""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, ModelFacts, yarn
from moe_rl.models.weight_table import Weight, grouped_query_attention, routed_mlp, stacked_experts

ARCHITECTURE = "GptOssForCausalLM"


def facts(read: Fields, *, layers: int, top_k: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelFacts that this family reads in its own way; problems are left in `read`."""
    read.only("attention_bias", True)
    read.only("swiglu_alpha", 1.702)
    if not rope:
        read.wrong("rope_scaling", None, "what is published: without it transformers takes numbers of its own")
    if top_k == 1:
        read.wrong("num_experts_per_tok", 1, "at least 2: the one expert's weight is always 1, no router learns")
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
    """The weights of a layer; every one has experts."""
    return *grouped_query_attention(facts), *routed_mlp(facts, "router"), *stacked_experts(facts)
