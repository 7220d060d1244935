"""Chooses for a microbatch with known routes which experts are copied to other ranks, and which rows each copy gets.

In each MoE layer every expert-parallel rank waits for the rank whose experts got the most rows. If one expert alone has
more than a rank's share, no placement helps: a second rank must have its weights as well. The routes say exactly how
many rows there are. So ranks with few rows take copies of the experts of ranks with many, for one microbatch and layer
at a time.

If the ranks are in several nodes, every rank also waits for the rows that come from other nodes over slower links. A
copy in the node that sends the rows keeps them there. The module uses only NumPy, no clock and no random numbers: all
ranks get the same result from the same counts.

Legend: B microbatches and layers, G ranks in a grid of P expert-parallel ranks x T, N nodes, E experts, n = E / P slots
of a rank for its own experts, c slots of a rank for copies. `...` are any axes of layers and microbatches.

Also divides the rows of experts among their owners and copies on other ranks (`copy_choice` chooses the copies).

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
    rows = np.concatenate((kept.reshape(*inner, ranks, -1), length.reshape(*inner, ranks, copies)), -1)
    return rows.reshape(*inner, -1)


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
    for index in np.ndindex(inner):
        sizes = lengths[index]
        # A row's place in the old order: its place in the new one, plus how far its piece has moved.
        moved = np.repeat(begins[index].ravel() - (np.cumsum(sizes) - sizes), sizes)
        result[index] = entries[index][moved + np.arange(len(moved))]
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


# A row from another node takes as long as 1 + this many rows within a node. The links of eight H100 or H800 to each
# other have four to nine times the bandwidth of those to other nodes.
_FAR = 4
# Shares of a node's copy slots to try for rows of the node's own ranks, before the other slots even out rows.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def choose_copies(
    counts: np.ndarray, expert_parallel: int, copies: int, least: int, nodes: np.ndarray | None = None
) -> ExpertCopies:
    """Choose copies that even out the rows of the ranks, and keep rows within a node.

    A rank's weight is its number of rows; a row from another node counts five times. Repeatedly, the rank with the most
    weight gives rows of its heaviest expert to the rank with a free slot that takes the most of the weight above the
    mean; ties go to the lightest. Rows of the taker's node are given first, then those of nodes other than the giver's.
    Finally, the ranks of each node even out that node's own rows.

    With several nodes, copies may first keep rows within a node: copies of the other nodes' experts for which the
    node's ranks have the most rows. Several shares of the slots are tried for this. The best result has the lowest sum
    of these: the fullest rank's rows; four times the most rows that a rank gets from other nodes, or that the ranks of
    a node send there on average; and `least` rows for each copy that some rank sends or receives, counted four times
    between nodes. Nothing is copied if the sum is lower without copies. No rank gets more rows than the fullest one
    without copies.

    Args:
        counts: int64 [G, ..., E], the rows that each of the G ranks has for the expert in each slot, in rank order.
        expert_parallel: P.
        copies: c.
        least: The fewest rows for which an expert is copied, at least 1.
        nodes: int64 [G], the node of each rank, as any numbers. None: all ranks are in one node. The nodes also count
            as one if the T ranks that share an expert's matrices are in several nodes.
    """
    ranks, inner = expert_parallel, counts.shape[1:-1]
    node_G = np.zeros(len(counts), np.int64) if nodes is None else np.unique(nodes, return_inverse=True)[1]
    by_rank = node_G.reshape(ranks, -1)
    if (by_rank != by_rank[:, :1]).any():
        node_G[:] = 0
    node_P = node_G.reshape(ranks, -1)[:, 0]
    nodes_here = node_G.max() + 1
    if not copies:
        none = np.zeros((*inner, nodes_here, ranks, 0), np.int64)
        return ExpertCopies(none[..., 0, :, :], none, none, node_G)
    rows_NBE = np.stack([counts[node_G == node].sum(0) for node in range(nodes_here)])
    rows_BNE = np.moveaxis(rows_NBE.reshape(len(rows_NBE), -1, counts.shape[-1]), 0, 1)
    tried = []
    for share in _SHARES if nodes_here > 1 else (0.0,):
        choice = _CopyChoice(rows_BNE, node_P, copies, least)
        choice.keep_in_nodes(share)
        choice.even_out()
        if nodes_here > 1:
            choice.even_out(within_nodes=True)
        tried.append(choice)
    tried.append(_CopyChoice(rows_BNE, node_P, copies, least))
    fullest = tried[-1].got().sum(1).max(-1)
    best, batch_index = np.argmin([choice.cost(fullest) for choice in tried], 0), np.arange(len(rows_BNE))
    slot = np.stack([choice.slot for choice in tried])[best, batch_index]
    first, end = _spans(slot, np.stack([choice.amount for choice in tried])[best, batch_index], rows_BNE)
    shape = ranks, copies
    first, end = (span.reshape(*inner, nodes_here, *shape) for span in (first, end))
    return ExpertCopies(slot.reshape(*inner, *shape), first, end, node_G)


class _CopyChoice:
    """Holds copies of experts while they are chosen, for B microbatches and layers at once.

    Attributes:
        left: [B, N, E], the rows from each node that the owners keep.
        slot: [B, P, c], see `ExpertCopies`.
        amount: [B, N, P, c], the rows from each node that each copy gets.
        taken: [B, P], the number of slots in use.
    """

    def __init__(self, rows_BNE: np.ndarray, node_P: np.ndarray, copies: int, least: int):
        self.node, self.copies, self.least, self.left = node_P, copies, least, rows_BNE.copy()
        self.batch, self.nodes, experts = rows_BNE.shape
        self.ranks = len(node_P)
        self.local, self.at = experts // self.ranks, np.arange(self.batch)
        self.far_NP = node_P != np.arange(self.nodes)[:, None]
        self.slot = np.full((self.batch, self.ranks, copies), -1)
        self.amount = np.zeros((self.batch, self.nodes, self.ranks, copies), np.int64)
        self.taken = np.zeros((self.batch, self.ranks), np.int64)

    def got(self) -> np.ndarray:
        """Return [B, N, P]: the rows that each rank gets from each node."""
        owned = self.left.reshape(self.batch, self.nodes, self.ranks, self.local)
        return owned.sum(-1) + self.amount.sum(-1)

    def keep_in_nodes(self, share: float) -> None:
        """Use a share of each node's slots for rows of its ranks that would leave the node.

        The largest piece of an expert's rows comes first. It goes to the rank of the node with the fewest rows that has
        a free slot, up to the mean of all ranks. The rest may go to another rank, or back to the owner.
        """
        owner = np.arange(self.left.shape[-1]) // self.local
        far_NE, mean = self.far_NP[:, owner], -(-self.left.sum((1, 2)) // self.ranks)
        slots_N = np.rint(share * self.copies * np.bincount(self.node)).astype(int).clip(0, self.left.shape[-1])
        away = np.where(far_NE, self.left, 0)
        fewest = np.sort(away, -1)[..., ::-1][:, np.arange(self.nodes), np.maximum(slots_N, 1) - 1, None]
        away[(away < np.maximum(fewest, self.least)) | (slots_N == 0)[:, None]] = 0
        self.left -= away
        loads = self.got().sum(1)
        for turn in range(slots_N.max()):
            for node in np.flatnonzero(turn < slots_N):
                expert = away[:, node].argmax(-1)
                piece = away[self.at, node, expert]
                free = (self.node == node) & (self.taken < self.copies)
                taker = np.where(free, loads, np.iinfo(np.int64).max).argmin(-1)
                amount = np.minimum(piece, mean - loads[self.at, taker])
                fits = (amount >= self.least) & free[self.at, taker]
                (go,), (back,) = np.nonzero(fits), np.nonzero(~fits)
                away[back, node, expert[back]] = 0
                self.left[back, node, expert[back]] += piece[back]
                loads[back, owner[expert[back]]] += piece[back]
                self.amount[go, node, taker[go], self.taken[go, taker[go]]] = amount[go]
                away[go, node, expert[go]] -= amount[go]
                loads[go, taker[go]] += amount[go]
                self._use_slot(go, taker[go], expert[go])
        self.left += away

    def even_out(self, within_nodes: bool = False) -> None:
        """Use the free slots to even out the weights of the ranks.

        within_nodes: whether ranks give only rows of their own node, and only to its ranks. All rows then weigh the
            same.
        """
        far = 0 if within_nodes else _FAR
        owned = self.left.reshape(self.batch, self.nodes, self.ranks, self.local)
        heavy_NP = 1 + far * self.far_NP
        across = self.nodes > 1 and not within_nodes
        weights = (self.got() * heavy_NP).sum(1)
        mean = -(-weights.sum(-1) // self.ranks)
        for _ in range(self.ranks * self.copies):
            giver = weights.argmax(-1)
            home, weight = self.node[giver], heavy_NP[:, giver].T  # [B], [B, N]
            row_weight = np.where(np.arange(self.nodes) == home[:, None], 1, 0) if within_nodes else weight
            expert = (owned[self.at, :, giver] * row_weight[..., None]).sum(1).argmax(-1)
            rows = owned[self.at, :, giver, expert]  # [B, N]
            # What each rank would take, [B, P]: rows of its own node, and of nodes that are neither its own nor the
            # giver's.
            above, room = weights[self.at, giver] - mean, mean[:, None] - weights
            room[(self.taken == self.copies) | (self.slot == (giver * self.local + expert)[:, None, None]).any(-1)] = 0
            if within_nodes:
                room[self.node != home[:, None]] = 0
            near = np.minimum(np.minimum(rows, above[:, None] // weight)[:, self.node], room.clip(0))
            gain, moved = near * weight[:, self.node], near
            if across:
                others = rows.sum(-1)[:, None] - rows
                others -= np.where(np.arange(self.nodes) == home[:, None], 0, rows[self.at, home][:, None])
                others = others[:, self.node]
                asked = np.minimum(others, np.minimum(above[:, None] - gain, room - near).clip(0) // (1 + far))
                gain, moved = gain + asked * (1 + far), near + asked
            gain[moved < self.least] = 0
            taker = np.where(gain == gain.max(-1, keepdims=True), weights, np.iinfo(np.int64).max).argmin(-1)
            (go,) = np.nonzero(gain[self.at, taker])
            if not len(go):
                break
            giver, taker, expert, home = giver[go], taker[go], expert[go], home[go]
            place, there = self.taken[go, taker], self.node[taker]
            upto = sent = np.zeros(len(go), np.int64)
            for node in range(self.nodes):
                part = np.where(node == there, near[go, taker], 0)
                if across:
                    upto = upto + np.where((node == there) | (node == home), 0, rows[go, node])
                    asked_upto = asked[go, taker] * upto // others[go, taker].clip(1)
                    part += asked_upto - sent
                    sent = asked_upto
                owned[go, node, giver, expert] -= part
                self.amount[go, node, taker, place] += part
                weights[go, giver] -= part * heavy_NP[node, giver]
                weights[go, taker] += part * heavy_NP[node, taker]
            self._use_slot(go, taker, giver * self.local + expert)

    def cost(self, most: np.ndarray) -> np.ndarray:
        """Return [B]: the sum that `choose_copies` keeps low; the largest int64 if a rank gets more than `most` [B]
        rows."""
        got = self.got()
        away = got * self.far_NP
        where = np.nonzero(self.slot >= 0)
        batch, rank, owner = *where[:2], self.slot[where] // self.local
        apart = self.node[rank] != self.node[owner]
        near, far = (
            np.maximum(*(self._count(batch[some], side[some]).max(-1) for side in (rank, owner)))
            for some in (~apart, apart)
        )
        leaving = -(-away.sum(2) // np.bincount(self.node))
        exchanged = np.maximum(away.sum(1).max(-1), leaving.max(-1))
        fullest = got.sum(1).max(-1)
        cost = fullest + _FAR * exchanged + self.least * np.maximum(near, _FAR * far)
        return np.where(fullest > most, np.iinfo(np.int64).max, cost)

    def _count(self, batch: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return [B, P]: how often each rank occurs."""
        counts = np.bincount(batch * self.ranks + rank, minlength=self.batch * self.ranks)
        return counts.reshape(self.batch, self.ranks)

    def _use_slot(self, go: np.ndarray, rank: np.ndarray, expert: np.ndarray) -> None:
        self.slot[go, rank, self.taken[go, rank]] = expert
        self.taken[go, rank] += 1


def _spans(slot: np.ndarray, amount: np.ndarray, rows_BNE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first and end [B, N, P, c], see `ExpertCopies`: the copies of an expert get its last rows, one after the
    other.
    """
    left, first, end = rows_BNE.copy(), np.zeros_like(amount), np.zeros_like(amount)
    for rank, copy in np.ndindex(slot.shape[1:]):
        (go,) = np.nonzero(slot[:, rank, copy] >= 0)
        expert = slot[go, rank, copy]
        end[go, :, rank, copy] = left[go, :, expert]
        left[go, :, expert] -= amount[go, :, rank, copy]
        first[go, :, rank, copy] = left[go, :, expert]
    return first, end
