"""Divides the rows of experts among their owners and copies on other ranks (`copy_choice` chooses the copies).

Legend, as in `dispatch`: G ranks in a grid of P expert-parallel ranks x T, N nodes, E experts, n = E / P slots of a
rank for its own experts, c slots of a rank for copies, R rows, K top-k. `...` are any axes of layers and microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCopies:
    """Says which experts are copied where. All arrays are int64.

    Attributes:
        slot: [..., P, c], the slot, 0 to E - 1, of the expert whose copy is in each slot for copies; -1 if there is
            none. The rank `slot // n` owns the expert.
        first, end: [..., N, P, c], which part of the expert's rows from each node the copy gets: of M rows, those from
            first to end - 1; two equal numbers if it gets none. The owner keeps those from 0 to the lowest `first`.
            Each rank of the node sends this part of its own rows of the expert, rounded, so that no copy gets rows from
            only some ranks of a node.
        node: [G], the node of each rank, 0 to N - 1.
    """

    slot: np.ndarray
    first: np.ndarray
    end: np.ndarray
    node: np.ndarray

    def at(self, *where: int) -> ExpertCopies:
        """Return the copies of one microbatch, or of whatever the first axes index."""
        return ExpertCopies(self.slot[where], self.first[where], self.end[where], self.node)

    @property
    def used(self) -> np.ndarray:
        """Return bool [...]: where there is any copy."""
        return np.any(self.slot >= 0, axis=(-2, -1))


def with_copies(counts: np.ndarray, chosen: ExpertCopies) -> np.ndarray:
    """Return int64 [G, ..., P * (n + c)]: the rows that each rank sends to each slot, copies included.

    A rank's slots for copies come after those for its own experts.

    Args:
        counts: int64 [G, ..., E], the rows that each of the G ranks has for each slot, in rank order.
    """
    ranks, copies = chosen.slot.shape[-2:]
    _, length = _pieces(counts, chosen)
    kept = counts.copy()
    for copy in range(ranks * copies):
        slot = np.broadcast_to(_flat(chosen.slot)[..., copy, None], (*counts.shape[:-1], 1)).clip(0)
        np.put_along_axis(kept, slot, np.take_along_axis(kept, slot, -1) - length[..., copy, None], -1)
    inner = counts.shape[:-1]
    both = np.concatenate((kept.reshape(*inner, ranks, -1), length.reshape(*inner, ranks, copies)), -1)
    return both.reshape(*inner, -1)


def send_to_copies(entries: np.ndarray, counts: np.ndarray, rank: int, chosen: ExpertCopies) -> np.ndarray:
    """Reorder the rows that a rank sends, so that each copy's rows come after those of its rank's own experts.

    Args:
        entries: integers [..., R * K], the result of `dispatch.send_order` of this rank.
        counts: int64 [G, ..., E], as in `with_copies`.
        rank: This rank's number among the G ranks.
    """
    ranks, copies = chosen.slot.shape[-2:]
    mine, (begins, _) = counts[rank], _pieces(counts, chosen)
    run = np.cumsum(mine, -1) - mine  # where the rows for a slot begin
    slot = _flat(chosen.slot).clip(0)
    begin = begins[rank] + np.take_along_axis(run, slot, -1)
    inner = mine.shape[:-1]
    begins = np.concatenate((run.reshape(*inner, ranks, -1), begin.reshape(*inner, ranks, copies)), -1)
    lengths, result = with_copies(counts, chosen)[rank], np.empty_like(entries)
    for at in np.ndindex(inner):
        sizes = lengths[at]
        # A row's place in the old order: its place in the new one, plus how far its piece has moved.
        moved = np.repeat(begins[at].ravel() - (np.cumsum(sizes) - sizes), sizes)
        result[at] = entries[at][moved + np.arange(len(moved))]
    return result


def _pieces(counts: np.ndarray, chosen: ExpertCopies) -> tuple[np.ndarray, np.ndarray]:
    """Return begin and length [G, ..., P * c] of the part of an expert's rows on each rank that goes to each copy.

    Ranks of a node round differently, so that their parts together are nearly the requested ones.
    """
    slot = _flat(chosen.slot).clip(0)
    begin = np.zeros((*counts.shape[:-1], slot.shape[-1]), np.int64)
    end = np.zeros_like(begin)
    for node in range(chosen.node.max() + 1):
        members = chosen.node == node
        rows = counts[members]
        here, total = (
            np.take_along_axis(some, np.broadcast_to(slot, (len(some), *slot.shape)), -1)
            for some in (rows, rows.sum(0)[None])
        )
        ranks, total = len(rows), total.clip(1)
        offset = (2 * np.arange(ranks) + 1).reshape(-1, *[1] * (counts.ndim - 1)) * total
        begin[members], end[members] = (
            (2 * ranks * here * _flat(part[..., node, :, :]) + offset) // (2 * ranks * total)
            for part in (chosen.first, chosen.end)
        )
    return begin, end - begin


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])
