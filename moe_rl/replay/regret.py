"""Measures, for the alignment test, how far recorded experts are from those that a router would choose.

Regret is (mean score of the router's own top-k - mean score of the recorded experts) / (the same for random experts).
It is 0 for the router's own choice and 1 for random experts. A near tie costs nothing, a wrong row about 1, one wrong
expert of K about 1 / K.

`LayerSeen` keeps a few numbers for each row of a (microbatch, layer), and the scores of some hundred rows. All stays on
the device. The faults that measure a claim's power are planted here, from other rows of the same microbatch.

Legend: N recorded rows of a microbatch, S sampled rows, P rows paired with rows of another sequence, Q rows at special
places, F rows whose single ids are tested, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.replay.row_places import SAMPLED_ROWS, PassRows, pairs

FINE_ROWS = 2048
"""Number of rows of a pass that are tested for single wrong ids."""

_VARIED = ("wrong", "depth", "come", "gone", "inside")

SPECIAL = ("last prompt row", "first completion row", "every 16th row")


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """Holds the rows of a pass that are tested, in host memory.

    Attributes:
        rows: All recorded rows.
        pairs: For "prompts" and "completions" int64 [2, M], indices into `rows`.
        special: For each of SPECIAL, indices into `rows`.
        sample, paired, placed, fine: The rows of each kind: int64, sorted indices into `rows`.
    """

    rows: PassRows
    pairs: dict[str, np.ndarray]
    special: dict[str, np.ndarray]
    sample: np.ndarray
    paired: np.ndarray
    placed: np.ndarray
    fine: np.ndarray

    @classmethod
    def of(cls, rows: PassRows) -> Watched:
        """Choose the rows."""
        chosen = pairs(rows)
        follows = rows.before != np.arange(len(rows.before))
        places = (rows.position == rows.prompt - 1, rows.position == rows.prompt, rows.position % 16 == 0)
        special = {name: _some(np.flatnonzero(follows & at)) for name, at in zip(SPECIAL, places, strict=True)}
        return cls(
            rows,
            chosen,
            special,
            rows.windows(SAMPLED_ROWS),
            np.unique(np.concatenate([one.ravel() for one in chosen.values()])),
            np.unique(np.concatenate([*special.values()])),
            rows.windows(FINE_ROWS),
        )

    def of_microbatch(self, number: int, device: torch.device) -> MicrobatchRows:
        """Return the same for one microbatch, on the device. Indices count its recorded rows."""
        here, rows = self.rows.of_microbatch(number), self.rows
        count = here.stop - here.start
        rng = np.random.default_rng(number)

        def mine(chosen: np.ndarray) -> Tensor:
            inside = chosen[(chosen >= here.start) & (chosen < here.stop)] - here.start
            return torch.from_numpy(inside).to(device)

        drawn = (rng.integers(0, max(count, 1), count), rng.integers(0, 1 << 30, (2, count)))
        recorded, before, other, numbers = (
            torch.from_numpy(one).to(device) for one in (rows.row[here], rows.before[here] - here.start, *drawn)
        )
        sample, paired, placed, fine = (mine(one) for one in (self.sample, self.paired, self.placed, self.fine))
        return MicrobatchRows(
            recorded=recorded,
            before=before,
            other=other,
            drawn=numbers,
            sample=sample,
            paired=paired,
            placed=placed,
            fine=fine,
            repeated=torch.stack([mine(one) for one in _windows(self.sample, rows)]),
        )


def _windows(sample: np.ndarray, rows: PassRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampled rows that follow another sampled row, and for each the first row of its run of neighbours."""
    starts = np.r_[True, (np.diff(sample) != 1) | (rows.before[sample[1:]] == sample[1:])][: len(sample)]
    first = sample[np.maximum.accumulate(np.where(starts, np.arange(len(sample)), 0))] if len(sample) else sample
    return sample[~starts], first[~starts]


