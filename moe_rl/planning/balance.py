"""Packs sequences so that all expert-parallel ranks get the same number of (token, expert) pairs in every layer.

The routes of a batch are known before its forward pass. All expert-parallel ranks of a group run their m-th microbatch
at the same time. In each layer they wait for the rank whose experts got the most pairs. The load of a rank is the sum
over all sequences in the group's m-th microbatches, called a round here. It does not depend on which rank of the group
holds a sequence. The module uses only NumPy, no clock and no random numbers.

Legend for shapes: S sequences, L MoE layers, E experts per layer, R expert-parallel ranks, N rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_rl.planning.packing import pack, wrong_call

Plan = list[list[list[int]]]

# Approximate number of elements that one attempt reads: enough to cover all pairs of sequences of a small problem, few
# enough to stay in the cache.
_AT_ONCE = 1 << 16
# Fixed cost of an attempt, in units of the time to read one element.
_ATTEMPT = 20_000
# Number of exchanges between two rounds before the next pair of rounds is tried.
_IN_A_ROW = 8
# The search continues while reading _STAGE elements, about a tenth of a second, lowers the excess by _WORTH.
_STAGE, _WORTH = 125_000_000, 0.0025


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Reports the result of packing by load.

    The excess is the sum over rounds and layers of the maximum over the expert-parallel ranks, divided by the sum of
    the means, minus 1. 0 means even load.

    Attributes:
        by_length: the excess of packing by length.
        planned: the excess of the returned plan.
        floor: a lower bound of the excess of any packing: the sum of maxima is at least the maximum of sums, so no
            packing evens out experts that are popular in the whole batch.
        packing: "length" if the search found nothing better than packing by length.
        why: the reason if packing is "length", else how the search ended.
        swaps: the number of pairs of sequences that were exchanged.
    """

    by_length: float
    planned: float
    floor: float
    packing: str
    why: str
    swaps: int


