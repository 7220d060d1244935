"""Assigns sequences to optimizer updates, ranks and microbatches. Plain Python, deterministic.

Under expert parallelism all ranks exchange tokens in every layer of every microbatch. All ranks therefore run the same
number of microbatches, and a microbatch takes as long as its fullest rank.

Also computes the positions of packed sequences, and which of them a context-parallel rank holds.

A packed run is a row of sequences. Each sequence is padded at its end where context-parallel ranks share it. The
padding after the last sequence counts as a separate sequence. Each sequence is divided into 2 C equal chunks; rank c of
C holds the chunks c and 2 C - 1 - c. This is megatron's zig-zag, which gives every rank the same cost of causal
attention. The tokens of a sequence never attend to its padding.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence

import numpy as np

from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.errors import About, ArgumentError, ConfigError

# Rows of a rank are rounded up to a multiple of this, so that kernels see few sizes. Every parallel.tensor divides it.
PAD_MULTIPLE = 8
# Hopper multiplies float8 numbers only if a tensor-parallel rank's rows are a multiple of this.
_FLOAT8_MULTIPLE = 16


def wrong_call(
    what: str, got: object, expected: str, fault: str = "arguments", where: About | None = None
) -> ArgumentError:
    """Return the error for arguments that only a wrong caller gives."""
    do = "correct the caller"
    return ArgumentError(what, where=where or {}, got=got, expected=expected, do=do, fault=fault)


def row_multiple(train: TrainConfig, parallel: ParallelConfig) -> int:
    """Return the number of which the rows of a context-parallel rank are a multiple."""
    return _FLOAT8_MULTIPLE * parallel.tensor if train.megatron.get("fp8") else PAD_MULTIPLE


def padded_length(tokens: int, ranks: int = 1, multiple: int = PAD_MULTIPLE) -> int:
    """Return the rows of a run of `tokens` tokens on all `ranks` together, each of which has a multiple of `multiple`.
    Never 0, because a rank without sequences takes part too.
    """
    multiple *= ranks
    return max(multiple, -(-tokens // multiple) * multiple)


def padded_lengths(tokens: Sequence[int], ranks: int = 1, multiple: int = PAD_MULTIPLE) -> tuple[int, ...]:
    """Return the rows of each sequence, and at the end those of the padding after them, if there is any."""
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = tuple(-(-count // chunks) * chunks for count in tokens)
    padding = padded_length(sum(lengths), ranks, multiple) - sum(lengths)
    return (*lengths, padding) if padding else lengths


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Group packed sequences for layers that pad those of a group to its longest. Return their indices.

    All are in one group, unless this would give more than twice their rows. Then each group has lengths between two
    powers of two, so that no sequence gets twice its rows.
    """
    if len(lengths) * max(lengths) <= 2 * sum(lengths):
        return [list(range(len(lengths)))]
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length.bit_length(), []).append(index)
    return list(groups.values())


def positions_of(length: int, rank: int, ranks: int) -> np.ndarray:
    """Return int64 [length / ranks]: the positions in a sequence of `length` rows that a rank holds, in the rank's
    order.
    """
    if ranks == 1:
        return np.arange(length)
    chunk = length // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])


def rows_of(lengths: Sequence[int], rank: int, ranks: int) -> np.ndarray:
    """Return int64 [T / ranks]: the rows of a run of sum(lengths) = T rows that a rank holds, in the rank's order."""
    starts = np.cumsum((0, *lengths))
    return np.concatenate([start + positions_of(n, rank, ranks) for start, n in zip(starts, lengths, strict=False)])


def padding_experts(rows: int, experts: int, top_k: int, expert_parallel: int) -> np.ndarray:
    """Return int64 [rows, top_k]: experts for padding rows, distinct in a row and spread over expert-parallel ranks
    first.

    If all padding went to one expert or one rank, that rank would be the slowest of the step.
    """
    order = np.arange(experts).reshape(expert_parallel, -1).T.ravel()  # each rank's expert 0, then each rank's expert 1
    return order[np.arange(rows * top_k).reshape(rows, top_k) % experts]


# In shorter sequences attention is little of the work: about 7% at this length in Qwen3-30B-A3B.
_LONG = 1024
# Bins are of similar size if they differ by less than one part in this many.
_SIMILAR = 32


