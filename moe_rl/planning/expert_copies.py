"""Decides for a microbatch with known routes which experts are copied to other ranks, and which rows go to each copy.

In each MoE layer every expert-parallel rank waits for the rank whose experts got the most rows. If one expert alone has
more than a rank's share, no placement helps: a second rank must have its weights as well. The routes say exactly how
many rows there are. So ranks with few rows take copies of the experts of ranks with many, for one microbatch and layer
at a time. The module uses only NumPy, no clock and no random numbers: all ranks find the same from the same counts.

Legend, as in `dispatch`: G ranks in a grid of P expert-parallel ranks x T, E experts, n = E / P slots of a rank for its
own experts, c slots of a rank for copies, R rows, K top-k. `...` are any axes of layers and microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCopies:
    """Says which experts are copied where. All arrays are int64 [..., P, c].

    Attributes:
        slot: The slot, 0 to E - 1, of the expert whose copy is in each slot for copies; -1 if there is none. The rank
            `slot // n` owns the expert.
        first, end: Which part of the expert's rows the copy gets: of N rows, those from first to end - 1; 0 and 0 if
            there is none. The owner keeps those from 0 to the lowest `first`. Each of the G ranks sends this part of
            its own rows of the expert, rounded, so that no copy hears from some ranks only.
    """

    slot: np.ndarray
    first: np.ndarray
    end: np.ndarray

    def at(self, *where: int) -> ExpertCopies:
        """Return the copies of one microbatch, or of whatever the first axes mean."""
        return ExpertCopies(self.slot[where], self.first[where], self.end[where])

    @property
    def used(self) -> np.ndarray:
        """Return bool [...]: where there is any copy."""
        return np.any(self.slot >= 0, axis=(-2, -1))


def choose_copies(rows: np.ndarray, expert_parallel: int, copies: int, least: int) -> ExpertCopies:
    """Choose copies that even out the rows of the ranks.

    Again and again the fullest rank gives rows of its fullest expert to the emptiest rank that has a free slot, until
    one of the two has the mean, or all rows of the expert are given away. Nothing is copied if that takes fewer than
    `least` rows off the fullest rank for each copy that some rank sends or receives.

    Args:
        rows: int64 [..., E], rows of the expert in each slot, of all ranks together.
        expert_parallel: P.
        copies: c.
        least: The fewest rows for which an expert is copied, at least 1.
    """
    inner, ranks = rows.shape[:-1], expert_parallel
    left = rows.reshape(-1, ranks, rows.shape[-1] // ranks).copy()  # what the owners keep
    loads, local = left.sum(-1), left.shape[-1]
    mean, fullest = -(-loads.sum(-1) // ranks), loads.max(-1)
    slot = np.full((len(left), ranks, copies), -1)
    first, end, taken = np.zeros_like(slot), np.zeros_like(slot), np.zeros_like(loads)
    at = np.arange(len(left))
    for _ in range(ranks * copies):
        giver = loads.argmax(-1)
        taker = np.where(taken < copies, loads, np.iinfo(np.int64).max).argmin(-1)
        expert = left[at, giver].argmax(-1)
        amount = np.minimum(loads[at, giver] - mean, mean - loads[at, taker])
        amount = np.minimum(amount, left[at, giver, expert])
        amount[taken[at, taker] == copies] = 0  # no rank has a free slot
        (go,) = np.nonzero(amount >= least)
        if not len(go):
            break
        giver, taker, expert, amount = giver[go], taker[go], expert[go], amount[go]
        there = go, taker, taken[go, taker]
        slot[there], end[there] = giver * local + expert, left[go, giver, expert]
        first[there] = end[there] - amount
        left[go, giver, expert] -= amount
        loads[go, giver] -= amount
        loads[go, taker] += amount
        taken[go, taker] += 1
    owner = np.where(slot >= 0, slot // local, -1).reshape(len(slot), -1)
    moved = np.max([taken.max(-1), *((owner == rank).sum(-1) for rank in range(ranks))], 0)
    slot[fullest - loads.max(-1) < least * moved] = -1
    first[slot < 0] = end[slot < 0] = 0
    return ExpertCopies(*(array.reshape(*inner, ranks, copies) for array in (slot, first, end)))


def with_copies(counts: np.ndarray, chosen: ExpertCopies) -> np.ndarray:
    """Return int64 [G, ..., P * (n + c)]: the rows that each rank sends to each slot, copies included.

    A rank's slots for copies come behind those for its own experts.

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
    """Reorder the rows that a rank sends, so that each copy's rows lie behind those of its rank's own experts.

    Args:
        entries: integers [..., R * K], the result of `dispatch.send_order` of this rank.
        counts: int64 [G, ..., E], as in `with_copies`.
        rank: Of the G ranks.
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

    Ranks round differently, so that the parts of all ranks together are nearly those asked for.
    """
    slot = _flat(chosen.slot).clip(0)
    slot = np.broadcast_to(slot, (*counts.shape[:-1], slot.shape[-1]))
    here, total = (
        np.take_along_axis(rows, slot, -1) for rows in (counts, np.broadcast_to(counts.sum(0), counts.shape))
    )
    ranks, total = len(counts), total.clip(1)
    offset = (2 * np.arange(ranks) + 1).reshape(-1, *[1] * (counts.ndim - 1)) * total
    begin, end = (
        (2 * ranks * here * _flat(part) + offset) // (2 * ranks * total) for part in (chosen.first, chosen.end)
    )
    return begin, end - begin


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:-2], -1)
