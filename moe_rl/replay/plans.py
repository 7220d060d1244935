"""Dispatch plans of microbatches with known routes: made once, used by the dispatcher of every layer in every pass.

A pass can start when the first microbatch is planned. The row counts of all microbatches are known by then, because
ranks exchange them first. The orders of rows take most of the time and need no other rank, so a thread makes them,
microbatch by microbatch, while passes run. NumPy releases the interpreter's lock while it sorts.

Legend: M microbatches, C chunks of a microbatch, L layers, R rows of this rank in a microbatch, K top-k, E experts. For
the groups of ranks of `planning.dispatch`: P expert-parallel ranks, T ranks that share an expert's matrices, G = P x T,
n experts on a rank. Where experts are copied (`planning.copy_choice`), each rank has c more slots for copies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_rl.objectives.device import to_device
from moe_rl.planning.copy_choice import ExpertCopies, choose_copies, send_to_copies, with_copies
from moe_rl.planning.dispatch import DispatchGroup, chunk_rows, count, send_order, splits
from moe_rl.replay.tables import MicrobatchRoutes


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """Says how `rows` neighbouring rows of a microbatch pass through one layer's dispatcher. All numbers are known to
    the host.

    Attributes:
        sent, got: Rows sent to and received from each of the P ranks.
        gathered: int64 [T].
        received: int64 [G, n].
        per_expert: int64 [n], on the device where Megatron's experts expect it. See `Splits` for all of these.
        copies: int64 [P, c], the slot of the expert that is copied into each slot for copies, or -1. `received` and
            `per_expert` then have n + c instead of n. None if no expert is copied.
    """

    rows: int
    sent: list[int]
    got: list[int]
    gathered: np.ndarray
    received: np.ndarray
    per_expert: torch.Tensor
    copies: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """Says how one microbatch passes through one layer's dispatcher: at once, or in chunks of rows one after the other.

    Attributes:
        made: int32 [L, R * K] on the device, the entries of all layers of the microbatch, once they are made.
        at: Index of the layer in `made`.
        order: int64 [E], the expert that the plan expects in each slot.
        fullest, rows: Rows of the fullest of the P ranks, and of all P ranks, summed over chunks.
        overlapped: Whether the first rows are sent before the router has run, and the layer computes while rows are
            exchanged. Otherwise there is one chunk.
    """

    made: Future[torch.Tensor]
    at: int
    order: np.ndarray
    chunks: tuple[ChunkPlan, ...]
    fullest: int
    rows: int
    overlapped: bool

    @property
    def entries(self) -> torch.Tensor:
        """Return int32 [R * K] on the device: for each chunk in turn the result of `send_order`, counted from the first
        row of the microbatch. Waits until they are made."""
        return self.made.result()[self.at]


@dataclass(frozen=True, slots=True, eq=False)
class DispatchRules:
    """Says among which ranks, and how, the rows of microbatches are dispatched.

    Attributes:
        layers: The MoE layers of this rank.
        exchange: Gathers int64 [M, C, L, E] of this rank into [G, M, C, L, E] of all ranks of the group, in their
            order.
        order: int64 [L, E], the expert in each slot.
        overlap_chunks: C, for an overlapped plan. 0 makes a plan that is not overlapped, with C = 1.
        copies: c, 0 for no copies of experts.
        least: The fewest rows of a chunk for which an expert is copied.
        nodes: int64 [G], the node of each rank of the group. None: copies are chosen as if all ranks were on one node.
    """

    layers: tuple[int, ...]
    group: DispatchGroup
    exchange: Callable[[np.ndarray], np.ndarray]
    order: np.ndarray
    overlap_chunks: int = 0
    copies: int = 0
    least: int = 1
    nodes: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """Holds the dispatch plans of microbatches.

    Attributes:
        by_microbatch: {layer: plan} of each microbatch. It is None if on any rank of the group a router must choose for
            rows without a route: the counts are then unknown beforehand, and Megatron's own dispatcher asks for them.
        peak: The largest number of rows that the experts of this rank get in a layer of a planned microbatch.
        fullest, rows: The sums of `LayerPlan.fullest` and `LayerPlan.rows` over layers and planned microbatches.
    """

    by_microbatch: list[dict[int, LayerPlan] | None]
    peak: int
    fullest: int
    rows: int


def plan_dispatch(tables: list[MicrobatchRoutes], rules: DispatchRules) -> Plans:
    """Plan how the dispatchers send the rows of these microbatches.

    All ranks of a dispatch group call this together, with the same number of microbatches. They exchange their counts
    once, or not at all without microbatches. The routes are copied to the host once, and the plans back to the device
    once per microbatch. The entries are made after this returns, in the order of the microbatches.

    Args:
        tables: In the order in which passes run them.
    """
    if not tables:
        return Plans([], 0, 0, 0)
    layers, group, order, copies = rules.layers, rules.group, rules.order, rules.copies
    chunks = max(1, rules.overlap_chunks)
    pieces = [_cut(routes, chunks) for routes in _on_host(tables, layers)]
    counts = np.stack([np.stack([count(piece, group.experts) for piece in of_one]) for of_one in pieces])
    counts[[table.native is not None for table in tables]] = -1
    everyone = rules.exchange(counts)
    by_slot = np.take_along_axis(everyone, order.reshape(*[1] * (everyone.ndim - 2), *order.shape), -1)
    slots, local = np.argsort(order, -1), group.experts // group.expert_parallel
    chosen = choose_copies(by_slot.clip(0), group.expert_parallel, copies, rules.least, rules.nodes)
    copied, sent = chosen.used, with_copies(by_slot.clip(0), chosen)
    numbers = splits(sent, replace(group, experts=group.expert_parallel * (local + copies)))
    loads = sent.sum(0).reshape(*copied.shape, group.expert_parallel, -1).sum(-1)

    def chunk_plan(m: int, c: int, index: int) -> ChunkPlan:
        held = local + copies * int(copied[m, c, index])
        return ChunkPlan(
            rows=pieces[m][c].shape[1],
            sent=numbers.sent[m, c, index].tolist(),
            got=numbers.got[m, c, index].tolist(),
            gathered=numbers.gathered[m, c, index],
            received=numbers.received[m, c, index, :, :held],
            per_expert=torch.from_numpy(numbers.per_expert[m, c, index, :held]),
            copies=chosen.slot[m, c, index] if copied[m, c, index] else None,
        )

    plans: list[dict[int, LayerPlan] | None] = []
    thread = ThreadPoolExecutor(1, "send-orders")
    for m, table in enumerate(tables):
        if everyone[:, m].min() < 0:
            plans.append(None)
            continue
        device = table.routes[layers[0]].device
        made = thread.submit(_entries, pieces[m], slots, by_slot[:, m], group.rank, chosen.at(m), device)
        plans.append(
            {
                layer: LayerPlan(
                    made=made,
                    at=index,
                    order=order[index],
                    chunks=tuple(chunk_plan(m, c, index) for c in range(chunks)),
                    fullest=int(loads[m, :, index].max(-1).sum()),
                    rows=int(loads[m, :, index].sum()),
                    overlapped=rules.overlap_chunks > 0,
                )
                for index, layer in enumerate(layers)
            }
        )
    thread.shutdown(wait=False)  # it ends after its work
    planned = [plan for of_layers in plans if of_layers is not None for plan in of_layers.values()]
    return Plans(
        plans,
        peak=max((int(sum(chunk.per_expert.sum() for chunk in plan.chunks)) for plan in planned), default=0),
        fullest=sum(plan.fullest for plan in planned),
        rows=sum(plan.rows for plan in planned),
    )


def _entries(
    pieces: list[np.ndarray],
    slots: np.ndarray,
    counts: np.ndarray,
    rank: int,
    chosen: ExpertCopies,
    device: torch.device,
) -> torch.Tensor:
    """Return the entries int32 [L, R * K] of a microbatch, whose chunks are `pieces`.

    Args:
        counts: int64 [G, C, L, E] by slot, of all ranks of the group.
        rank: Index of this rank in the group.
        chosen: The copies, [C, L, P, c].
    """
    firsts = np.cumsum([0, *(piece.shape[1] for piece in pieces[:-1])])
    orders = [send_order(piece, slots, first) for piece, first in zip(pieces, firsts, strict=True)]
    for c in np.flatnonzero(chosen.used.any(-1)):
        orders[c] = send_to_copies(orders[c], counts[:, c], rank, chosen.at(c))
    return to_device(np.concatenate(orders, -1), device)


def _cut(routes: np.ndarray, chunks: int) -> list[np.ndarray]:
    """Cut routes [L, R, K] into one array [L, rows, K] per chunk."""
    return np.split(routes, np.cumsum(chunk_rows(routes.shape[1], chunks))[:-1], axis=1)


def _on_host(tables: list[MicrobatchRoutes], layers: tuple[int, ...]) -> list[np.ndarray]:
    """Copy the routes to the host: one array [L, R, K] per microbatch."""
    stacks = [torch.stack([table.routes[layer] for layer in layers]) for table in tables]
    whole = torch.cat([stack.flatten() for stack in stacks]).cpu().numpy()
    parts = np.split(whole, np.cumsum([stack.numel() for stack in stacks])[:-1])
    return [part.reshape(stack.shape) for part, stack in zip(parts, stacks, strict=True)]
