"""Holds the places of a pass's rows in their sequences, and the choice of rows for the alignment test. Uses host memory
only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

SAMPLED_ROWS = 256
"""Number of rows of a pass that are compared with other layers, of pairs of prompts, and of pairs of completions."""

_ALIKE = 4  # rows with this many equal last tokens count as one
_WINDOW = 8  # rows are sampled in runs of this length, so that each has its neighbours in the sample
_PIECE = 64
_BASE = np.uint64(6364136223846793005)


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Holds the places of a microbatch's rows in their sequences, in host memory.

    Attributes:
        sequence, position: int64 [R], number of the sequence, and position in it.
        recorded: bool [R], rows with a record.
        prompts: int64, for each sequence the length of its prompt.
        families: int64, for each sequence a number that sequences with the same prompt share.
        piece: int64 [R], the piece of a sequence that each row belongs to.
        pieces: For each piece (sequence, first position, last position).
        token: int64 [R], the token that is fed.
        prefix: uint64 [R], equal for rows with the same tokens up to and including their own.
        context: uint64 [R], equal for rows with the same last four tokens.
        lag: int64 [R], how many versions the oldest weights behind a row lag the trainer's: those that routed it, or
            made keys that the sampler kept over an update.
    """

    sequence: np.ndarray
    position: np.ndarray
    recorded: np.ndarray
    prompts: np.ndarray
    families: np.ndarray
    piece: np.ndarray
    pieces: tuple[tuple[int, int, int], ...]
    token: np.ndarray
    prefix: np.ndarray
    context: np.ndarray
    lag: np.ndarray

    @classmethod
    def of(
        cls,
        tokens: Seq[np.ndarray],
        prompts: Seq[int],
        recorded: np.ndarray,
        rows: slice | np.ndarray,
        lag: np.ndarray | None = None,
    ) -> RowPlaces:
        """Compute the places for packed sequences, cut to this rank's `rows`.

        Args:
            tokens: Forwarded token ids of each sequence.
            prompts: Prompt length of each sequence.
            recorded, lag: Over the rows of all sequences, end to end. None: 0 everywhere.
        """
        lengths, pieces = [len(ids) for ids in tokens], []
        for number, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            starts = sorted({*range(0, min(prompt, length), _PIECE), *range(min(prompt, length), length, _PIECE)})
            pieces += [(number, a, b - 1) for a, b in pairwise([*starts, length])]
        first = np.cumsum([0, *lengths])[:-1]
        position = np.arange(sum(lengths)) - np.repeat(first, lengths)
        token = np.concatenate(tokens).astype(np.int64)
        prefix, context = _hashes(token.astype(np.uint64), position)
        asked = np.minimum(prompts, lengths)
        families = np.where(asked > 0, prefix[first + asked - 1], 0)
        return cls(
            np.repeat(np.arange(len(lengths)), lengths)[rows],
            position[rows],
            recorded[rows],
            np.asarray(prompts, np.int64),
            families.view(np.int64),
            np.repeat(np.arange(len(pieces)), [last - first + 1 for _, first, last in pieces])[rows],
            tuple(pieces),
            token[rows],
            prefix[rows],
            context[rows],
            np.zeros(len(prefix), np.int64)[rows] if lag is None else lag[rows],
        )


