"""Finds the tokens whose ratio to the sampler is too far from 1 for the update they are in, as M2PO does.

M2PO (arXiv 2510.01161, section 5 and algorithm 1) bounds the mean of (log r_t)^2 over the trust-region tokens of a
batch. These are the tokens that the loss pushes further away from the sampler: A_i > 0 and r_t > 1, or A_i < 0 and
r_t < 1. While the mean is above the limit, the token with the largest square is masked. The paper uses the limit 0.04.

Here log r_t = l_old_t - l_rollout_t, of the trainer's old policy, as in AReaL: the mask is then known before an update
begins. The batch is the whole update over all ranks, so that the mask does not depend on how it is divided. Tokens with
equal squares are masked or kept together, for the same reason. If every square is above the limit, all these tokens are
masked. AReaL looks at all tokens of a microbatch, whatever A_i, and always keeps the one with the smallest square.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


def squares(
    old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the squares of the log-ratios [T] float64, and bool [T]: which tokens are in the trust region.

    advantages: [B]; the others are [T]. If one of these is not finite, the square is NaN and in the trust region, so
    that the mean over the region shows it. No such token is kept, and the loss is then NaN.
    """
    log_ratio = old_logprobs.detach().double() - rollout_logprobs.detach().double()
    pushed = log_ratio * advantages.detach().double()[sequence_ids]
    return log_ratio * log_ratio + (pushed - pushed), (pushed > 0) | ~pushed.isfinite()


def largest_kept(in_region: np.ndarray, limit: float) -> float:
    """Return the largest square that is not masked; -inf if all are.

    Args:
        in_region: [M] float64, the squares of all trust-region tokens of an update, over all ranks, in any order.
        limit: the largest mean of those that are kept.
    """
    if not len(in_region):
        return np.inf
    ordered = np.sort(in_region)
    kept = int(np.count_nonzero(np.cumsum(ordered) <= limit * np.arange(1, len(ordered) + 1)))
    if kept < len(ordered):
        kept = int(np.searchsorted(ordered, ordered[kept]))  # squares equal to the first masked square are masked too
    return float(ordered[kept - 1]) if kept else -np.inf
