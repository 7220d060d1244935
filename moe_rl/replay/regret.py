"""Measures, for the alignment test, how far recorded experts are from those that a router would choose.

Regret is (mean score of the router's own top-k - mean score of the recorded experts) / (the same for random experts).
It is 0 for the router's own choice and 1 for random experts. A near tie costs nothing, a wrong row about 1, one wrong
expert of K about 1 / K.

Two kinds of measurements are made, all on the device. All rows are measured in a few layers (`WholeRows`), for the
claims about whole rows: a block of microbatches at a time, since many small calls take longer than a large one. Some
thousand rows are kept as they are in every layer (`FineRows`) until the pass is judged, for the claims about layers and
single ids.

Legend: N recorded rows of a block, F fine rows, P rows paired with rows of another sequence, Q rows at special
places, L layers, W layers in which whole rows are measured, E experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from moe_rl.objectives.device import to_device
from moe_rl.replay.claims import Clusters
from moe_rl.replay.row_places import SAMPLED_ROWS, PassRows, pairs, windows

FINE_ROWS = 2048
"""Number of rows of a pass that are kept in every layer, besides the sampled ones."""

BLOCK_ROWS = 4096
"""Number of rows from which on a block of microbatches is measured."""

MANY_IDS = 16
"""A record of this many ids, in all layers, seldom fits another row clearly better than its own."""

_LAYERS = 4

SPECIAL = ("last prompt row", "first completion row", "every 16th row")


def whole_layers(layers: Seq[int], top_k: int) -> list[int]:
    """Choose the layers in which all rows are measured: four, or as many as hold MANY_IDS ids, spread evenly."""
    count = min(len(layers), max(_LAYERS, -(-MANY_IDS // top_k)))
    return [layers[index] for index in np.linspace(0, len(layers) - 1, count).round().astype(int)]


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """Holds the rows of a pass that are tested, in host memory.

    Attributes:
        rows: All recorded rows.
        pairs: For "prompts" and "completions" int64 [2, M], indices into `rows`.
        special: For each of SPECIAL, indices into `rows`.
        sample, fine, paired, placed: The rows of each kind: int64, sorted indices into `rows`. `fine` includes
            `sample`.
    """

    rows: PassRows
    pairs: dict[str, np.ndarray]
    special: dict[str, np.ndarray]
    sample: np.ndarray
    fine: np.ndarray
    paired: np.ndarray
    placed: np.ndarray

    @classmethod
    def of(cls, rows: PassRows) -> Watched:
        """Choose the rows."""
        chosen, count = pairs(rows), len(rows.before)
        follows = rows.before != np.arange(count)
        places = (rows.position == rows.prompt - 1, rows.position == rows.prompt, rows.position % 16 == 0)
        special = {name: _some(np.flatnonzero(follows & mask)) for name, mask in zip(SPECIAL, places, strict=True)}
        sample = windows(count, SAMPLED_ROWS)
        return cls(
            rows,
            chosen,
            special,
            sample,
            np.union1d(windows(count, FINE_ROWS), sample),
            np.unique(np.concatenate([indices.ravel() for indices in chosen.values()])),
            np.unique(np.concatenate([*special.values()])),
        )

    def blocks(self) -> list[range]:
        """Join consecutive microbatches until they have BLOCK_ROWS rows."""
        starts, blocks, first = self.rows.starts, [], 0
        for end in range(1, len(starts)):
            if starts[end] - starts[first] >= BLOCK_ROWS or end == len(starts) - 1:
                blocks.append(range(first, end))
                first = end
        return blocks

    def of_block(self, block: range, device: torch.device) -> BlockRows:
        """Return the rows of a block, on the device. Indices count its recorded rows."""
        start, stop = self.rows.starts[[block.start, block.stop]].tolist()
        random = np.random.default_rng(block.start).integers(0, max(stop - start, 1), stop - start)
        chosen = (rows[slice(*np.searchsorted(rows, (start, stop)))] for rows in (self.paired, self.placed))
        indices = (self.rows.before[start:stop], start + random, *chosen)
        return BlockRows(*(to_device(rows - start, device) for rows in indices))

    def of_microbatches(self, numbers: range, device: torch.device, *, fine: bool) -> dict[int, Tensor]:
        """Return the indices of the recorded rows, or of the fine ones, among the R rows of each microbatch."""
        rows, starts, indices = self.rows, self.rows.starts, {}
        for number in numbers:
            start, stop = starts[number : number + 2].tolist()
            chosen = self.fine[slice(*np.searchsorted(self.fine, (start, stop)))] if fine else slice(start, stop)
            indices[number] = to_device(rows.row[chosen], device)
        return indices


def _some(rows: np.ndarray) -> np.ndarray:
    """Choose rows evenly, fewer than eight times SAMPLED_ROWS."""
    return rows[:: max(1, len(rows) // (4 * SAMPLED_ROWS))]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Holds the rows of `Watched` in a block of microbatches, on the device.

    Attributes:
        before, other: [N], the row before in the same sequence, and a row drawn at random.
        paired, placed: [P], [Q].
    """

    before: Tensor
    other: Tensor
    paired: Tensor
    placed: Tensor