def _hashes(ids: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token a hash of all tokens of its sequence up to it, and one of the last four, uint64 [R] each.

    Args:
        ids, position: uint64 [R], int64 [R], of sequences end to end.
    """
    ids = ids + np.uint64(1)
    powers = np.cumprod(np.full(int(position.max(initial=-1)) + 1, _BASE))
    total = np.cumsum(ids * powers[position], dtype=np.uint64)
    first = np.arange(len(ids)) - position
    prefix = total - np.where(first > 0, total[first - 1], np.uint64(0))
    context = np.zeros(len(ids), np.uint64)
    for back in range(_ALIKE):
        before = np.zeros(len(ids), np.uint64)
        before[back:] = ids[: len(ids) - back]
        context = context * _BASE + np.where(position >= back, before, np.uint64(0))
    return prefix, context


@dataclass(frozen=True, slots=True, eq=False)
class PassRows:
    """Holds the recorded rows of all microbatches of a pass, end to end.

    Attributes:
        places: [N] each: microbatch; index of the row among the microbatch's R rows; number of the sequence, unique
            across microbatches; position; prompt length; family; piece, unique across microbatches; token; prefix;
            context; lag. See `RowPlaces`.
        starts: Index of each microbatch's first row here.
        before: [N], the row before in the same sequence; the row itself if that row is not here.
    """

    microbatch: np.ndarray
    row: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    prompt: np.ndarray
    family: np.ndarray
    piece: np.ndarray
    token: np.ndarray
    prefix: np.ndarray
    context: np.ndarray
    lag: np.ndarray
    starts: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, places: Seq[RowPlaces]) -> PassRows:
        """Lay the recorded rows of microbatches end to end."""
        columns = []  # one list for each microbatch
        for number, placement in enumerate(places):
            rows = np.flatnonzero(placement.recorded)
            sequence = placement.sequence[rows]
            columns.append(
                [
                    np.full(len(rows), number),
                    rows,
                    sequence + (number << 32),
                    placement.position[rows],
                    placement.prompts[sequence],
                    placement.families[sequence],
                    placement.piece[rows] + (number << 32),
                    *(values[rows] for values in (placement.token, placement.prefix, placement.context, placement.lag)),
                ]
            )
        whole = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
        sequence, position = whole[2], whole[3]
        here = np.arange(len(sequence))
        before = np.maximum(here - 1, 0)
        follows = (sequence[before] == sequence) & (position[before] + 1 == position)
        starts = np.cumsum([0, *(int(placement.recorded.sum()) for placement in places)])
        return cls(*whole, starts, np.where(follows, before, here))  # type: ignore[call-arg]


def pairs(rows: PassRows) -> dict[str, np.ndarray]:
    """Choose rows at the same place of two sequences, after the first token in which these differ.

    Returns:
        For "prompts" and "completions": int64 [2, M], indices into `rows`. Completions of the same prompt are paired if
        there are any. At most SAMPLED_ROWS pairs each.
    """
    completion = rows.position >= rows.prompt
    index = np.where(completion, rows.position - rows.prompt, rows.position)
    # Equal prompts have equal rows: take the first sequence of each.
    _, first = np.unique(rows.family, return_index=True)
    prompts = np.flatnonzero(~completion & np.isin(rows.sequence, rows.sequence[first]))
    completions = np.flatnonzero(completion)
    siblings = _neighbours(completions, index, rows.family, rows)
    if not siblings.shape[1]:
        siblings = _neighbours(completions, index, np.zeros_like(index), rows)
    by_kind = {"prompts": _neighbours(prompts, index, np.zeros_like(index), rows), "completions": siblings}
    for what, chosen in by_kind.items():
        if chosen.shape[1] > SAMPLED_ROWS:
            take = np.random.default_rng(0).choice(chosen.shape[1], SAMPLED_ROWS, replace=False)
            by_kind[what] = chosen[:, np.sort(take)]
    return by_kind


def _neighbours(chosen: np.ndarray, index: np.ndarray, ring: np.ndarray, rows: PassRows) -> np.ndarray:
    """Pair each of the chosen rows with the row at the same index of the next sequence in its ring; int64 [2, M]. Rows
    with the same prefix are not paired. index, ring: [N]."""
    sequences, first, of = np.unique(rows.sequence[chosen], return_index=True, return_inverse=True)
    if len(sequences) < 2:
        return np.zeros((2, 0), np.int64)
    rings = ring[chosen][first]
    order = np.argsort(rings, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(rings[order]) != 0])
    following = np.roll(order, -1)
    following[np.r_[starts[1:], len(order)] - 1] = order[starts]
    after = np.empty_like(order)
    after[order] = following
    keys = (of << 32) + index[chosen]
    by_key = np.argsort(keys)
    wanted = (after[of] << 32) + index[chosen]
    partner = by_key[np.minimum(np.searchsorted(keys, wanted, sorter=by_key), len(keys) - 1)]
    paired = np.stack([chosen, chosen[partner]])[:, keys[partner] == wanted]
    return paired[:, rows.prefix[paired[0]] != rows.prefix[paired[1]]]


def windows(rows: int, count: int) -> np.ndarray:
    """Choose about `count` of the rows, in short runs that are spread over all of them. Returns sorted indices."""
    if rows <= count:
        return np.arange(rows)
    starts = np.linspace(0, rows - _WINDOW, count // _WINDOW).astype(int)
    return np.unique(starts[:, None] + np.arange(_WINDOW))
