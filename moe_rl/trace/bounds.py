"""Computes how few bits a set of experts needs: for uniform routes, and given how popular each expert is.

Legend for shapes: L layers, E experts per layer, K top-k experts per token.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_STEPS = 200
_CLOSE = 1e-5


@lru_cache(maxsize=64)
def set_bits(num_experts: int, top_k: int) -> float:
    """Return log2 C(E, K): the bits of one set when all sets are equally likely."""
    return math.log2(math.comb(num_experts, top_k))


def order0_bits(counts_LE: np.ndarray, top_k: int) -> np.ndarray:
    """Return bits per set [L] of an ideal coder that knows only how popular each expert of a layer is.

    The coder uses the distribution of largest entropy with these popularities: P(set) is proportional to the product of
    its experts' weights, fitted to the counts. A layer without sets has 0 bits.

    Args:
        counts_LE: how often each expert was chosen; every row sums to K times the number of sets.
        top_k: experts per set.
    """
    counts_LE = np.asarray(counts_LE, np.float64)
    sets_L = counts_LE.sum(axis=1) / top_k
    bits_L = np.zeros(len(counts_LE))
    used = sets_L > 0
    if not used.any() or top_k == counts_LE.shape[1]:
        return bits_L
    chosen_LE = counts_LE[used] / sets_L[used, None]
    # An expert that is in every set would need infinite weight.
    most_L1 = 1 - 1 / (2 * sets_L[used, None] + 2)
    target_LE = np.minimum(chosen_LE, most_L1)
    odds_LE = target_LE / (1 - target_LE)
    weight_LE = odds_LE.copy()
    best_L = np.full(len(odds_LE), np.inf)
    for _ in range(_STEPS):
        model_LE, log_total_L = _inclusion(weight_LE, top_k)
        with np.errstate(divide="ignore"):
            log_weight_LE = np.where(chosen_LE > 0, np.log(weight_LE), 0.0)
        # Any weights give the length of a valid code, so an unfinished fit is still an upper bound.
        best_L = np.minimum(best_L, log_total_L - (chosen_LE * log_weight_LE).sum(axis=1))
        if np.abs(model_LE - target_LE).max() < _CLOSE:
            break
        model_odds_LE = model_LE / np.maximum(1 - model_LE, 1e-12)
        weight_LE *= np.where(odds_LE > 0, odds_LE / np.maximum(model_odds_LE, 1e-300), 0.0)
        weight_LE /= weight_LE.mean(axis=1, keepdims=True)
    bits_L[used] = best_L / math.log(2)
    return bits_L


def _inclusion(weight_LE: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability [L, E] that an expert is in a set of K, and the log [L] of the sum of all sets' weights.

    Computed with elementary symmetric polynomials of the weights before and after each expert.
    """
    layers, experts = weight_LE.shape
    before = np.zeros((experts + 1, layers, top_k + 1))
    after = np.zeros((experts + 1, layers, top_k + 1))
    before[0, :, 0] = after[experts, :, 0] = 1
    for e in range(experts):
        before[e + 1] = before[e]
        before[e + 1, :, 1:] += before[e, :, :-1] * weight_LE[:, e, None]
    for e in range(experts - 1, -1, -1):
        after[e] = after[e + 1]
        after[e, :, 1:] += after[e + 1, :, :-1] * weight_LE[:, e, None]
    total_L = before[experts, :, top_k]
    without_EL = (before[:-1, :, :top_k] * after[1:, :, top_k - 1 :: -1]).sum(axis=2)
    return weight_LE * without_EL.T / total_L[:, None], np.log(total_L)
