"""What config.json says of the routing that DeepSeek-V3 brought: sigmoid scores, a bias where experts are chosen,
groups of experts, shared experts, leading dense layers (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields


def routing(read: Fields, *, layers: int, top_k: int, dense_default: int) -> dict[str, Any]:
    """The fields of ModelFacts about layers with experts. dense_default: leading dense layers where none is said."""
    dense = read.count("first_k_dense_replace", default=dense_default, least=0)
    if dense >= layers:
        read.wrong("first_k_dense_replace", dense, f"below num_hidden_layers = {layers}: no layer has routes to replay")
    experts = read.count("n_routed_experts", "num_local_experts", least=2, most=2048)
    # Megatron always divides a token's sigmoid scores by their sum, but does not for one expert a token.
    read.only("norm_topk_prob", True)
    if top_k == 1:
        read.wrong("num_experts_per_tok", 1, "at least 2: the one expert's weight is always the same, no router learns")
    groups, top_groups = _groups(read, experts, top_k)
    width = read.count("moe_intermediate_size")
    return {
        "moe_layers": tuple(range(dense, layers)),
        "num_experts": experts,
        "moe_intermediate_size": width,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling": read.number("routed_scaling_factor", read.raw.get("routed_scaling_factor", 1.0)),
        "expert_bias": True,
        "groups": groups,
        "top_groups": top_groups,
        "shared_intermediate_size": width * read.count("n_shared_experts", default=1),
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
    # A group's score is the sum of its two best experts'.
    elif experts // groups < 2:
        read.wrong("n_group", groups, f"groups of at least 2 of the n_routed_experts = {experts}")
    return groups, top_groups
