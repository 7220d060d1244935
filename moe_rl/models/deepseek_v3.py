"""Describes DeepSeek-V3 and Moonlight.

They have multi-head latent attention, leading dense layers, shared experts, and sigmoid routing with an expert bias and
expert groups.
"""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, LatentAttentionSizes, ModelFacts, Rope, SigmoidDefaults, sigmoid_routing, yarn
from moe_rl.models.weight_table import Weight, dense_mlp, latent_attention, routed_mlp, separate_experts

ARCHITECTURE = "DeepseekV3ForCausalLM"
MODEL_TYPES = ("deepseek_v3", "kimi_k2")  # for the second, vLLM takes the config class of the first
ROPE_THETA, ROTARY_FRACTION = 10000.0, 1.0  # where config.json has no such key
ROUTING = SigmoidDefaults(first_k_dense_replace=3, n_group=8, topk_group=4, routed_scaling_factor=2.5)


def facts(read: Fields, *, layers: int, top_k: int, rope: Rope) -> dict[str, Any]:
    """Read the fields of ModelFacts that are specific to this family. `read` collects the problems."""
    read.only("attention_bias", False)
    # These models rotate pairs of neighbouring dimensions, and megatron reads the weights in the same way.
    read.only("rope_interleave", True)
    read.only("moe_layer_freq", 1)
    # transformers omits these keys when it saves, because it has only this routing. vLLM would then route differently
    # or fail.
    for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if read.raw.get(key) != value:
            read.wrong(key, read.raw.get(key), f"{value!r}, written out: vLLM needs the key")
    if "q_lora_rank" not in read.raw:  # without the key transformers uses a default that is not null
        read.wrong("q_lora_rank", "nothing", "a number or null")
    latent = LatentAttentionSizes(
        q_rank=0 if read.raw.get("q_lora_rank") is None else read.count("q_lora_rank"),
        kv_rank=read.count("kv_lora_rank"),
        nope_dim=read.count("qk_nope_head_dim"),
        rope_dim=read.count("qk_rope_head_dim"),
        value_dim=read.count("v_head_dim"),
    )
    if latent.value_dim > latent.nope_dim + latent.rope_dim:
        read.wrong("v_head_dim", latent.value_dim, "at most qk_nope_head_dim + qk_rope_head_dim")
    if latent.rope_dim % 2:
        read.wrong("qk_rope_head_dim", latent.rope_dim, "an even number")
    read.only("head_dim", latent.rope_dim, why="qk_rope_head_dim has it")
    read.only("sliding_window", None, why="vLLM would use it, transformers would not")
    rope.whole(read)
    stretched = yarn(read, rope)
    if stretched is not None and not stretched.truncate:
        read.wrong(f"{rope.key}.truncate", False, "true: megatron's latent attention computes in train.dtype")
    heads = read.count("num_attention_heads")
    return sigmoid_routing(read, layers=layers, top_k=top_k, default=ROUTING) | {
        "kv_heads": heads,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "latent": latent,
        "yarn": stretched,
        "attention_bias": False,
        "qk_norm": False,
    }


def layer_weights(facts: ModelFacts, *, has_experts: bool) -> tuple[Weight, ...]:
    """Return the weights of a layer."""
    attention = latent_attention(facts)
    if not has_experts:
        return *attention, *dense_mlp(facts)
    return *attention, *routed_mlp(facts, "gate"), *separate_experts(facts)
