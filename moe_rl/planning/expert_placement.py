"""Assigns experts to expert-parallel ranks so that their known popularity loads all ranks evenly.

In each MoE layer every expert-parallel rank waits for the rank whose experts got the most (token, expert) pairs. Under
RL an expert that is popular in one batch is usually popular in the next. The counts of the last batches therefore give
a good placement for the next ones. Each rank keeps its number of experts. The module uses only NumPy, no clock and no
random numbers.

Legend for shapes: N batches (or steps), L MoE layers, E experts per layer, R expert-parallel ranks, n = E / R experts
of a rank. An order [L, E] gives the expert in each slot. Rank r has the slots n * r to n * (r + 1) - 1. The natural
order is 0 ... E - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_rl.errors import ArgumentError
from moe_rl.planning.balance import excess
from moe_rl.planning.packing import wrong_call

# Smallest gain per batch that justifies moving one expert, as a fraction of a mean rank's load in a layer. It is small,
# because an expert moves once and its load comes with every batch. It excludes gains below the noise of the counts.
PRICE = 2e-4
# Work limit of a search in one layer, in pairs of experts; the second number is the cost of looking at a rank.
_WORK, _PASS = 3_000_000, 4_000
# Number of these pairs that are evaluated exactly.
_TRIED = 256


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Reports the result of placing experts. `balance.excess` defines the excess.

    Attributes:
        natural, before, after: the excess of the natural order, of the previous order and of the returned order, on the
            given counts.
        floor: a lower bound of the excess of any order. Some rank has at least the mean load. Some rank has the most
            popular expert and n - 1 others, which have at least the load of the n - 1 least popular experts.
        moved: the number of experts that change their rank, over all layers.
        placement: "kept" if the previous order is returned.
        why: the reason if the previous order is kept, else how the new one was found.
    """

    natural: float
    before: float
    after: float
    floor: float
    moved: int
    placement: str
    why: str


def natural_order(layers: int, experts: int) -> np.ndarray:
    """Return int64 [L, E]: every expert in the slot of its own number."""
    return np.tile(np.arange(experts), (layers, 1))


def rank_loads(counts_NLE: np.ndarray, order_LE: np.ndarray, expert_parallel: int) -> np.ndarray:
    """Sum pairs per expert to pairs per rank: int64 [N, L, R]."""
    placed = np.take_along_axis(counts_NLE, order_LE[None], axis=2)
    return placed.reshape(*placed.shape[:2], expert_parallel, -1).sum(axis=3, dtype=np.int64)


def check_order(order_LE: np.ndarray, layers: int, experts: int) -> None:
    """Check an order: each layer must hold every expert exactly once.

    Raises:
        ValueError: the shape is wrong, or an expert is missing.
    """
    order_LE = np.asarray(order_LE)
    if order_LE.shape != (layers, experts) or order_LE.dtype.kind not in "iu":
        got, expected = f"{order_LE.dtype} {order_LE.shape}", f"integers {(layers, experts)}"
        raise wrong_call("the placement has the wrong shape for the model", got, expected, "placement")
    wrong = (np.sort(order_LE, axis=1) != np.arange(experts)).any(axis=1)
    if wrong.any():
        layer = int(wrong.argmax())
        raise ArgumentError(
            "a placement does not hold every expert once",
            where={"layer": layer},
            got=order_LE[layer].tolist(),
            expected=f"a permutation of 0 ... {experts - 1}",
            fault="placement",
        )


def place(
    counts_NLE: np.ndarray,
    expert_parallel: int,
    *,
    current: np.ndarray | None = None,
    max_moved: float = 1.0,
    min_gain: float = 0.0,
    price: float = PRICE,
) -> tuple[np.ndarray, PlacementReport]:
    """Find an order int64 [L, E] of the experts that evens out the loads of the ranks, with a report.

    Minimises the sum over batches and layers of the maximum over ranks, plus `price` times a mean rank's load for each
    expert that leaves its rank. Each layer takes the better of two searches. One starts from `current`. The other
    starts from a new greedy placement, whose ranks are named so that the fewest experts move. Both exchange pairs of
    experts between two ranks while that helps. Experts that stay on their rank keep their slot.

    The sum of the maxima is never above that of `current`. A layer whose loads would be less even than in the natural
    order gets the natural order, even if that exceeds max_moved. If anything moves, the result is never worse than the
    natural order.

    Args:
        counts_NLE: non-negative integers, the (token, expert) pairs of each batch.
        current: the current order. None: the natural order.
        max_moved: the largest fraction of a layer's experts that may change their rank.
        min_gain: `current` is kept if the sum of the maxima would fall by less than this fraction.

    Raises:
        ValueError: the counts have a wrong shape or type, or the experts do not divide among the ranks.
    """
    counts_NLE = np.asarray(counts_NLE)
    _check(counts_NLE, expert_parallel, max_moved, min_gain, price)
    _, layers, experts = counts_NLE.shape
    natural = natural_order(layers, experts)
    current = natural if current is None else np.asarray(current)
    check_order(current, layers, experts)
    counts_NLE = counts_NLE.astype(np.int64)
    most_moved, share = int(max_moved * experts), experts // expert_parallel
    result = np.empty_like(natural)
    for layer in range(layers):
        of_layer = counts_NLE[:, layer].astype(np.float64)
        result[layer] = _place_layer(of_layer, current[layer], expert_parallel, most_moved, price)
    loads = [rank_loads(counts_NLE, order, expert_parallel) for order in (natural, current, result)]
    sums = [load.max(axis=2).sum(axis=0) for load in loads]
    worse = sums[2] > sums[0]
    result[worse] = natural[worse]
    loads[2][:, worse] = loads[0][:, worse]
    moved = int((_ranks(result, share) != _ranks(current, share)).sum())
    of_natural, before, after = (excess(load)[0] for load in loads)
    total, was = int(loads[2].max(axis=2).sum()), int(sums[1].sum())
    why, placement = "experts moved to even out the load", "moved"
    if not moved:
        placement, why = "kept", "no exchange of experts gains more than its price"
    elif total > (1 - min_gain) * was:
        placement, why = "kept", f"{moved} moves would lower the maxima by {1 - total / was:.2%}, less than min_gain"
        result, moved, after = current.copy(), 0, before
    floor = _floor(counts_NLE, expert_parallel)
    return result, PlacementReport(of_natural, before, after, floor, moved, placement, why)


