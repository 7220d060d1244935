"""Describes GLM-4.5 and GLM-4.5-Air.

They have leading dense layers, shared experts, sigmoid routing with an expert bias, and rotary position on a part of
each head.
"""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, Rope, SigmoidDefaults, sigmoid_routing
from moe_rl.models.qwen3_moe import layer_weights as layer_weights

ARCHITECTURE = "Glm4MoeForCausalLM"
MODEL_TYPES = ("glm4_moe",)
ROPE_THETA, ROTARY_FRACTION = 10000.0, 0.5  # where config.json has no such key
ROUTING = SigmoidDefaults(first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=1.0)


def facts(read: Fields, *, layers: int, top_k: int, rope: Rope) -> dict[str, Any]:
    """Read the fields of ModelFacts that are specific to this family. `read` collects the problems."""
    read.only("sliding_window", None, why="vLLM would use it, transformers would not")
    rope.plain(read)
    return sigmoid_routing(read, layers=layers, top_k=top_k, default=ROUTING) | {
        "attention_bias": read.flag("attention_bias", False),
        "qk_norm": read.flag("use_qk_norm", False),
    }