LayerRows = tuple[Tensor, Tensor, Tensor]
"""Rows of one layer: the record and the router's own choice, integers [n, K]; what the router ranks by, [n, E]."""


class Kept:
    """Keeps rows of some microbatches in some layers until all are there.

    Args:
        layers: Global layer numbers.
        rows: Indices of the rows among the R rows of each microbatch, by its number.
    """

    def __init__(self, layers: Seq[int], rows: Mapping[int, Tensor]):
        self._at = {layer: index for index, layer in enumerate(layers)}
        ends = np.cumsum([len(kept) for kept in rows.values()]).tolist()
        self._rows = {
            number: (kept, slice(end - len(kept), end)) for (number, kept), end in zip(rows.items(), ends, strict=True)
        }
        self._shape, self._left = (len(layers), ends[-1]), len(layers) * len(rows)
        self.kept: tuple[Tensor, ...] = ()

    def put(self, microbatch: int, layer: int, seen: LayerRows) -> bool:
        """Keep what these layer's rows show. Returns whether everything is there now."""
        if not self.kept:
            self.kept = tuple(tensor.new_empty(*self._shape, tensor.shape[1]) for tensor in seen)
        rows, here = self._rows[microbatch]
        for kept, tensor in zip(self.kept, seen, strict=True):
            kept[self._at[layer], here] = tensor if tensor.shape[0] == rows.shape[0] else tensor.index_select(0, rows)
        self._left -= 1
        return not self._left