def _some(rows: np.ndarray) -> np.ndarray:
    """Choose rows evenly, fewer than eight times SAMPLED_ROWS."""
    return rows[:: max(1, len(rows) // (4 * SAMPLED_ROWS))]


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchRows:
    """Holds the rows of `Watched` in one microbatch, on the device.

    Attributes:
        recorded: [N], the recorded rows among the R rows of the microbatch.
        before, other: [N], the row before in the same sequence, and a row drawn at random.
        drawn: [2, N], random numbers below 2**30.
        sample, paired, placed, fine: [S], [P], [Q], [F].
        repeated: [2, F'], sampled rows, and for each the first row of its window of neighbours.
    """

    recorded: Tensor
    before: Tensor
    other: Tensor
    drawn: Tensor
    sample: Tensor
    paired: Tensor
    placed: Tensor
    fine: Tensor
    repeated: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerSeen:
    """Holds the measurements of one (microbatch, layer) that the tests need.

    Attributes:
        own: [N], regret of the recorded experts on their own row.
        apart: [N], regret of the choice of another row: how far the two are apart.
        away: [N], regret of the recorded experts on the other row.
        stuck: bool [N], the recorded experts are those of the row before.
        run: [N], regret of the first row of the run of equal records that the row is in.
        kept_groups: bool [N], the recorded experts belong to groups that the router would choose. A near tie between
            two groups replaces many experts at once.
        run_apart: [N], how far the row and the first row of its run are apart; the smaller of both directions.
        repeated, first, first_apart, first_groups: [F'], for the sampled rows after the first of a window: regret of
            the first row's record, here and on its own row; how far the two rows are apart; and kept_groups of that
            record here.
        late: [Q], regret of the recorded experts on the row before.
        early: [Q], regret of the experts recorded for the row before.
        step: [Q], how far the row and the row before are apart.
        wrong, depth, come, gone: [4, F], of the record; of the record with one id replaced; of the other row's record;
            and of the record with the same expert in every row. They hold the number of ids that the router would not
            choose, their mean regret, the lowest-scoring of them, and the expert that the router misses most.
        inside: bool [4, F], kept_groups of these four.
        ids, choice: int64 [F, K].
        used: int64 [1, E], how often each expert is recorded.
        sample_ids, sample_scores: [S, K], [S, E]: recorded experts; regret of each expert alone.
        pair_ids, pair_choice, pair_scores: [P, K], [P, K], [P, E].
    """

    own: Tensor
    apart: Tensor
    away: Tensor
    stuck: Tensor
    run: Tensor
    kept_groups: Tensor
    run_apart: Tensor
    repeated: Tensor
    first: Tensor
    first_apart: Tensor
    first_groups: Tensor
    late: Tensor
    early: Tensor
    step: Tensor
    wrong: Tensor
    depth: Tensor
    come: Tensor
    gone: Tensor
    inside: Tensor
    ids: Tensor
    choice: Tensor
    used: Tensor
    sample_ids: Tensor
    sample_scores: Tensor
    pair_ids: Tensor
    pair_choice: Tensor
    pair_scores: Tensor

    @classmethod
    def of(cls, routes: Tensor, native: Tensor, scores: Tensor, rows: MicrobatchRows, groups: int) -> LayerSeen:
        """Measure one layer.

        Args:
            routes, native, scores: [R, K], [R, K], [R, E], of all rows of the microbatch.
            groups: Number of groups of experts among which the router chooses first.
        """
        ids, choice, scores = (
            one if len(rows.recorded) == len(one) else one.index_select(0, rows.recorded)
            for one in (routes, native, scores.detach())
        )
        ids, choice, scores = ids.long(), choice.long(), scores.float()
        regret = Regret.of(choice, scores)
        here = torch.arange(len(ids), device=ids.device)
        sets = _salts(scores.shape[1], ids.device)[ids].sum(1)
        stuck = (sets == sets[rows.before]) & (rows.before != here)
        start = torch.where(stuck, torch.zeros_like(here), here).cummax(0)[0]
        own, other = regret(ids), rows.other
        fine, placed, sample, paired = rows.fine, rows.placed, rows.sample, rows.paired
        behind = rows.before[placed]
        later, first = rows.repeated
        return cls(
            own=own,
            apart=regret(choice[other]),
            away=regret(ids, other),
            stuck=stuck,
            run=own[start],
            kept_groups=_same_groups(ids, choice, groups, scores.shape[1]),
            run_apart=torch.minimum(regret(choice[start]), regret(choice, start)),
            repeated=regret(ids[first], later),
            first=own[first],
            first_apart=torch.minimum(regret(choice[first], later), regret(choice[later], first)),
            first_groups=_same_groups(ids[first], choice[later], groups, scores.shape[1]),
            late=regret(ids[placed], behind),
            early=regret(ids[behind], placed),
            step=torch.minimum(regret(choice[behind], placed), regret(choice[placed], behind)),
            **_single_ids(ids, choice, regret, rows, groups),
            ids=ids[fine],
            choice=choice[fine],
            used=torch.bincount(ids.flatten(), minlength=scores.shape[1])[None],
            sample_ids=ids[sample],
            sample_scores=regret.of_experts(sample),
            pair_ids=ids[paired],
            pair_choice=choice[paired],
            pair_scores=regret.of_experts(paired),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Regret:
    """Computes regrets of rows. best, spread: [N], the mean score of a row's own choice, and how much higher it is than
    that of random experts. scores: [N, E]."""

    scores: Tensor
    best: Tensor
    spread: Tensor

    @classmethod
    def of(cls, choice: Tensor, scores: Tensor) -> Regret:
        """choice: int64 [N, K]."""
        best = scores.gather(1, choice).mean(1)
        # Where all experts score alike, every choice has regret 0.
        return cls(scores, best, (best - scores.mean(1)).clamp(min=0) + 1e-6 * best.abs() + 1e-30)

    def __call__(self, ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the regrets [n] of the experts [n, K] on these rows [n], from 0 to 1. None: on all rows."""
        if rows is None:
            return ((self.best - self.scores.gather(1, ids).mean(1)) / self.spread).clamp(0, 1)
        flat = rows[:, None] * self.scores.shape[1] + ids
        mean = self.scores.reshape(-1).index_select(0, flat.reshape(-1)).view(ids.shape).mean(1)
        return ((self.best[rows] - mean) / self.spread[rows]).clamp(0, 1)

    def of_experts(self, rows: Tensor) -> Tensor:
        """Return the regret of every single expert, [n, E]. The regret of K experts is the mean of theirs."""
        return (self.best[rows, None] - self.scores.index_select(0, rows)) / self.spread[rows, None]


def _salts(experts: int, device: torch.device) -> Tensor:
    """Return a random number int64 for each expert. Two sets of experts are equal if their sums are equal."""
    return torch.from_numpy(np.random.default_rng(7).integers(-(1 << 62), 1 << 62, experts)).to(device)


def _single_ids(ids: Tensor, choice: Tensor, regret: Regret, rows: MicrobatchRows, groups: int) -> dict[str, Tensor]:
    """Measure the single ids of some rows, as recorded and with three faults planted."""
    fine, top_k, experts = rows.fine, ids.shape[1], regret.scores.shape[1]
    mine, own = ids[fine], choice[fine]
    new, slot = rows.drawn[0, fine, None] % experts, rows.drawn[1, fine, None] % top_k
    one, stuck = (
        mine.scatter(1, slot, torch.where((mine == id).any(1, keepdim=True), mine.gather(1, slot), id))
        for id in (new, new[:1].expand_as(new))
    )
    alone = regret.of_experts(fine)
    chosen = alone.gather(1, own)
    found: dict[str, list[Tensor]] = {name: [] for name in _VARIED}
    for at in (mine, one, ids[rows.other[fine]], stuck):
        each, equal = alone.gather(1, at), at[:, :, None] == own[:, None, :]
        right, taken = equal.any(2), equal.any(1)
        wrong = top_k - right.sum(1)
        found["wrong"].append(wrong)
        found["depth"].append(each.mean(1).clamp(min=0) * (wrong > 0) * top_k / wrong.clamp(min=1))
        lowest = each.masked_fill(right, -torch.inf).argmax(1, keepdim=True)
        missed = chosen.masked_fill(taken, torch.inf).argmin(1, keepdim=True)
        found["come"].append(at.gather(1, lowest)[:, 0])
        found["gone"].append(own.gather(1, missed)[:, 0])
        found["inside"].append(_same_groups(at, own, groups, experts))
    return {name: torch.stack(values) for name, values in found.items()}


def _same_groups(ids: Tensor, choice: Tensor, groups: int, experts: int) -> Tensor:
    """Return bool [n], whether all recorded ids [n, K] belong to groups of experts that the choice [n, K] has too."""
    if groups == 1:
        return torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    size = experts // groups
    both = (ids.new_zeros(len(ids), groups).scatter_(1, one // size, 1) for one in (ids, choice))
    recorded, chosen = both
    return (recorded <= chosen).all(1)


@dataclass(frozen=True, slots=True, eq=False)
class RowsSeen:
    """Joins what all microbatches and layers of a pass show.

    Attributes:
        seen: LayerSeen by microbatch, by layer.
        watched: The rows.
        layers: [L], global layer numbers.
    """

    seen: Seq[Seq[LayerSeen]]
    watched: Watched
    layers: Seq[int]

    @property
    def top_k(self) -> int:
        """Return the number of experts of a row."""
        return self.seen[0][0].ids.shape[1]

    @property
    def experts(self) -> int:
        """Return the number of experts of a layer."""
        return self.seen[0][0].used.shape[1]

    def table(self, name: str) -> Tensor:
        """Return an attribute of LayerSeen with the layers as first axis, and the rows of all microbatches end to
        end."""
        axis = 1 if name in _VARIED else 0
        by_layer = ([getattr(one, name) for one in parts] for parts in zip(*self.seen, strict=True))
        return torch.stack([torch.cat(parts, axis) for parts in by_layer])

    def on_device(self, values: np.ndarray) -> Tensor:
        """Return host values on the device of the pass."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.seen[0][0].own.device)

    def clusters(self, values: np.ndarray) -> Tensor:
        """Number the rows from 0 by value: equal values get the same number."""
        return self.on_device(np.unique(values, return_inverse=True)[1])
