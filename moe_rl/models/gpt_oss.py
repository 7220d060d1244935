"""Describes gpt-oss (20b, 120b).

It has attention sinks, a sliding window in every second layer, biases, a clamped SwiGLU, and experts in stacked
tensors.
"""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, ModelFacts, Rope, yarn_without_scales
from moe_rl.models.weight_table import Weight, grouped_query_attention, routed_mlp, stacked_experts

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPES = ("gpt_oss",)
ROPE_THETA, ROTARY_FRACTION = 150000.0, 1.0  # where config.json has no such key


def facts(read: Fields, *, layers: int, top_k: int, rope: Rope) -> dict[str, Any]:
    """Read the fields of ModelFacts that are specific to this family. `read` collects the problems."""
    read.only("attention_bias", True)
    # vLLM 0.32.0 has these values in its code, and does not read the keys.
    read.only("swiglu_alpha", 1.702)
    read.only("swiglu_limit", 7.0)
    read.only("rms_norm_eps", 1e-5)
    if "head_dim" not in read.raw:
        read.wrong("head_dim", None, "the published value: without the key transformers takes 64")
    rope.whole(read)
    scaled = yarn_without_scales(read, rope)
    if scaled is None:
        read.wrong(f"{rope.key}.rope_type", rope.given["rope_type"], "'yarn' with its numbers: vLLM knows no other")
    else:
        for key in ("beta_fast", "beta_slow"):
            if key not in rope.given:
                read.wrong(f"{rope.key}.{key}", None, "a number: vLLM needs the key")
    if top_k == 1:
        read.wrong(
            "num_experts_per_tok", 1, "at least 2: with one expert its weight is always 1 and the router cannot learn"
        )
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
        "mtp_layers": 0,
        "yarn": scaled,
        "window": read.count("sliding_window"),
        "windowed_layers": tuple(range(0, layers, 2)),
        "sinks": True,
        "linear_bias": True,
        "glu_clamp": 7.0,
    }


def layer_weights(facts: ModelFacts, *, has_experts: bool) -> tuple[Weight, ...]:
    """Return the weights of a layer. All layers have experts."""
    return *grouped_query_attention(facts), *routed_mlp(facts, "router"), *stacked_experts(facts)
