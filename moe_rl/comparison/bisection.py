"""Finds which cause makes the log-probabilities of sampler and trainer differ: one setting is swapped at a time.

Each side is a `Computation`: its declared settings, the log-probabilities that it gave, and a function that computes
them under other settings. A swap moves a side's own log-probabilities by what the function predicts, run(swapped) -
run(declared). So an error that the function makes under both settings cancels. A swap is one of

    matched     the trainer takes the sampler's declared setting
    changed     a side takes a setting that neither declared
    suspected   a side is taken to have had a setting other than the declared one, and gets the declared one

A cause is found if its swap lowers the policy KL k3 = mean(exp(d) - 1 - d), d = trainer less sampler, and the interval
of the paired fall lies above 0, or nothing of the KL is left. For a suspected setting, the function must also come
closer to what that side gave. Swaps are added one by one, the best first, and dropped again where the others do without
them. Swaps that lower the KL equally well, and of which one is enough, are reported together: this batch cannot tell
them apart. The intervals are bootstrap intervals over sequences; those that decide are divided by the number of swaps
(Bonferroni).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moe_rl.comparison.quantities import CONFIDENCE, RESAMPLES, Bootstrap, Estimate, widening
from moe_rl.errors import DataError

Value = str | float | bool
Settings = Mapping[str, Value]
Who = Literal["sampler", "trainer"]
Kind = Literal["matched", "changed", "suspected"]
Verdict = Literal["carries", "either", "no", "nothing", "size only", "undecided"]

# The limits of a high-confidence interval are far out, where few resamples would leave only a handful.
_RESAMPLES = 10_000
# A swap that lowers the KL by a smaller share of it is not worth a name.
_LEAST_SHARE = 0.02
# Two float32 engines that compute the same differ by less.
_AGREE_NATS = 1e-10
_MOST_CAUSES = 6
# exp of a larger d would be infinite, and so would the difference of two swaps.
_LARGEST = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """Describes how one side computed the log-probabilities of a batch.

    Attributes:
        settings: {cause: declared value}.
        run: Returns the log-probabilities [N] of each sequence under such settings; NaN where they are not known.
        measured: The log-probabilities [N] that the side gave. None: run(settings).
        suspects: {causes: values} that the side may have had in place of the declared ones. Several causes at once have
            a tuple as key, and a tuple for each value.
        changes: {cause: values} to take in place of the declared ones.
    """

    settings: Settings
    run: Callable[[Settings], Seq[np.ndarray]]
    measured: Seq[np.ndarray] | None = None
    suspects: Mapping[str | tuple[str, ...], Seq] = field(default_factory=dict)
    changes: Mapping[str, Seq[Value]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Atom:
    """Is one setting of one side that is swapped. declared: what this side said that it has."""

    cause: str
    side: Who
    kind: Kind
    declared: Value
    value: Value


Swap = frozenset[Atom]


@dataclass(frozen=True, slots=True)
class Tested:
    """Says what one swap does.

    Attributes:
        swap: Usually one setting; several if they were swapped together.
        verdict: carries: it is a cause. either: it or one of those in `why` is: this batch cannot tell which. no: it is
            not a cause. nothing: it changes no log-probability of this batch. size only: the sides are declared to
            differ in it, and its KL is of the size of what remains, but token by token it does not fit, as with
            rounding in another order. undecided: the interval is too wide.
        alone: How far the KL falls if only this is swapped.
        besides: A found cause: how far its swap lowers the KL after all other found ones. Others: how far it falls
            further after the found ones.
        makes: The KL that the swap makes by itself.
    """

    swap: tuple[Atom, ...]
    verdict: Verdict
    alone: Estimate
    besides: Estimate
    makes: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bisection:
    """Holds what a bisection found.

    Attributes:
        kl: The policy KL k3 before, in nats per token. remaining: after the swaps of all found causes.
        fit: k3 of each side's run(settings) against what it gave: how well the function describes it.
        causes: The found causes, the largest first. others: All other swaps.
        untested: {cause: why it was not swapped}.
    """

    sequences: int
    tokens: int
    kl: Estimate
    remaining: Estimate
    fit: Mapping[str, float]
    causes: list[Tested]
    others: list[Tested]
    untested: Mapping[str, str]

    @property
    def explained(self) -> bool:
        """Return whether the found causes carry most of the KL, or there is none."""
        return self.remaining.value < max(self.kl.value / 2, _AGREE_NATS)


def bisect(
    sampler: Computation, trainer: Computation, *, untested: Mapping[str, str] | None = None, seed: int = 0
) -> Bisection:
    """Find the causes of the policy KL between the two sides.

    Args:
        untested: {cause: reason}, for the report, of what could not be swapped.
        seed: Of the bootstrap.

    Raises:
        DataError: The sides gave other numbers of log-probabilities, or fewer than two sequences.
    """
    search = _CauseSearch(sampler, trainer, seed)
    causes, rivals = search.causes()
    rows = [search.tested(frozenset([atom]), causes, rivals) for atom in causes]
    others = [search.tested(swap, causes, rivals) for swap in search.swaps if not swap & causes]
    before, after = search.kl(frozenset()), search.kl(causes)
    return Bisection(
        len(search.lengths),
        int(search.lengths.sum()),
        search.mean(before),
        search.mean(after),
        {side: float(np.nanmean(_k3(search.ran(side, {}) - search.given[side]))) for side in search.sides},
        sorted(rows, key=lambda row: -row.besides.value),
        sorted(others, key=lambda other: -other.alone.value),
        dict(untested or {}),
    )


class _CauseSearch:
    """Tries swaps. `kl` is k3 of each token [N]."""

    def __init__(self, sampler: Computation, trainer: Computation, seed: int):
        self.sides: dict[Who, Computation] = {"sampler": sampler, "trainer": trainer}
        self._runs: dict[tuple[Who, frozenset], np.ndarray] = {}
        self.given: dict[Who, np.ndarray] = {}
        shapes = []
        for name, side in self.sides.items():
            measured = side.run(side.settings) if side.measured is None else side.measured
            shapes.append([len(logprobs) for logprobs in measured])
            self.given[name] = np.concatenate([np.empty(0), *measured]).astype(np.float64)
        if shapes[0] != shapes[1] or len(shapes[0]) < 2 or not sum(shapes[0]):
            raise DataError(
                "the log-probabilities of sampler and trainer do not belong together",
                got=f"{len(shapes[0])} and {len(shapes[1])} sequences, {sum(shapes[0])} and {sum(shapes[1])} tokens",
                expected="at least 2 sequences, with the same number of tokens on both sides",
            )
        self.lengths = np.array(shapes[0])
        self._owners = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.swaps = list(dict.fromkeys(self._swaps()))
        self._usual, self._strict = (
            (Bootstrap(len(self.lengths), seed=seed, resamples=resamples, confidence=confidence), confidence)
            for resamples, confidence in ((RESAMPLES, CONFIDENCE), (_RESAMPLES, 1 - 0.05 / max(1, len(self.swaps))))
        )

    def _swaps(self) -> Iterator[Swap]:
        sampler, trainer = self.sides["sampler"].settings, self.sides["trainer"].settings
        matched = [
            Atom(cause, "trainer", "matched", trainer[cause], value)
            for cause, value in sampler.items()
            if cause in trainer and trainer[cause] != value
        ]
        yield from (frozenset([atom]) for atom in matched)
        if len(matched) > 1:
            yield frozenset(matched)
        kinds: tuple[tuple[Kind, str], ...] = (("suspected", "suspects"), ("changed", "changes"))
        for (name, side), (kind, attribute) in itertools.product(self.sides.items(), kinds):
            for causes, values in getattr(side, attribute).items():
                keys = causes if isinstance(causes, tuple) else (causes,)
                for value in values:
                    pairs = zip(keys, value if isinstance(causes, tuple) else (value,), strict=True)
                    atoms = (Atom(key, name, kind, side.settings[key], new_value) for key, new_value in pairs)
                    if swap := frozenset(atom for atom in atoms if atom.declared != atom.value):
                        yield swap

    def ran(self, side: Who, changes: Settings) -> np.ndarray:
        """Return the log-probabilities [N] that a side's function computes under changed settings."""
        key = side, frozenset(changes.items())
        if key not in self._runs:
            logprobs = self.sides[side].run({**self.sides[side].settings, **changes})
            self._runs[key] = np.concatenate([np.empty(0), *logprobs]).astype(np.float64)
        return self._runs[key]

    def moved(self, swap: Swap) -> np.ndarray:
        """Return by how much [N] a swap moves d."""
        total = np.zeros(len(self._owners))
        signs: dict[Who, int] = {"sampler": -1, "trainer": 1}
        for side, sign in signs.items():
            for suspected in (False, True):
                here = {a.cause: a.value for a in swap if a.side == side and (a.kind == "suspected") == suspected}
                if here:
                    total += (-sign if suspected else sign) * (self.ran(side, here) - self.ran(side, {}))
        return total

    def kl(self, swap: Swap) -> np.ndarray:
        return _k3(self.given["trainer"] - self.given["sampler"] + self.moved(swap))

    def mean(self, values: np.ndarray, strict: bool = False) -> Estimate:
        """Return the mean of the finite values, with its interval over sequences."""
        bootstrap, confidence = self._strict if strict else self._usual
        known = np.isfinite(values)
        sums, counts = (
            np.bincount(self._owners, part, len(self.lengths)) for part in (np.where(known, values, 0), known)
        )
        mean = bootstrap.mean(sums, counts)
        wider = widening(len(self.lengths), confidence)
        return Estimate(mean.value, *(mean.value + wider * (end - mean.value) for end in (mean.low, mean.high)))

    def fall(self, before: Swap, after: Swap, strict: bool = False) -> Estimate:
        return self.mean(self.kl(before) - self.kl(after), strict)

    def causes(self) -> tuple[Swap, dict[Atom, list[Swap]]]:
        """Return the settings whose swaps together explain the KL, and for each the swaps that do as well."""
        causes: Swap = frozenset()
        rivals: dict[Atom, list[Swap]] = {}
        whole = float(np.nanmean(self.kl(causes)))
        for _ in range(_MOST_CAUSES):
            if self._agree(causes):
                break
            taken = {(atom.side, atom.cause) for atom in causes}
            now = self.kl(causes)
            better = {
                swap: fall
                for swap in self.swaps
                if not any((atom.side, atom.cause) in taken for atom in swap)
                and self._fits(causes, swap)
                and (fall := float(np.nanmean(now - self.kl(causes | swap)))) > _LEAST_SHARE * whole
                and (self._agree(causes | swap) or self.fall(causes, causes | swap, strict=True).low > 0)
            }
            if not better:
                break
            best = max(better, key=lambda swap: better[swap])
            alike = [swap for swap in better if not swap & best and self._alike(causes, best, swap)]
            causes = self._needed(causes | best, whole)
            rivals |= dict.fromkeys(best & causes, alike)
        return causes, {atom: alike for atom, alike in rivals.items() if atom in causes}

    def _agree(self, causes: Swap) -> bool:
        """Return whether nothing is left of the KL. No chance makes all tokens of a batch agree."""
        return bool(np.nanmean(self.kl(causes)) < _AGREE_NATS)

    def _fits(self, causes: Swap, swap: Swap) -> bool:
        """Return whether each suspected side's own log-probabilities come closer to what the side gave."""
        for side in {atom.side for atom in swap if atom.kind == "suspected"}:
            apart = []
            for atoms in (causes, causes | swap):
                here = {a.cause: a.value for a in atoms if a.side == side and a.kind == "suspected"}
                apart.append(_k3(self.ran(side, here) - self.given[side]))
            if not np.nanmean(apart[0] - apart[1]) > 0:  # of the tokens that are known in both
                return False
        return True

    def _alike(self, causes: Swap, best: Swap, rival: Swap) -> bool:
        """Return whether two swaps lower the KL equally well, and one of them is enough: the second brings no more."""
        if self.fall(causes | rival, causes | best).low > 0:
            return False
        taken = {(atom.side, atom.cause) for atom in best}
        if any((atom.side, atom.cause) in taken for atom in rival):
            return True
        return self.fall(causes | best, causes | best | rival, strict=True).low <= 0

    def _needed(self, causes: Swap, whole: float) -> Swap:
        """Return the swaps without those that the others do without."""
        while len(causes) > 1:
            lost = {atom: self.fall(causes - {atom}, causes) for atom in causes}
            least = min(sorted(causes, key=str), key=lambda atom: lost[atom].value)
            if lost[least].low > 0 and lost[least].value > _LEAST_SHARE * whole:
                break
            causes -= {least}
        return causes

    def tested(self, swap: Swap, causes: Swap, rivals: Mapping[Atom, list[Swap]]) -> Tested:
        """Return what a swap does, alone and besides the found causes."""
        least, left = _LEAST_SHARE * float(np.nanmean(self.kl(frozenset()))), float(np.nanmean(self.kl(causes)))
        alone, makes = self.fall(frozenset(), swap), float(np.nanmean(_k3(self.moved(swap))))
        verdict: Verdict
        if swap <= causes:
            besides = self.fall(causes - swap, causes)
            alike = [name for atom in swap for name in map(names, rivals.get(atom, []))]
            verdict, why = ("either", "or " + " or ".join(alike)) if alike else ("carries", "")
            if not alike and (alone.high < besides.low or besides.high < alone.low):
                why = "depends on the others"
        else:
            taken = {(atom.side, atom.cause) for atom in swap}
            rest = frozenset(atom for atom in causes if (atom.side, atom.cause) not in taken)
            besides, why = self.fall(causes, rest | swap), ""
            if mirrors := [names(frozenset([atom])) for atom, alike in rivals.items() if swap in alike]:
                verdict, why = "either", "or " + " or ".join(mirrors)
            elif makes < _AGREE_NATS:
                verdict = "nothing"
            elif not self._fits(causes, swap):
                verdict = "no"
            elif left > least and left / 2 < makes < 2 * left and all(atom.kind != "suspected" for atom in swap):
                verdict = "size only"
            else:
                verdict = "no" if besides.high <= least or left <= least else "undecided"
        return Tested(tuple(sorted(swap, key=str)), verdict, alone, besides, makes, why)