def pack(lengths: list[int], *, ranks: int, microbatch_tokens: int) -> list[list[list[int]]]:
    """Divide sequences among ranks and microbatches, balanced by tokens.

    Every sequence is placed exactly once, and no microbatch exceeds `microbatch_tokens`. All ranks have the same number
    of microbatches: the number that longest-processing-time-first packing reaches, or that of best-fit decreasing if it
    is smaller. Tokens are balanced first between the ranks of a microbatch, then between the totals of the ranks. Where
    sequences are long, microbatches that all ranks run at the same time also have similar work in attention, which
    grows with the square of a length. The fullest microbatches come first (with long sequences, those within 3% of the
    fullest), so that a lack of memory shows at once.

    A microbatch is empty only when there are fewer sequences than ranks times microbatches. The rank must still run it,
    on padding, to take part in the exchange. Without sequences there are no microbatches.

    Args:
        lengths: the tokens that each sequence takes in a microbatch: prompt, completion, and any padding of the caller.

    Returns:
        result[rank][microbatch], an ascending list of indices into `lengths`.

    Raises:
        ConfigError: one sequence alone exceeds microbatch_tokens.
        ValueError: a length is negative or a count is below 1.
    """
    if ranks < 1 or microbatch_tokens < 1:
        raise wrong_call("cannot pack", f"ranks={ranks}, microbatch_tokens={microbatch_tokens}", "both at least 1")
    if not lengths:
        return [[] for _ in range(ranks)]
    if min(lengths) < 0:
        where: About = {"sequence": lengths.index(min(lengths))}
        raise wrong_call("a sequence has a negative length", min(lengths), "0 or more", "", where)
    longest = max(lengths)
    if longest > microbatch_tokens:
        count = sum(length > microbatch_tokens for length in lengths)
        raise ConfigError(
            "a sequence does not fit into a microbatch",
            where={"sequence": lengths.index(longest)},
            got=f"{longest} tokens, {count} too long in all",
            expected=f"at most train.microbatch_tokens = {microbatch_tokens}",
            do=f"set train.microbatch_tokens to at least {longest}, or shorten prompts or completions",
        )

    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fitted = _best_fit(lengths, order, microbatch_tokens)
    most = -(-len(fitted) // ranks)
    least = max(1, -(-sum(lengths) // (microbatch_tokens * ranks)))
    for microbatches in range(least, most + 1):
        bins = _spread(lengths, order, microbatches * ranks)
        if max(_tokens(lengths, bin_) for bin_ in bins) <= microbatch_tokens:
            break
    else:
        bins = _fill_up(lengths, fitted, most * ranks)
    return _deal(lengths, bins, ranks)


def fill_rounds(plan: list[list[list[int]]], rounds: int) -> list[list[list[int]]]:
    """Append empty microbatches to every rank up to a multiple of `rounds`.

    An interleaved pipeline takes microbatches in rounds of one per stage.
    """
    return [[*microbatches, *([] for _ in range(-len(microbatches) % rounds))] for microbatches in plan]


def split_groups(group_ids: Sequence[Hashable], updates: int) -> list[list[int]]:
    """Divide the sequences of a step among its optimizer updates, in whole groups.

    Groups keep the order of their first members. The shares are runs of that order and differ by at most one group.
    With fewer groups than updates the last shares are empty; skip those updates.

    Returns:
        result[update], an ascending list of indices.

    Raises:
        ValueError: updates is below 1.
    """
    if updates < 1:
        raise ArgumentError(
            "cannot split groups",
            got=f"updates={updates}",
            expected="at least 1",
            do="correct train.updates_per_step",
            fault="arguments",
        )
    rank_of = {group: position for position, group in enumerate(dict.fromkeys(group_ids))}
    small, larger = divmod(len(rank_of), updates)
    share_of = [update for update in range(updates) for _ in range(small + (update < larger))]
    shares: list[list[int]] = [[] for _ in range(updates)]
    for index, group in enumerate(group_ids):
        shares[share_of[rank_of[group]]].append(index)
    return shares


def _tokens(lengths: list[int], indices: list[int]) -> int:
    return sum(lengths[index] for index in indices)


def _best_fit(lengths: list[int], order: list[int], budget: int) -> list[list[int]]:
    """Pack with best-fit decreasing: few bins, none above the budget, but not balanced."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending (tokens still free, bin)
    for index in order:
        position = bisect_left(rooms, (lengths[index], -1))
        if position == len(rooms):
            room, number = budget, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(position)
        bins[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return bins


def _spread(lengths: list[int], order: list[int], count: int) -> list[list[int]]:
    """Pack with longest processing time first: each sequence goes to the bin with the fewest tokens, then the fewest
    sequences.

    The budget is not enforced.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]
    for index in order:
        tokens, members, number = heap[0]
        bins[number].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], members + 1, number))
    return bins


def _fill_up(lengths: list[int], bins: list[list[int]], count: int) -> list[list[int]]:
    """Split the fullest bins until there are `count`. Add empty bins when none can be split."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max(range(len(bins)), key=lambda number: (len(bins[number]) > 1, _tokens(lengths, bins[number])))
        if len(bins[fullest]) < 2:
            return bins + [[] for _ in range(count - len(bins))]
        bins[fullest : fullest + 1] = _spread(lengths, bins[fullest], 2)
    return bins


def _deal(lengths: list[int], bins: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Assign bins to ranks: bins of similar size run at the same time, and the fuller goes to the rank with fewer
    tokens. Among bins of similar size, those of similar work in attention run at the same time.
    """
    long = max(lengths) >= _LONG
    similar = max(1, max(_tokens(lengths, bin_) for bin_ in bins) // _SIMILAR) if long else 1

    def size(bin_: list[int]) -> tuple[int, int, int, list[int]]:
        attention = sum(lengths[index] ** 2 for index in bin_) if long else 0
        return -(_tokens(lengths, bin_) // similar), -attention, -len(bin_), bin_

    ordered = sorted(bins, key=size)
    totals = [0] * ranks
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start in range(0, len(ordered), ranks):
        by_total = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, bin_ in zip(by_total, ordered[start : start + ranks], strict=True):
            result[rank].append(sorted(bin_))
            totals[rank] += _tokens(lengths, bin_)
    return result
