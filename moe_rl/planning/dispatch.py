"""Computes from routes how many rows a token dispatcher sends and receives in a microbatch.

A dispatcher that gets its routes from the router must learn in every layer how many rows it will receive, in the
forward pass and again in recomputation. For this the ranks exchange counts, and the host waits for the result. Known
routes give the counts of all layers at once.

Legend: R rows of a rank in a microbatch, padding included, K top-k, E experts of a layer, G ranks that send rows to
each other's experts. The G ranks form a grid of P expert-parallel ranks x T ranks that share an expert's matrices: rank
g has expert-parallel rank g // T. Each expert-parallel rank holds n = E/P experts. `...` are any axes of layers and
microbatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class DispatchGroup:
    """Describes the grid of ranks. experts: E. expert_parallel: P. expert_tensor: T. rank: this rank among the G = P x
    T.
    """

    experts: int
    expert_parallel: int
    expert_tensor: int
    rank: int

    @property
    def ranks(self) -> int:
        """Return G, the number of ranks in the grid."""
        return self.expert_parallel * self.expert_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Holds the row counts (int64) that this rank sends and receives.

    Attributes:
        sent: [..., P], rows sent to each expert-parallel rank.
        got: [..., P], rows received from each expert-parallel rank by the all-to-all among ranks with the same place in
            T.
        gathered: [..., T], rows that each of the T ranks with the same experts received in this way, and then shares.
        received: [..., G, n], rows for each local expert in the order in which they are stored: by place in T, then by
            expert-parallel rank.
        per_expert: [..., n], the sum of `received` over G.
    """

    sent: np.ndarray
    got: np.ndarray
    gathered: np.ndarray
    received: np.ndarray
    per_expert: np.ndarray


def count(routes: np.ndarray, experts: int) -> np.ndarray:
    """Count rows per expert: routes, integers [..., R, K] -> int64 [..., E]."""
    counts = [np.bincount(layer, minlength=experts) for layer in _flat(routes)]
    return np.array(counts, np.int64).reshape(*routes.shape[:-2], experts)


def chunk_rows(rows: int, chunks: int) -> list[int]:
    """Divide rows into runs of neighbours, as evenly as possible, and return their lengths; some are 0 if rows are
    few.
    """
    ends = [rows * number // chunks for number in range(chunks + 1)]
    return [end - start for start, end in pairwise(ends)]


def splits(counts: np.ndarray, group: DispatchGroup) -> Splits:
    """Derive the exchange of rows from counts.

    counts: integers [G, ..., E] over expert slots, the result of `count` on each rank of the grid, in rank order.
    """
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


def send_order(routes: np.ndarray, slots: np.ndarray, first: int = 0) -> np.ndarray:
    """Return int32 [..., R * K]: for each row to send, its index in the flattened [R, E] table of (row, expert).

    Rows are sorted by the slot of their expert, and those of one expert by row. Index i stands for row i // E and
    expert i % E.

    Args:
        routes: integers [..., R, K], distinct in a row.
        slots: integers [..., E], the slot of each expert.
        first: the number of the first row.
    """
    (rows, top_k), experts = routes.shape[-2:], slots.shape[-1]
    entries = np.repeat(np.arange(first, first + rows, dtype=np.int32) * np.int32(experts), top_k)
    slots = np.broadcast_to(slots, (*routes.shape[:-2], experts)).reshape(-1, experts).astype(routes.dtype)
    natural = bool((slots == np.arange(experts)).all())
    flat = _flat(routes)
    result = np.empty(flat.shape, np.int32)
    for chosen, slot, sorted_entries in zip(flat, slots, result, strict=True):
        # NumPy sorts integers of up to 16 bits by radix sort.
        order = np.argsort(chosen if natural else slot[chosen], kind="stable")
        np.take(entries + chosen, order, out=sorted_entries, mode="clip")
    return result.reshape(*routes.shape[:-2], rows * top_k)


def _flat(routes: np.ndarray) -> np.ndarray:
    """Flatten [..., R, K] to [layers, R * K]. One layer fits into the cache, all layers together do not."""
    return routes.reshape(math.prod(routes.shape[:-2]), math.prod(routes.shape[-2:]))