def _k3(d: np.ndarray) -> np.ndarray:
    return np.expm1(np.minimum(d, _LARGEST)) - d


def names(swap: Iterable[Atom]) -> str:
    """Return a swap in words."""
    by_value: dict[tuple, list[str]] = {}
    for atom in sorted(swap, key=str):
        by_value.setdefault((atom.side, atom.kind, atom.declared, atom.value), []).append(atom.cause)
    words = {
        "matched": "trainer {0}, sampler {1}",
        "changed": "{2} {0}, changed to {1}",
        "suspected": "{2} had {1}, not {0}",
    }
    parts = (
        f"{', '.join(causes)}: " + words[kind].format(declared, value, side)
        for (side, kind, declared, value), causes in by_value.items()
    )
    return " and ".join(parts)


def text(result: Bisection) -> str:
    """Format a bisection as a table. It shows the best swap of each cause, in shares of the KL before."""
    whole = result.kl.value
    lines = [
        f"policy KL k3 {result.kl.value:.2g} [{result.kl.low:.2g}, {result.kl.high:.2g}] nats/token, of "
        f"{result.sequences} sequences, {result.tokens} tokens",
        f"k3 of the forward pass here: {result.fit['sampler']:.2g} to the sampler, {result.fit['trainer']:.2g} to the "
        "trainer",
    ]
    untested = [f"  not tested: {cause}: {why}" for cause, why in result.untested.items()]
    if whole < _AGREE_NATS:
        return "\n".join([*lines, *untested, "verdict: the two sides agree"])

    def share(value: float) -> str:
        return f"{value:.0%}" if abs(value) < 10 else f"{value:.0f}x"

    def interval(estimate: Estimate) -> str:
        return f"{share(estimate.value / whole)} [{share(estimate.low / whole)}, {share(estimate.high / whole)}]"

    best = {row.swap[0].cause: row for row in reversed(result.others) if len(row.swap) == 1}
    for atom in (atom for row in result.causes for atom in row.swap):
        best.pop(atom.cause, None)
    rows = [*result.causes, *sorted(best.values(), key=lambda row: -row.alone.value)]
    words = [names(row.swap) for row in rows]
    width = max(map(len, words), default=0) + 2
    lines.append(f"  {'swapped':<{width}}{'verdict':<11}{'removes alone':<22}{'besides the found':<22}makes")
    for name, row in zip(words, rows, strict=True):
        numbers = f"{interval(row.alone):<22}{interval(row.besides):<22}{share(row.makes / whole)}"
        lines.append(f"  {name:<{width}}{row.verdict:<11}{numbers}  {row.why}".rstrip())
    causes = (
        f"{names(row.swap)}, {row.why}".rstrip(", ") + f" ({share(row.besides.value / whole)})" for row in result.causes
    )
    verdict = "verdict: " + ("; ".join(causes) or "none of the tested causes carries the KL")
    return "\n".join([*lines, *untested, verdict, f"what remains: {interval(result.remaining)}"])