def _check(counts_NLE: np.ndarray, expert_parallel: int, max_moved: float, min_gain: float, price: float) -> None:
    shaped = counts_NLE.ndim == 3 and counts_NLE.size > 0 and counts_NLE.dtype.kind in "iu"
    if not shaped or counts_NLE.min() < 0 or expert_parallel < 1 or counts_NLE.shape[2] % expert_parallel:
        got = f"counts {counts_NLE.dtype} {counts_NLE.shape} for {expert_parallel} ranks"
        expected = "integers [N, L, E], none negative, at least one of each, E a multiple of the ranks"
    elif not (0 <= max_moved <= 1 and 0 <= min_gain < 1 and price >= 0):
        got = f"max_moved {max_moved}, min_gain {min_gain}, price {price}"
        expected = "fractions, and a price >= 0"
    else:
        return
    raise wrong_call("experts cannot be placed", got, expected)


def _ranks(order_LE: np.ndarray, share: int) -> np.ndarray:
    """Return [..., E]: the rank of each expert, by the number of the expert."""
    return np.argsort(order_LE, axis=-1) // share


def _floor(counts_NLE: np.ndarray, expert_parallel: int) -> float:
    mean, share = counts_NLE.sum(axis=2) / expert_parallel, counts_NLE.shape[2] // expert_parallel
    ascending = np.sort(counts_NLE, axis=2)
    least = np.maximum(mean, ascending[..., -1] + ascending[..., : share - 1].sum(axis=2))
    return float(least.sum() / mean.sum()) - 1 if mean.sum() else 0.0


