"""Chooses experts: a router's own top-k, and the weights of given experts. `replay_topk` is the whole of replay for a
trainer that routes in a function, such as one on FSDP.

Legend for shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_rl.errors import ReplayError


def replay_topk(
    scores: Tensor,
    routes: Tensor,
    *,
    weights: Literal["softmax", "renormalised", "plain"] = "softmax",
    without: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the place of `torch.topk` in a router: return the weights of the recorded experts, and the experts.

    The weights come from the live scores, gathered at the recorded experts, so the router has a gradient also where
    it would choose others. Nothing is detached, and nothing is read back from the device.

    Args:
        scores: [T, E]. For "softmax" the router's logits; otherwise what the weights are taken from: softmax or sigmoid
            of the logits, without the bias that only ranks.
        routes: integers [T, K], the recorded experts.
        weights: "softmax" of the K logits; the K scores divided by their sum ("renormalised"); or as they are.
        without: bool [T], rows without a record. Their experts are the K best by `scores`.

    Returns:
        Weights [T, K] in the dtype of scores, and int64 [T, K].

    Raises:
        ReplayError: routes and scores do not have the same rows, routes are no integers, or there are no such weights.
    """
    if weights not in ("softmax", "renormalised", "plain"):
        raise ReplayError(
            "unknown weights of the recorded experts",
            where={"argument": "weights"},
            got=repr(weights),
            expected="softmax, renormalised or plain",
            fault="weights",
        )
    wrong_type = routes.dtype.is_floating_point or routes.dtype is torch.bool
    if routes.ndim != 2 or len(routes) != len(scores) or wrong_type:
        raise ReplayError(
            "routes do not fit the scores",
            where={"argument": "routes"},
            got=f"{routes.dtype} of shape {tuple(routes.shape)}",
            expected=f"integers of shape [{len(scores)}, K]",
            do="cut the routes like the tokens that this rank's router sees",
            fault="rows",
        )
    ids = routes.long()
    if without is not None:
        ids = torch.where(without[:, None], scores.detach().topk(ids.shape[1])[1], ids)
    chosen = scores.gather(1, ids)
    if weights == "softmax":
        chosen = chosen.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    elif weights == "renormalised":
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen, ids


def own_choice(scores: Tensor, top_k: int, groups: int = 1, top_groups: int = 0) -> Tensor:
    """Return the experts int64 [T, K] that a router with these scores [T, E] chooses by itself. top_groups: how many
    groups it chooses first; 0: all."""
    allowed = of_best_groups(scores, groups, top_groups) if top_groups else scores
    return allowed.topk(top_k)[1]


def of_best_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """Set the scores [T, E] outside each token's best groups to minus infinity.

    A group's score is the sum of its two best experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Megatron sums the
    best top_k // top_groups experts instead.
    """
    grouped = scores.unflatten(1, (groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)
