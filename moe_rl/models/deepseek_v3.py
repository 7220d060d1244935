"""DeepSeek-V3 and Moonlight: multi-head latent attention, leading dense layers, shared experts, sigmoid routing with an
expert bias among groups."""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, LatentAttentionSizes, ModelFacts, sigmoid_routing, yarn
from moe_rl.models.weight_table import Weight, dense_mlp, latent_attention, routed_mlp, separate_experts

ARCHITECTURE = "DeepseekV3ForCausalLM"


def facts(read: Fields, *, layers: int, top_k: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelFacts that this family reads in its own way; problems are left in `read`."""
    read.only("attention_bias", False)
    # Pairs of neighbouring dimensions are rotated, which is how megatron reads these weights.
    read.only("rope_interleave", True)
    read.only("moe_layer_freq", 1)
    # transformers leaves these out when it saves, having no other routing; vLLM would then route otherwise, or fail.
    for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if read.raw.get(key) != value:
            read.wrong(key, read.raw.get(key), f"{value!r}, said in so many words: vLLM asks for it")
    if "q_lora_rank" not in read.raw:  # transformers then has a default, which is no null
        read.wrong("q_lora_rank", "nothing", "a number or null")
    latent = LatentAttentionSizes(
        q_rank=read.count("q_lora_rank", default=0, least=0),
        kv_rank=read.count("kv_lora_rank"),
        nope_dim=read.count("qk_nope_head_dim"),
        rope_dim=read.count("qk_rope_head_dim"),
        value_dim=read.count("v_head_dim"),
    )
    if latent.value_dim > latent.nope_dim + latent.rope_dim:
        read.wrong("v_head_dim", latent.value_dim, "at most qk_nope_head_dim + qk_rope_head_dim")
    if latent.rope_dim % 2:
        read.wrong("qk_rope_head_dim", latent.rope_dim, "an even number")
    stretched = yarn(read, rope)
    if stretched is not None and not stretched.truncate:
        read.wrong("rope_parameters.truncate", False, "true: megatron's latent attention rounds")
    heads = read.count("num_attention_heads")
    return sigmoid_routing(read, layers=layers, top_k=top_k, dense_default=3) | {
        "kv_heads": heads,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "latent": latent,
        "yarn": stretched,
        "attention_bias": False,
        "qk_norm": False,
        "rotary_fraction": 1.0,
        "mtp_layers": read.count("num_nextn_predict_layers", default=0, least=0, most=8),
    }


def layer_weights(facts: ModelFacts, *, has_experts: bool) -> tuple[Weight, ...]:
    """The weights of a layer."""
    attention = latent_attention(facts)
    if not has_experts:
        return *attention, *dense_mlp(facts)
    return *attention, *routed_mlp(facts, "gate"), *separate_experts(facts)
