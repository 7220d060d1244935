"""Where the tokens of packed sequences lie, and which of them a context-parallel rank holds.

A packed run is sequences end to end, each padded at its end where ranks share it, and behind them padding that counts
as a sequence of its own. Each sequence is cut into 2 C equal chunks; rank c of C holds the chunks c and 2 C - 1 - c,
megatron's zig-zag: causal attention then costs every rank the same. Padding at the end of a sequence is never seen by
its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

# The rows of a rank are rounded up to this, so that kernels see few sizes; every parallel.tensor divides it.
PAD_MULTIPLE = 8


def padded_length(tokens: int, ranks: int = 1) -> int:
    """Rows of a run of so many, on all `ranks` together. Never 0: a rank without a sequence still takes part."""
    multiple = PAD_MULTIPLE * ranks
    return max(multiple, -(-tokens // multiple) * multiple)


def padded_lengths(tokens: Seq[int], ranks: int = 1) -> tuple[int, ...]:
    """Rows of each sequence of so many tokens, and last, if there is any, of the padding behind them."""
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = tuple(-(-count // chunks) * chunks for count in tokens)
    padding = padded_length(sum(lengths), ranks) - sum(lengths)
    return (*lengths, padding) if padding else lengths


def positions_of(length: int, rank: int, ranks: int) -> np.ndarray:
    """Positions int64 [length / ranks] in a sequence of `length` rows that a rank holds, in its order."""
    if ranks == 1:
        return np.arange(length)
    chunk = length // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])


def rows_of(lengths: Seq[int], rank: int, ranks: int) -> np.ndarray:
    """Rows int64 [T / ranks] of a run of sum(lengths) = T rows that a rank holds, in its order."""
    starts = np.cumsum((0, *lengths))
    return np.concatenate([start + positions_of(n, rank, ranks) for start, n in zip(starts, lengths, strict=False)])


def padding_experts(rows: int, experts: int, top_k: int, expert_parallel: int) -> np.ndarray:
    """Experts int64 [rows, top_k] that padding rows go to: distinct in a row, spread over expert-parallel ranks first.

    Padding routed to one expert, or to one rank, would make that rank the slowest of the step.
    """
    order = np.arange(experts).reshape(expert_parallel, -1).T.ravel()  # expert 0 of each rank, then expert 1
    return order[np.arange(rows * top_k).reshape(rows, top_k) % experts]
