"""What config.json of a Qwen3-MoE model says about its layers: query and key norms, softmax routing."""

from __future__ import annotations

from typing import Any

from moe_rl.config.model_facts import Fields

ARCHITECTURE = "Qwen3MoeForCausalLM"


def facts(read: Fields, *, layers: int, top_k: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelFacts that this family reads in its own way; problems are left in `read`."""
    step, mlp_only = read.count("decoder_sparse_step", default=1), read.raw.get("mlp_only_layers") or []
    if not (isinstance(mlp_only, list) and all(type(n) is int and 0 <= n < layers for n in mlp_only)):
        read.wrong("mlp_only_layers", mlp_only, f"layer numbers from 0 to {layers - 1}")
        mlp_only = []
    moe_layers = tuple(n for n in range(layers) if n not in mlp_only and (n + 1) % step == 0)
    if not moe_layers:
        read.wrong("mlp_only_layers", mlp_only, "a layer with experts: a dense model has no routes to replay")
    norm_topk_prob = read.flag("norm_topk_prob", False)
    if top_k == 1 and norm_topk_prob:
        read.wrong("norm_topk_prob", True, "false with one expert a token: its weight is always 1, no router learns")
    read.only("attention_bias", False)
    read.only("use_sliding_window", False)
    return {
        "moe_layers": moe_layers,
        "num_experts": read.count("num_experts", "num_local_experts", least=2, most=2048),
        "score_function": "softmax",
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling": 1.0,
        "expert_bias": False,
        "groups": 1,
        "top_groups": 1,
        "shared_intermediate_size": 0,
        "attention_bias": False,
        "qk_norm": True,
        "rotary_fraction": 1.0,
        "mtp_layers": 0,
    }
