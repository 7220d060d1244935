"""What a token dispatcher needs to know of a microbatch before it sends a row, from the routes alone.

A dispatcher that is told the routes by its router learns in every layer, forward and again when it is recomputed, how
many rows it will get: an exchange of counts between the ranks, and a wait of the host for the result. Known routes give
all of it at once, for every layer.

Legend: R rows of a rank in a microbatch, padding among them, K top-k, E experts of a layer, G ranks that send rows to
each other's experts. They are laid out as P expert-parallel ranks x T ranks that share an expert's matrices, these
first: rank g of G is expert-parallel rank g // T. Each of the P holds E/P experts, n of them. `...` are axes of layers
and of microbatches, in any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class DispatchGroup:
    """experts: E. expert_parallel: P. expert_tensor: T. rank: of this one among the G = P x T."""

    experts: int
    expert_parallel: int
    expert_tensor: int
    rank: int

    @property
    def ranks(self) -> int:
        """G."""
        return self.expert_parallel * self.expert_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Numbers of rows, int64, that this rank sends and gets.

    sent [..., P]: to each expert-parallel rank. got [..., P]: from each, by the all-to-all among those with this rank's
    place among the T. gathered [..., T]: rows that each of the T ranks with the same experts got so; they gather them.
    received [..., G, n]: rows for each local expert, in the order in which they then lie: rank t of the T first, of
    these expert-parallel rank p. per_expert [..., n]: the sum over G.
    """

    sent: np.ndarray
    got: np.ndarray
    gathered: np.ndarray
    received: np.ndarray
    per_expert: np.ndarray


def count(routes: np.ndarray, experts: int) -> np.ndarray:
    """int64 [..., E]: rows of routes, integers [..., R, K], that go to each expert."""
    outer = routes.shape[:-2]
    layers = math.prod(outer)
    # One histogram for all layers: each counts in a range of its own.
    keys = routes.reshape(layers, math.prod(routes.shape[-2:])) + experts * np.arange(layers)[:, None]
    return np.bincount(keys.ravel(), minlength=experts * layers).reshape(*outer, experts)


def chunk_rows(rows: int, chunks: int) -> list[int]:
    """Numbers of rows of so many runs of neighbouring ones, as even as they go; 0 where there are fewer rows."""
    ends = [rows * number // chunks for number in range(chunks + 1)]
    return [end - start for start, end in pairwise(ends)]


def splits(counts: np.ndarray, group: DispatchGroup) -> Splits:
    """counts: integers [G, ..., E], what `count` gave on each rank of the group, in their order; of the E slots."""
    local = group.experts // group.expert_parallel
    inner = counts.shape[1:-1]
    by_rank = counts.reshape(group.expert_parallel, group.expert_tensor, *inner, group.expert_parallel, local)
    mine_ep, mine_etp = divmod(group.rank, group.expert_tensor)
    # [T, P, ..., n] -> [..., T, P, n]
    received = np.moveaxis(by_rank[..., mine_ep, :].swapaxes(0, 1), (0, 1), (-3, -2))
    rows = received.sum(-1)
    return Splits(
        sent=by_rank[mine_ep, mine_etp].sum(-1),
        got=rows[..., mine_etp, :],
        gathered=rows.sum(-1),
        received=received.reshape(*inner, group.ranks, local),
        per_expert=received.sum((-3, -2)),
    )


def send_order(routes: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """int32 [..., R * K]: the entries of a [R, E] table of (row, expert), counted row by row, in the order in which
    they are sent: by the expert's slot, and to one expert by row. routes: integers [..., R, K], distinct in a row.
    slots: integers [..., E], where each expert lies. An entry has the row entry // E and the expert entry % E."""
    top_k, experts = routes.shape[-1], slots.shape[-1]
    flat = routes.reshape(*routes.shape[:-2], math.prod(routes.shape[-2:]))
    slots = np.broadcast_to(slots, (*routes.shape[:-2], experts)).astype(routes.dtype)
    of_slots = np.take_along_axis(slots, flat.astype(np.intp), -1)
    order = np.argsort(of_slots, -1, kind="stable")  # of integers of 16 bits or less: a radix sort
    chosen = np.take_along_axis(flat, order, -1).astype(np.int32)
    return (order // top_k).astype(np.int32) * np.int32(experts) + chosen
