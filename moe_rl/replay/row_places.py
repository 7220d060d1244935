"""Holds the places of a pass's rows in their sequences, and the choice of rows for the alignment test. Uses host memory
only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import xxhash

SAMPLED_ROWS = 256
"""How many rows of a pass the alignment test samples."""

# Positions in a prompt or completion whose rows are compared with those of another sequence.
_INDICES = (0, 1, 2, 3, *(2**power + 1 for power in range(2, 24)))
_WINDOW = 8  # rows are sampled in runs of this length, so that each has its neighbours in the sample
_PIECE = 64


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
    """

    sequence: np.ndarray
    position: np.ndarray
    recorded: np.ndarray
    prompts: np.ndarray
    families: np.ndarray
    piece: np.ndarray
    pieces: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(
        cls, tokens: Seq[np.ndarray], prompts: Seq[int], recorded: np.ndarray, rows: slice | np.ndarray
    ) -> RowPlaces:
        """Compute the places for packed sequences, cut to this rank's `rows`.

        Args:
            tokens: Forwarded token ids of each sequence.
            prompts: Prompt length of each sequence.
            recorded: bool, over the rows of all sequences, end to end.
        """
        lengths, pieces = [len(ids) for ids in tokens], []
        for number, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            starts = sorted({*range(0, min(prompt, length), _PIECE), *range(min(prompt, length), length, _PIECE)})
            pieces += [(number, a, b - 1) for a, b in zip(starts, [*starts[1:], length], strict=True)]
        families = [
            xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids[:prompt], np.int64)) >> 1
            for ids, prompt in zip(tokens, prompts, strict=True)
        ]
        return cls(
            np.repeat(np.arange(len(lengths)), lengths)[rows],
            np.concatenate([np.arange(length) for length in lengths])[rows],
            recorded[rows],
            np.asarray(prompts, np.int64),
            np.asarray(families, np.int64),
            np.repeat(np.arange(len(pieces)), [last - first + 1 for _, first, last in pieces])[rows],
            tuple(pieces),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Holds rows, each with a partner: the row at the same position of another sequence.

    Attributes:
        microbatch, row: int64 [M], where each row is.
        partner: int64 [M], index of the partner among the M rows.
        completion: bool [M], whether the row belongs to a completion; otherwise to a prompt.
    """

    microbatch: np.ndarray
    row: np.ndarray
    partner: np.ndarray
    completion: np.ndarray

    @classmethod
    def of(cls, places: Seq[RowPlaces]) -> Pairs:
        """Choose about SAMPLED_ROWS prompt rows and as many completion rows."""
        columns = []
        for number, one in enumerate(places):
            prompt, family = one.prompts[one.sequence], one.families[one.sequence]
            completion = one.position >= prompt
            index = np.where(completion, one.position - prompt, one.position)
            rows = np.flatnonzero(one.recorded & np.isin(index, _INDICES))
            sequence = one.sequence[rows] + (number << 32)
            columns.append(
                np.stack([np.full(len(rows), number), rows, sequence, family[rows], index[rows], completion[rows]])
            )
        table = np.concatenate(columns, 1) if columns else np.zeros((6, 0), np.int64)
        prompts, completions = (table[:, table[5] == kind] for kind in (0, 1))
        # Equal prompts have equal rows: keep the first sequence of each prompt only.
        if prompts.shape[1]:
            _, first = np.unique(prompts[3], return_index=True)
            prompts = prompts[:, np.isin(prompts[2], prompts[2, first])]
        chosen = np.concatenate([_families(prompts), _families(completions)], 1)
        return cls(chosen[0], chosen[1], _partners(chosen), chosen[5] == 1)


def _families(table: np.ndarray) -> np.ndarray:
    """Choose the rows of the largest families, until there are about SAMPLED_ROWS rows."""
    if table.shape[1] <= SAMPLED_ROWS:
        return table
    families, of_row, sizes = np.unique(table[3], return_inverse=True, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    enough = int(np.searchsorted(np.cumsum(sizes[order]), SAMPLED_ROWS)) + 1
    return table[:, np.isin(of_row, order[:enough])]


def _partners(table: np.ndarray) -> np.ndarray:
    """For each row choose the next row at the same position: from the same family if possible, else from another
    family. A row without any such row is its own partner."""
    partner = np.arange(table.shape[1])
    if not len(partner):
        return partner
    for columns in ((5, 4), (5, 4, 3)):  # partners from the second, closer grouping replace those from the first
        keys = table[list(columns)]
        order = np.lexsort((table[2], table[3], *keys[::-1]))
        _, group = np.unique(keys, axis=1, return_inverse=True)
        starts = np.flatnonzero(np.r_[True, np.diff(group.ravel()[order]) != 0])
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            if end - start > 1:
                run = order[start:end]
                partner[run] = np.roll(run, -1)
    return partner


def windows(recorded: np.ndarray, count: int) -> np.ndarray:
    """Choose about `count` of the rows, in short runs spread over all of them."""
    if len(recorded) <= count:
        return recorded
    starts = np.linspace(0, len(recorded) - _WINDOW, count // _WINDOW).astype(int)
    return recorded[np.unique(starts[:, None] + np.arange(_WINDOW))]