@dataclass(frozen=True, slots=True, eq=False)
class WholeRows:
    """Holds what the rows of a microbatch show in W layers. A mean is over these layers.

    Attributes:
        own: [N], mean regret of the recorded experts on their own row.
        apart: [N], mean regret of the choice of another row: how far the two are apart.
        away: [N], mean regret of the recorded experts on the other row.
        stuck: int64 [N], number of layers in which the recorded experts are those of the row before.
        stuck_own, stuck_run, stuck_apart: [N], means over these layers of: `own`; the same for the first row of the run
            of equal records that the row is in; how far the two are apart, the smaller of both directions. Layers whose
            groups of experts differ count 0: a near tie between two groups replaces many experts at once.
        late: [Q], mean regret of the recorded experts on the row before.
        early: [Q], mean regret of the experts recorded for the row before.
        step: [Q], how far the row and the row before are apart.
        pair_ids, pair_choice, pair_regret: [W, P, K], [W, P, K], of [W, P] rows.
        blind: bool [W, N], a score is NaN or +inf.
    """

    own: Tensor
    apart: Tensor
    away: Tensor
    stuck: Tensor
    stuck_own: Tensor
    stuck_run: Tensor
    stuck_apart: Tensor
    late: Tensor
    early: Tensor
    step: Tensor
    pair_ids: Tensor
    pair_choice: Tensor
    pair_regret: Regret
    blind: Tensor

    @classmethod
    def of(cls, ids: Tensor, choice: Tensor, scores: Tensor, rows: BlockRows, groups: int) -> WholeRows:
        """Measure the rows.

        Args:
            ids, choice, scores: [W, N, K], [W, N, K], [W, N, E].
            groups: Number of groups of experts, among which a router chooses first.
        """
        ids, choice = ids.long(), choice.long()
        regret, here = Regret.of(choice, scores.float()), torch.arange(ids.shape[1], device=ids.device)
        other, before, placed, paired = rows.other, rows.before, rows.placed, rows.paired
        sets = _salts(scores.shape[2], ids.device).index_select(0, ids.view(-1)).view(ids.shape).sum(2)
        stuck = (sets == sets.index_select(1, before)) & (before != here)
        start = torch.where(stuck, 0, here).cummax(1)[0]  # [W, N]
        flat = (torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1] + start).view(-1)
        first = choice.view(-1, ids.shape[2]).index_select(0, flat).view(ids.shape)
        own, inside = regret(ids), stuck & same_groups(ids, choice, groups, scores.shape[2])
        run_apart = torch.minimum(regret(first), regret(choice, start))
        of_stuck = torch.stack((own, own.gather(1, start), run_apart)).mul_(inside).sum(1)
        stuck_own, stuck_run, stuck_apart = of_stuck / stuck.sum(0).clamp_(min=1)
        behind = before[placed]
        placed_behind, behind_placed = torch.cat((placed, behind)), torch.cat((behind, placed))
        late, early = regret(ids[:, placed_behind], behind_placed).mean(0).chunk(2)
        return cls(
            own=own.mean(0),
            apart=regret(choice.index_select(1, other)).mean(0),
            away=regret(ids, other).mean(0),
            stuck=stuck.sum(0),
            stuck_own=stuck_own,
            stuck_run=stuck_run,
            stuck_apart=stuck_apart,
            late=late,
            early=early,
            step=torch.minimum(*regret(choice[:, behind_placed], placed_behind).chunk(2, 1)).mean(0),
            pair_ids=ids[:, paired],
            pair_choice=choice[:, paired],
            pair_regret=regret.pick(paired),
            blind=regret.spread.isnan(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Regret:
    """Computes regrets of rows.

    Attributes:
        scores: [L, N, E], what the routers rank by.
        best, spread: [L, N], the mean score of the routers' own choice, and how much better it is than random experts.
            spread is NaN where a score is NaN or +inf.
    """

    scores: Tensor
    best: Tensor
    spread: Tensor

    @classmethod
    def of(cls, choice: Tensor, scores: Tensor) -> Regret:
        """choice: int64 [L, N, K]. scores: [L, N, E]."""
        best = _mean(scores.gather(2, choice))
        spread = best - _mean(scores)
        # Where all experts score alike, every choice has regret 0.
        usual = spread.clamp(min=0) + 1e-6 * best.abs() + 1e-30
        return cls(scores, best, torch.where(spread > -math.inf, usual, math.nan))

    def pick(self, rows: Tensor) -> Regret:
        """Take the rows [n]."""
        return Regret(*(tensor.index_select(1, rows) for tensor in (self.scores, self.best, self.spread)))

    def each(self) -> Tensor:
        """Return the regret of every single expert, [L, N, E]. That of K experts is the mean of theirs."""
        return (self.best[:, :, None] - self.scores).div_(self.spread[:, :, None])

    def __call__(self, ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the regrets [L, n] of the experts [L, n, K] on these rows, [n] or [L, n], from 0 to 1. None: on all
        rows."""
        if rows is None:
            return self.mean(ids).clamp_(0, 1)
        layers, count, experts = self.scores.shape
        flat = torch.arange(layers, device=ids.device)[:, None] * count + rows  # [L, n]
        scores, best, spread = (
            values.reshape(-1).index_select(0, of.view(-1)).view(of.shape)
            for values, of in ((self.scores, flat[:, :, None] * experts + ids), (self.best, flat), (self.spread, flat))
        )
        return (best - _mean(scores)).div_(spread).clamp_(0, 1)

    def mean(self, ids: Tensor) -> Tensor:
        """Return the regrets [..., L, N] of the experts [..., L, N, K], without limits."""
        return (self.best - _mean(self.scores.expand(*ids.shape[:-1], -1).gather(-1, ids))).div_(self.spread)


def _mean(values: Tensor) -> Tensor:
    """Return the mean over the last axis; for few values `Tensor.mean` takes a third longer."""
    return values.sum(-1) / values.shape[-1]


@cache
def _salts(experts: int, device: torch.device) -> Tensor:
    """Return a random number int64 for each expert. Two sets of experts are equal if their sums are equal."""
    return to_device(np.random.default_rng(7).integers(-(1 << 62), 1 << 62, experts), device)


def same_groups(ids: Tensor, choice: Tensor, groups: int, experts: int) -> Tensor:
    """Return bool [...], whether all recorded ids [..., K] belong to groups of experts that the choice [..., K] has
    too. A router without groups has one, so the answer has one element there."""
    if groups == 1:
        return torch.ones((), dtype=torch.bool, device=ids.device)
    size = experts // groups
    recorded, chosen = (
        tensor.new_zeros(*tensor.shape[:-1], groups).scatter_(-1, tensor // size, 1) for tensor in (ids, choice)
    )
    return (recorded <= chosen).all(-1)


@dataclass(frozen=True, slots=True, eq=False)
class FineRows:
    """Holds the rows of a pass that are kept in every layer.

    Attributes:
        ids, choice: int64 [L, F, K].
        regret: Of these rows.
        other: [F], for each another of these rows, drawn at random.
        own, apart, away: [L, F], as in `WholeRows`, by layer.
    """

    ids: Tensor
    choice: Tensor
    regret: Regret
    other: Tensor
    own: Tensor
    apart: Tensor
    away: Tensor

    @classmethod
    def of(cls, ids: Tensor, choice: Tensor, scores: Tensor) -> FineRows:
        """Measure the rows: integers [L, F, K], integers [L, F, K], [L, F, E]."""
        ids, choice, scores = ids.long(), choice.long(), scores.float()
        count = ids.shape[1]
        other = torch.from_numpy(np.random.default_rng(0).integers(0, max(count, 1), count)).to(ids.device)
        regret = Regret.of(choice, scores)
        return cls(ids, choice, regret, other, regret(ids), regret(choice[:, other]), regret(ids, other))


@dataclass(frozen=True, slots=True, eq=False)
class RowsSeen:
    """Joins what all blocks and layers of a pass show.

    Attributes:
        watched: The rows.
        layers: [L], global layer numbers.
        groups: Number of groups of experts.
        fine: The rows that are kept.
        by_block: What whole rows show.
        far: The weights may be so far from those of the oldest row that healthy records are unrelated to their rows.
    """

    watched: Watched
    layers: Seq[int]
    groups: int
    fine: FineRows
    by_block: Seq[WholeRows]
    far: bool

    @property
    def fresh(self) -> bool:
        """Return whether no row was routed by older weights."""
        return not (self.watched.rows.lag > 0).any()

    @property
    def top_k(self) -> int:
        """Return the number of experts of a row."""
        return self.fine.ids.shape[2]

    @property
    def whole_layers(self) -> int:
        """Return the number of layers in which whole rows are measured."""
        return self.by_block[0].pair_ids.shape[0]

    @property
    def experts(self) -> int:
        """Return the number of experts of a layer."""
        return self.fine.regret.scores.shape[2]

    def whole(self, name: str) -> Tensor:
        """Return an attribute of WholeRows with the rows of all blocks end to end."""
        parts = [getattr(rows, name) for rows in self.by_block]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1 if parts[0].ndim == 3 else 0)

    def pair_regret(self) -> Regret:
        """Return the regrets of the paired rows of all blocks."""
        parts = [(rows.pair_regret.scores, rows.pair_regret.best, rows.pair_regret.spread) for rows in self.by_block]
        return Regret(*(torch.cat(of, 1) for of in zip(*parts, strict=True)))

    def on_device(self, values: np.ndarray) -> Tensor:
        """Return host values on the device of the pass."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.fine.own.device)

    def clusters(self, *values: np.ndarray) -> Clusters:
        """Make clusters of rows with equal values. Several arrays get equally many, some of them empty."""
        groupings = [np.unique(array, return_inverse=True, return_counts=True)[1:] for array in values]
        sizes = np.ones((len(groupings), max(len(size) for _, size in groupings)), np.float32)
        for row, (_, size) in zip(sizes, groupings, strict=True):
            row[: len(size)] = size
        of = [number * sizes.shape[1] + cluster for number, (cluster, _) in enumerate(groupings)]
        return Clusters(self.on_device(np.concatenate(of)), self.on_device(sizes.ravel()))
