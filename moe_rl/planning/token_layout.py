"""Computes the positions of packed sequences, and which of them a context-parallel rank holds.

A packed run is a row of sequences. Each sequence is padded at its end where context-parallel ranks share it. The
padding after the last sequence counts as a separate sequence. Each sequence is divided into 2 C equal chunks; rank c of
C holds the chunks c and 2 C - 1 - c. This is megatron's zig-zag, which gives every rank the same cost of causal
attention. The tokens of a sequence never attend to its padding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

# Rows of a rank are rounded up to a multiple of this, so that kernels see few sizes. Every parallel.tensor divides it.
PAD_MULTIPLE = 8


def padded_length(tokens: int, ranks: int = 1) -> int:
    """Return the rows of a run of `tokens` tokens on all `ranks` together. Never 0, because a rank without sequences
    takes part too.
    """
    multiple = PAD_MULTIPLE * ranks
    return max(multiple, -(-tokens // multiple) * multiple)


def padded_lengths(tokens: Seq[int], ranks: int = 1) -> tuple[int, ...]:
    """Return the rows of each sequence, and at the end those of the padding after them, if there is any."""
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = tuple(-(-count // chunks) * chunks for count in tokens)
    padding = padded_length(sum(lengths), ranks) - sum(lengths)
    return (*lengths, padding) if padding else lengths


def positions_of(length: int, rank: int, ranks: int) -> np.ndarray:
    """Return int64 [length / ranks]: the positions in a sequence of `length` rows that a rank holds, in the rank's
    order.
    """
    if ranks == 1:
        return np.arange(length)
    chunk = length // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])


def rows_of(lengths: Seq[int], rank: int, ranks: int) -> np.ndarray:
    """Return int64 [T / ranks]: the rows of a run of sum(lengths) = T rows that a rank holds, in the rank's order."""
    starts = np.cumsum((0, *lengths))
    return np.concatenate([start + positions_of(n, rank, ranks) for start, n in zip(starts, lengths, strict=False)])


def padding_experts(rows: int, experts: int, top_k: int, expert_parallel: int) -> np.ndarray:
    """Return int64 [rows, top_k]: experts for padding rows, distinct in a row and spread over expert-parallel ranks
    first.

    If all padding went to one expert or one rank, that rank would be the slowest of the step.
    """
    order = (
        np.arange(experts).reshape(expert_parallel, -1).T.ravel()
    )  # expert 0 of each rank, then expert 1 of each rank
    return order[np.arange(rows * top_k).reshape(rows, top_k) % experts]
