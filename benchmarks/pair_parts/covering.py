"""Makes a covering array: few rows in which every pair of levels stands that the checks accept."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pair_parts.switches import ON_KEPT, SWITCHES, Checks, Row

Level = tuple[str, str]
Pair = frozenset[Level]


@dataclass
class Array:
    """Holds the rows, run by run: the first row of each is the run itself, the others are tried on its rollouts.

    Attributes:
        refused: for each pair that no accepted row has, what the checks said to the rows with it.
    """

    runs: list[list[Row]]
    pairs: set[Pair]
    refused: dict[Pair, list[str]]

    def text(self) -> str:
        """Return the array as JSON, for `read`."""
        pairs = [sorted(pair) for pair in self.pairs]
        refused = [(sorted(pair), messages) for pair, messages in self.refused.items()]
        return json.dumps({"runs": self.runs, "pairs": sorted(pairs), "refused": refused})

    @classmethod
    def read(cls, text: str) -> Array:
        """Return the array that `text` wrote."""
        kept = json.loads(text)
        refused = {_pair(pair): messages for pair, messages in kept["refused"]}
        return cls(kept["runs"], set(map(_pair, kept["pairs"])), refused)


def _pair(levels: Iterable[Iterable[str]]) -> Pair:
    return frozenset(tuple(level) for level in levels)


def pairs_of(row: Row) -> set[Pair]:
    """Return all pairs of levels of a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covering(checks: Checks, seed: int = 1, tries: int = 6) -> Array:
    """Return the array. The same seed and checks give the same array.

    tries: rows that are built for one place of the array, of which the best one is taken.
    """
    builder = _Builder(checks, random.Random(seed), tries)
    builder.sort_pairs()
    builder.add_runs()
    builder.add_kept()
    return Array(builder.runs, builder.pairs, builder.refused)


class _Builder:
    def __init__(self, checks: Checks, chance: random.Random, tries: int):
        self.checks, self.chance, self.tries = checks, chance, tries
        self.runs: list[list[Row]] = []
        self.pairs: set[Pair] = set()
        self.refused: dict[Pair, list[str]] = {}

    def sort_pairs(self) -> None:
        """Find out which pairs the checks accept."""
        order = list[Pair]()
        for a, b in itertools.combinations(SWITCHES, 2):
            for pair in itertools.product(((a, level) for level in SWITCHES[a]), ((b, level) for level in SWITCHES[b])):
                heard = list[str]()
                if self.checks.complete(dict(pair), heard=heard):
                    order.append(frozenset(pair))
                else:
                    self.refused[frozenset(pair)] = list(dict.fromkeys(heard))
        self.pairs = set(order)
        self.left = dict.fromkeys(order)  # in this order, so that a seed gives one array

    def add_runs(self) -> None:
        """Add runs until all pairs of the switches are covered that need a run of their own."""
        while left := [pair for pair in self.left if not _on_kept(pair)]:
            often = Counter(itertools.chain.from_iterable(left))
            first = max(left, key=lambda pair: sum(often[level] for level in pair))  # noqa: B023
            tried = [self._filled(dict(first), list(SWITCHES)) for _ in range(self.tries)]
            best = max(tried, key=lambda row: self._gain(row, apart=True))
            self.runs.append([])
            self._take(self.runs[-1], best)

    def add_kept(self) -> None:
        """Add rows on the rollouts of the runs, until all pairs are covered."""
        while first := next(iter(self.left), None):
            able = []
            for run in self.runs:
                fixed = {switch: level for switch, level in run[0].items() if switch not in ON_KEPT}
                if all(fixed.get(switch, level) == level for switch, level in first):
                    wanted = fixed | dict(first)
                    if self.checks.complete(wanted):
                        able.append((len(run), len(able), run, wanted))
            if not able:  # no run bears this pair
                self.runs.append([])
                self._take(self.runs[-1], self._filled(dict(first), list(SWITCHES)))
                continue
            tried = [
                (run, self._filled(wanted, list(ON_KEPT)))
                for _, _, run, wanted in sorted(able, key=lambda one: one[:2])[: self.tries]
            ]
            run, best = max(tried, key=lambda one: self._gain(one[1]))
            self._take(run, best)

    def _filled(self, fixed: Row, switches: Iterable[str]) -> Row:
        """Return an accepted row with these levels, in which the others are chosen one by one for the pairs left."""
        open_ = [switch for switch in switches if switch not in fixed]
        self.chance.shuffle(open_)
        open_.sort(key=ON_KEPT.__contains__)  # the pairs that need a run of their own decide first
        row = self.checks.complete(fixed)
        assert row is not None
        for switch in open_:
            levels = list(SWITCHES[switch])
            self.chance.shuffle(levels)
            gains = {
                level: sum(frozenset(((switch, level), one)) in self.left for one in fixed.items()) for level in levels
            }
            for level in sorted(levels, key=lambda one: -gains[one]):
                if done := self.checks.complete({**fixed, switch: level}):
                    row, fixed = done, {**fixed, switch: level}
                    break
        return row

    def _gain(self, row: Row, *, apart: bool = False) -> tuple[int, int]:
        new = [pair for pair in pairs_of(row) if pair in self.left]
        return (sum(not _on_kept(pair) for pair in new) if apart else 0), len(new)

    def _take(self, run: list[Row], row: Row) -> None:
        run.append(row)
        for pair in pairs_of(row):
            self.left.pop(pair, None)


def _on_kept(pair: Pair) -> bool:
    """Return whether rows on kept rollouts can cover a pair."""
    return any(switch in ON_KEPT for switch, _ in pair)