def _place_layer(counts_NE: np.ndarray, current_E: np.ndarray, ranks: int, most_moved: int, price: float) -> np.ndarray:
    """Return an order [E] of one layer, the better of the two searches."""
    was = _ranks(current_E, len(current_E) // ranks)
    move = price * counts_NE.sum() / ranks
    near, least = _Exchange(counts_NE, was, ranks).run(was, most_moved, move)
    everywhere = _Exchange(counts_NE, _greedy(counts_NE, ranks), ranks)
    fresh = _renamed(everywhere.run(was, len(was), 0.0)[0], was, ranks)
    moved = int((fresh != was).sum())
    if moved <= most_moved and _Exchange(counts_NE, fresh, ranks).cost + move * moved < least:
        near = fresh
    return _in_slots(near, current_E, ranks)


def _greedy(counts_NE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of each expert [E] by greedy assignment.

    The most popular expert comes first. Each goes to the rank that keeps the maxima lowest; ties go to the least
    loaded.
    """
    share = counts_NE.shape[1] // ranks
    rank_of = np.empty(counts_NE.shape[1], np.int64)
    loads, room = np.zeros((len(counts_NE), ranks)), np.full(ranks, share)
    for expert in np.argsort(-counts_NE.sum(axis=0), kind="stable").tolist():
        then = loads + counts_NE[:, expert, None]
        most = np.maximum(then, loads.max(axis=1, keepdims=True)).sum(axis=0)
        rank = int(np.lexsort((np.arange(ranks), loads.sum(axis=0), most, room == 0))[0])
        rank_of[expert], loads[:, rank], room[rank] = rank, then[:, rank], room[rank] - 1
    return rank_of


def _renamed(rank_of: np.ndarray, was: np.ndarray, ranks: int) -> np.ndarray:
    """Rename the ranks of a placement greedily so that as many experts as possible stay on their rank."""
    common = np.zeros((ranks, ranks), np.int64)
    np.add.at(common, (rank_of, was), 1)
    name, taken = np.full(ranks, -1), np.zeros(ranks, bool)
    for pair in np.argsort(-common.ravel(), kind="stable").tolist():
        group, rank = divmod(pair, ranks)
        if name[group] < 0 and not taken[rank]:
            name[group], taken[rank] = rank, True
    return name[rank_of]


def _in_slots(rank_of: np.ndarray, current_E: np.ndarray, ranks: int) -> np.ndarray:
    """Return the order [E] in which experts that stay on their rank keep their slot, and the others fill the free
    slots.
    """
    share = len(current_E) // ranks
    order = np.where(rank_of[current_E] == np.arange(len(current_E)) // share, current_E, -1)
    for rank in range(ranks):
        slots = np.arange(rank * share, (rank + 1) * share)
        coming = np.setdiff1d(np.flatnonzero(rank_of == rank), order[slots])
        order[slots[order[slots] < 0]] = coming
    return order


class _Exchange:
    """Exchanges pairs of experts of one layer between its fullest ranks and others, the best pair each time.

    Attributes:
        counts: float64 [N, E], whole numbers.
        rank_of, was: [E], the rank of each expert now and before any exchange.
        loads: [N, R].
        cost: the sum of the maxima.
    """

    def __init__(self, counts_NE: np.ndarray, rank_of: np.ndarray, ranks: int):
        self.counts, self.rank_of = counts_NE, rank_of.copy()
        self.loads = counts_NE @ (rank_of[:, None] == np.arange(ranks)).astype(np.float64)
        self.cost = float(self.loads.max(axis=1).sum())

    def run(self, was: np.ndarray, most_moved: int, move: float) -> tuple[np.ndarray, float]:
        """Exchange until nothing improves. Return the best placement seen and its value.

        The value is cost + move * moved, over placements with at most the allowed number of moved experts, and infinite
        if there is none. The price of moves is not part of each exchange: while several ranks are near the maximum, an
        exchange lowers it by almost nothing, and only the last one gains.
        """
        best, least, work = self.rank_of, np.inf, _WORK
        while True:
            moved = int((self.rank_of != was).sum())
            if moved <= most_moved and self.cost + move * moved < least:
                best, least = self.rank_of.copy(), self.cost + move * moved
            exchange, looked = self._best()
            work -= looked
            if exchange is None or work < 0:
                return best, least
            self._swap(*exchange)

    def _best(self) -> tuple[tuple[int, int] | None, int]:
        """Return the best exchange of a fullest rank's expert with another rank's, and how many pairs were examined.

        Returns None as the exchange if no pair lowers the cost, or the sum of squares at equal cost. (Two ranks that
        share the maximum need two exchanges.)
        """
        best, least, looked = None, (0.0, 0.0), 0
        for rank in np.unique(self.loads.argmax(axis=1)).tolist():
            ours, theirs = np.flatnonzero(self.rank_of == rank), np.flatnonzero(self.rank_of != rank)
            squares = self._squares(rank, ours, theirs).ravel()
            looked += _PASS + squares.size
            # Candidates are the pairs that make the two ranks most even. The fall of the maximum is then computed
            # exactly.
            chosen = np.arange(squares.size)
            if squares.size > _TRIED:
                chosen = np.sort(np.argpartition(squares, _TRIED - 1)[:_TRIED])
            outgoing, incoming = np.divmod(chosen, len(theirs))
            cost = self._cost_after(rank, ours[outgoing], theirs[incoming]) - self.cost
            for i in np.lexsort((squares[chosen], cost))[:1].tolist():
                value = float(cost[i]), float(squares[chosen[i]])
                if value < least:
                    best, least = (int(ours[outgoing[i]]), int(theirs[incoming[i]])), value
        return best, looked

    def _squares(self, rank: int, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Return [ours, theirs]: half of the change of the sum of squared rank loads by each exchange."""
        a, b = self.counts[:, ours], self.counts[:, theirs]
        higher = self.loads[:, rank, None] - self.loads[:, self.rank_of[theirs]]
        cross = a.T @ (2 * b + higher)
        return (a * a).sum(axis=0)[:, None] + (b * (b + higher)).sum(axis=0)[None] - cross

    def _cost_after(self, rank: int, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Return the cost after each of several exchanges of an expert of `rank` with one of another rank."""
        change, partner = self.counts[:, theirs] - self.counts[:, ours], self.rank_of[theirs]
        mine, other = self.loads[:, rank, None] + change, self.loads[:, partner] - change
        return np.maximum(np.maximum(mine, other), self._rest(rank)[:, partner]).sum(axis=0)

    def _rest(self, rank: int) -> np.ndarray:
        """Return [N, R], for each partner the largest load of all ranks except `rank` and that partner."""
        others = self.loads.copy()
        others[:, rank] = -1
        first, rows = others.argmax(axis=1), np.arange(len(others))
        rest = np.repeat(others.max(axis=1, keepdims=True), others.shape[1], axis=1)
        others[rows, first] = -1
        rest[rows, first] = others.max(axis=1)
        return rest

    def _swap(self, a: int, b: int) -> None:
        rank_a, rank_b = self.rank_of[a], self.rank_of[b]
        difference = self.counts[:, b] - self.counts[:, a]
        self.loads[:, rank_a] += difference
        self.loads[:, rank_b] -= difference
        self.rank_of[a], self.rank_of[b] = rank_b, rank_a
        self.cost = float(self.loads.max(axis=1).sum())