def load_of(counts_SLE: np.ndarray, expert_parallel: int) -> np.ndarray:
    """Sum pairs over the experts of each expert-parallel rank: [S, L, E] -> int32 [S, L, R].

    The ranks hold consecutive experts, the same number each.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """
    counts_SLE = np.asarray(counts_SLE)
    check_division(counts_SLE, "SLE", expert_parallel)
    sequences, layers, experts = counts_SLE.shape
    grouped = counts_SLE.reshape(sequences, layers, expert_parallel, experts // expert_parallel)
    return grouped.sum(axis=3, dtype=np.int32)


def check_division(counts: np.ndarray, axes: str, expert_parallel: int) -> None:
    """Raise ValueError if counts lack these axes, or if the experts of the last one do not divide among the ranks."""
    if counts.ndim != len(axes) or expert_parallel < 1 or counts.shape[-1] % expert_parallel:
        what = "the number of experts is not a multiple of the number of ranks"
        got = f"counts of shape {counts.shape} for {expert_parallel} ranks"
        raise wrong_call(what, got, f"[{', '.join(axes)}], E a multiple of the ranks", "division")


def round_loads(plan: Plan, loads_SLR: np.ndarray, *, exchange: int) -> np.ndarray:
    """Return int64 [N, L, R]: the pairs that arrive at each expert-parallel rank in each round.

    Rounds are numbered group by group. `pack_by_load` explains `exchange`.
    """
    rounds = [
        [index for rank in plan[first : first + exchange] for index in rank[number]]
        for first in range(0, len(plan), exchange)
        for number in range(len(plan[first]))
    ]
    loads = [loads_SLR[members].sum(axis=0, dtype=np.int64) for members in rounds]
    return np.array(loads, np.int64).reshape(len(rounds), *loads_SLR.shape[1:])


def excess(loads_NLR: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the excess over all layers, and float64 [L] the excess of each layer.

    The excess is the sum over rounds of the maximum, divided by the sum over rounds of the mean, minus 1. Rounds and
    layers weigh by their number of pairs. It is 0 where there are no pairs.
    """
    most = loads_NLR.max(axis=2).sum(axis=0).astype(np.float64)
    mean = loads_NLR.sum(axis=(0, 2)) / loads_NLR.shape[2]
    by_layer = np.divide(most, mean, out=np.ones_like(most), where=mean > 0) - 1
    return (float(most.sum() / mean.sum()) - 1 if mean.sum() else 0.0), by_layer


def pack_by_load(
    lengths: list[int],
    loads_SLR: np.ndarray,
    *,
    ranks: int,
    microbatch_tokens: int,
    exchange: int | None = None,
    slack: float = 0.05,
    work: int = 6_000_000_000,
) -> tuple[Plan, LoadReport]:
    """Divide sequences among ranks and microbatches with even expert load.

    Minimises the sum over rounds and layers of the maximum over expert-parallel ranks. It starts from packing by length
    and exchanges sequences between rounds while this sum falls enough for the time spent. The result is never worse
    than packing by length, has the same number of microbatches, and empties none.

    Args:
        lengths: the number of tokens of each sequence, as in `packing.pack`.
        loads_SLR: non-negative integers, the pairs of each sequence for each expert-parallel rank (see `load_of`).
        exchange: number of neighbouring data-parallel ranks that send their tokens to the same experts. None: all.
        slack: how much tokens may become uneven for even expert load. No rank of a microbatch gets more than 1 + slack
            times the tokens, or the sum of squared lengths (the cost of attention), of the fullest rank in the same
            microbatch of packing by length. None exceeds `microbatch_tokens`.
        work: bound of the search, in elements read. 1e9 take less than a second. The bound is not in time, so that a
            repeated call returns the same plan.

    Returns:
        result[rank][microbatch], a list of indices of sequences, and a report.

    Raises:
        ConfigError: as `pack`.
        ValueError: as `pack`; or loads have a wrong shape or are negative, `exchange` does not divide the ranks, or
            slack is negative.
    """
    loads_SLR = np.asarray(loads_SLR)
    exchange = ranks if exchange is None else exchange
    problem = None
    if loads_SLR.ndim != 3 or len(loads_SLR) != len(lengths) or 0 in loads_SLR.shape[1:]:
        problem = f"loads of shape {loads_SLR.shape} for {len(lengths)} sequences"
    elif not np.issubdtype(loads_SLR.dtype, np.integer) or (loads_SLR.size and loads_SLR.min() < 0):
        problem = f"loads of type {loads_SLR.dtype}, the least {loads_SLR.min(initial=0)}"
    elif exchange < 1 or ranks % exchange or slack < 0:
        problem = f"ranks={ranks}, exchange={exchange}, slack={slack}"
    if problem:
        expected = "integers [S, L, R] of 0 or more; an exchange that divides ranks; slack 0 or more"
        raise wrong_call("cannot pack by load", problem, expected)
    start = pack(lengths, ranks=ranks, microbatch_tokens=microbatch_tokens)
    before, _ = excess(round_loads(start, loads_SLR, exchange=exchange))
    floor, _ = excess(loads_SLR.sum(axis=0, keepdims=True, dtype=np.int64))

    def keep(why: str) -> tuple[Plan, LoadReport]:
        return start, LoadReport(before, before, floor, "length", why, 0)

    rounds = (ranks // exchange) * len(start[0])
    if rounds < 2:
        alone = "one round holds everything, so there is nothing to exchange"
        return keep(alone if rounds else "there are no sequences")
    if 0 < before - floor < _WORTH:
        return keep("packing by length is near the floor")
    search = _Search(lengths, loads_SLR, start, exchange, microbatch_tokens, slack)
    ended = search.run(work)
    plan = search.plan()
    after, _ = excess(round_loads(plan, loads_SLR, exchange=exchange))
    if after >= before:
        return keep("no exchange that keeps the tokens even made the expert load more even")
    return plan, LoadReport(before, after, floor, "load", ended, search.swaps)


class _Search:
    """Exchanges pairs of sequences between rounds. Loads are float32 here; the result is judged in integers.

    A bin is what one rank runs in one round.

    Attributes:
        sizes: [S, 2], the length of each sequence and its square.
        bins: the bin of each sequence.
        filled: [bins, 2], the sum of sizes in each bin.
        limits: [N, 2], the limit of every bin in a round.
        load: [N, R, L].
        cost: [N], the sum over layers of the maximum of `load` over ranks.
        slopes: the slope of each round's cost, if computed since the round last changed; else None.
        floor, mean: the least that the sum of `cost` can be, and what it would be if all loads were even.
    """

    def __init__(self, lengths: list[int], loads_SLR: np.ndarray, plan: Plan, exchange: int, budget: int, slack: float):
        self.ranks, self.exchange, self.microbatches = len(plan), exchange, len(plan[0])
        self.loads = np.ascontiguousarray(loads_SLR.transpose(0, 2, 1), np.float32)
        self.sizes = np.array(lengths, np.float64)[:, None] ** (1, 2)
        self.bins = np.empty(len(lengths), np.int64)
        for rank, microbatches in enumerate(plan):
            for number, members in enumerate(microbatches):
                self.bins[members] = rank * self.microbatches + number
        self.filled = np.zeros((self.ranks * self.microbatches, 2))
        np.add.at(self.filled, self.bins, self.sizes)
        # Microbatch m has the same limits in all groups.
        fullest = self.filled.reshape(self.ranks, self.microbatches, 2).max(axis=0)
        limits = np.floor((1 + slack) * fullest + 1e-9)
        limits[:, 0] = np.minimum(limits[:, 0], budget)
        self.limits = np.tile(limits, (self.ranks // exchange, 1))
        round_of = self.bins // self.microbatches // exchange * self.microbatches + self.bins % self.microbatches
        self.members = [np.flatnonzero(round_of == number) for number in range(len(self.limits))]
        self.load = np.stack([self.loads[members].sum(axis=0) for members in self.members])
        self.cost = self._cost(self.load)
        whole = self.load.sum(axis=0, dtype=np.float64)
        self.floor, self.mean = self._cost(whole), whole.sum() / len(whole)
        self.slopes: list[np.ndarray | None] = [None] * len(self.members)
        self.swaps = 0
        numbers = self.load[0].size
        self.window, self.tried = max(32, 2 * _AT_ONCE // numbers), max(16, _AT_ONCE // numbers)
        # A rank whose load is nearer to the maximum than one sequence's share may become the maximum by one exchange.
        self.scale = max(float(self.loads.mean()), 1e-6)

    def run(self, work: int) -> str:
        """Try all pairs of rounds until no pair improves, little is left to gain, or the work is used up. Return what
        happened."""
        teams = list(range(len(self.members) + len(self.members) % 2))  # of an odd number of rounds one has no partner
        turns = (len(teams) - 1) * -(-max(map(len, self.members)) // self.window)
        quiet = attempts = 0
        total, look = self.cost.sum(), work - _STAGE
        while quiet < turns:
            if work < look:
                reached = self.cost.sum()
                if min(total - reached, reached - self.floor) < _WORTH * self.mean:
                    return "more exchanges would gain too little"
                total, look = reached, work - _STAGE
            improved = False
            for first, second in zip(teams[: len(teams) // 2], reversed(teams), strict=False):
                if max(first, second) == len(self.members):
                    continue
                for _ in range(_IN_A_ROW):
                    work -= self._work(first, second)
                    if work < 0:
                        return "the search reached its work limit"
                    attempts += 1
                    if not self._improve(first, second, attempts * self.window):
                        break
                    improved = True
            quiet = 0 if improved else quiet + 1
            teams[1:] = [teams[-1], *teams[1:-1]]  # every pair meets once in len(teams) - 1 turns
        return "no exchange improves the plan any more"

    def plan(self) -> Plan:
        flat: list[list[int]] = [[] for _ in self.filled]
        for index, number in enumerate(self.bins.tolist()):
            flat[number].append(index)
        return [flat[first : first + self.microbatches] for first in range(0, len(flat), self.microbatches)]

    def _work(self, first: int, second: int) -> int:
        """Return the approximate number of elements that an attempt reads, plus its fixed cost."""
        in_first, in_second = (min(len(self.members[number]), self.window) for number in (first, second))
        return _ATTEMPT + self.load[0].size * (in_first + in_second + 6 * min(in_first * in_second, self.tried))

    def _improve(self, first: int, second: int, start: int) -> bool:
        """Make the best exchange between two rounds, if one improves them.

        In large rounds only a window of sequences, beginning at number `start`, is searched. A cost is convex, so the
        slope of the maxima predicts too large a gain, and exchanges without a predicted gain are left out. If many
        remain, only those with the largest gain predicted from smooth weights are evaluated exactly.
        """
        places, ours = self._some(first, start)
        others, theirs = self._some(second, start)
        outgoing, incoming = np.nonzero(self._predicted(ours, theirs, self._slope(first) - self._slope(second)) < 0)
        fitting = self._fits(ours[outgoing], theirs[incoming], first, second)
        outgoing, incoming = outgoing[fitting], incoming[fitting]
        if len(outgoing) > self.tried:
            falls = self._predicted(ours, theirs, self._weights(first) - self._weights(second))[outgoing, incoming]
            chosen = np.sort(np.argpartition(falls, self.tried - 1)[: self.tried])
            outgoing, incoming = outgoing[chosen], incoming[chosen]
        if not len(outgoing):
            return False
        change = self.loads[theirs[incoming]] - self.loads[ours[outgoing]]
        cost = self._cost(self.load[first] + change), self._cost(self.load[second] - change)
        best = int(np.argmin(cost[0] + cost[1]))
        if cost[0][best] + cost[1][best] >= self.cost[first] + self.cost[second] - 0.5:
            return False
        a, b = ours[outgoing[best]], theirs[incoming[best]]
        self.members[first][places[outgoing[best]]], self.members[second][others[incoming[best]]] = b, a
        self.load[first] += change[best]
        self.load[second] -= change[best]
        self.cost[first], self.cost[second] = cost[0][best], cost[1][best]
        self.slopes[first] = self.slopes[second] = None
        difference = self.sizes[b] - self.sizes[a]
        self.filled[self.bins[a]] += difference
        self.filled[self.bins[b]] -= difference
        self.bins[a], self.bins[b] = self.bins[b], self.bins[a]
        self.swaps += 1
        return True

    def _some(self, number: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions in members[number], and the sequences at these positions."""
        count = len(self.members[number])
        places = np.arange(start, start + min(count, self.window)) % max(1, count)
        return places, self.members[number][places]

    def _predicted(self, ours: np.ndarray, theirs: np.ndarray, slope_RL: np.ndarray) -> np.ndarray:
        """Return [ours, theirs]: how much an exchange of two sequences changes the cost along a slope."""
        gains, losses = (
            self.loads[some].reshape(len(some), slope_RL.size) @ slope_RL.ravel() for some in (theirs, ours)
        )
        return gains[None] - losses[:, None]

    def _cost(self, load: np.ndarray) -> np.ndarray:
        """Return float64 [...]: the sum over layers of the maximum over ranks of loads [..., R, L]."""
        return load.max(axis=-2).sum(axis=-1, dtype=np.float64)

    def _slope(self, number: int) -> np.ndarray:
        """Return [R, L]: a subgradient of the round's cost, 1 at the fullest rank of each layer."""
        slope = self.slopes[number]
        if slope is None:
            load = self.load[number]
            slope = self.slopes[number] = np.zeros_like(load)
            slope[load.argmax(axis=0), np.arange(load.shape[1])] = 1
        return slope

    def _weights(self, number: int) -> np.ndarray:
        """Return [R, L]: a smooth gradient of each layer's maximum with respect to each rank's load. Each layer sums to
        1.
        """
        load = self.load[number]
        weights = np.exp((load - load.max(axis=0)) / self.scale)
        return weights / weights.sum(axis=0)

    def _fits(self, ours: np.ndarray, theirs: np.ndarray, first: int, second: int) -> np.ndarray:
        """Return bool [pairs]: whether both bins stay within their limits after an exchange of the two sequences."""
        more = self.sizes[theirs] - self.sizes[ours]
        room, other = (
            self.limits[number] - self.filled[self.bins[some]] for number, some in ((first, ours), (second, theirs))
        )
        return ((more <= room) & (-more <= other)).all(axis=1)
