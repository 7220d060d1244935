"""What config.json of a GLM-4.5 model says about its layers: leading dense ones, shared experts, sigmoid routing with
an expert bias, rotary embedding of a part of each head."""

from __future__ import annotations

from typing import Any

from moe_rl.config.model_facts import Fields

ARCHITECTURE = "Glm4MoeForCausalLM"


def facts(read: Fields, *, layers: int, top_k: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelFacts that this family reads in its own way; problems are left in `read`."""
    dense = read.count("first_k_dense_replace", default=1, least=0)
    if dense >= layers:
        read.wrong("first_k_dense_replace", dense, f"below num_hidden_layers = {layers}: no layer has routes to replay")
    experts = read.count("n_routed_experts", "num_local_experts", least=2, most=2048)
    # Megatron always divides a token's sigmoid scores by their sum, but does not for one expert a token.
    read.only("norm_topk_prob", True)
    if top_k == 1:
        read.wrong("num_experts_per_tok", 1, "at least 2: the one expert's weight is always the same, no router learns")
    groups, top_groups = _groups(read, experts, top_k)
    width = read.count("moe_intermediate_size")
    fraction = rope.get("partial_rotary_factor", read.raw.get("partial_rotary_factor", 0.5))
    return {
        "moe_layers": tuple(range(dense, layers)),
        "num_experts": experts,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling": read.number("routed_scaling_factor", read.raw.get("routed_scaling_factor", 1.0)),
        "expert_bias": True,
        "groups": groups,
        "top_groups": top_groups,
        "shared_intermediate_size": width * read.count("n_shared_experts", default=1),
        "attention_bias": read.flag("attention_bias", False),
        "qk_norm": read.flag("use_qk_norm", False),
        "rotary_fraction": read.number("partial_rotary_factor", fraction),
        "mtp_layers": read.count("num_nextn_predict_layers", default=0, least=0, most=8),
    }


def _groups(read: Fields, experts: int, top_k: int) -> tuple[int, int]:
    """(n_group, topk_group); (1, 1) where tokens choose from all groups."""
    groups, top_groups = read.count("n_group", default=1), read.count("topk_group", default=1)
    if experts % groups:
        read.wrong("n_group", groups, f"a divisor of n_routed_experts = {experts}")
    elif top_groups > groups:
        read.wrong("topk_group", top_groups, f"at most n_group = {groups}")
    elif top_groups * (experts // groups) < top_k:
        read.wrong("topk_group", top_groups, f"groups with num_experts_per_tok = {top_k} experts together")
    elif top_groups == groups:
        return 1, 1
    # The model scores a group by its two best experts, megatron by its best top_k // topk_group.
    elif top_k // top_groups != 2:
        read.wrong("topk_group", top_groups, f"half of num_experts_per_tok = {top_k}: megatron ranks groups otherwise")
    return groups, top_groups
