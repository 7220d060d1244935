"""Tests single ids of the recorded rows: the claims "single ids", "some rows" and "labels" of the alignment test.

They look at the fine rows of the pass. An id is wrong if the router would not choose it, and deeply wrong
if its own regret is large. A near tie makes ids wrong, but not deeply.

Legend: F rows, L layers, E experts, K top-k, U clusters of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import ReplayError
from moe_rl.replay.claims import Bets, by_cluster, log_e
from moe_rl.replay.regret import FineRows, RowsSeen, same_groups

_DEEP, _NEAR = 0.5, 0.1  # regret of a deeply wrong id, and of an id beyond a near tie
_APART, _RANDOM = 0.5, 0.75
_MOST_WRONG = 3
_LEAST_HITS = 5
# Share of a layer's rows that the fault "some rows" changes. It is told in 10%: other rows show less than the planted.
_SHARE = 0.08


@dataclass(frozen=True, slots=True, eq=False)
class Wrong:
    """Holds the wrong ids of the fine rows.

    Attributes:
        count: int64 [L, F], number of ids that the router would not choose.
        depth: [L, F], their mean regret.
        come, gone: int64 [L, F], where `count` is 1: the wrong id, and the expert that is missing. Elsewhere 0.
        inside: bool [L, F], the row's ids belong to groups of experts that the router would choose.
    """

    count: Tensor
    depth: Tensor
    come: Tensor
    gone: Tensor
    inside: Tensor

    @classmethod
    def of(cls, ids: Tensor, fine: FineRows, chosen: Tensor, groups: int) -> Wrong:
        """Compare ids [L, F, K] with the routers' choice. chosen: bool [L, F, E], the choice."""
        wrong = ~chosen.gather(2, ids)
        count = wrong.sum(2)
        come = (ids * wrong).sum(2)
        gone = fine.choice.sum(2) - ids.sum(2) + come
        return cls(
            count,
            fine.regret.mean(ids).clamp(min=0) * (count > 0) * ids.shape[2] / count.clamp(min=1),
            torch.where(count == 1, come, 0),
            torch.where(count == 1, gone, 0),
            same_groups(ids, fine.choice, groups, chosen.shape[2]).expand(count.shape),
        )

    def where(self, replaced: Tensor, other: Wrong) -> Wrong:
        """Replace rows [F]."""
        names = ("count", "depth", "come", "gone", "inside")
        return Wrong(**{name: torch.where(replaced, getattr(other, name), getattr(self, name)) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class IdRows:
    """Holds the rows whose ids are tested.

    Attributes:
        record: Of the record.
        one, other, same: With a fault planted into every row: one id replaced; the record of another row; the same
            expert, of median load.
        recorded, chosen: bool [L, F, E], the record and the routers' choice.
        lag, token, cluster: int64 [F]; rows with the same token, or in the same cluster, have the same number.
        used, load: [L, E], number of these rows for which each expert is recorded, and chosen by the router.
        fresh: No row was routed by older weights.
    """

    record: Wrong
    one: Wrong
    other: Wrong
    same: Wrong
    recorded: Tensor
    chosen: Tensor
    lag: Tensor
    token: Tensor
    cluster: Tensor
    used: Tensor
    load: Tensor
    fresh: bool

    @classmethod
    def of(cls, seen: RowsSeen) -> IdRows:
        """Take these rows of a pass, and plant the faults. Raises ReplayError if a row names an expert twice."""
        rows, at, fine = seen.watched.rows, seen.watched.fine, seen.fine
        lag, token = rows.lag[at], rows.token[at]
        # Older weights may be wrong in the same way wherever a token is.
        cluster = np.where(lag > 0, token.astype(np.uint64), rows.context[at])
        ids, rng = fine.ids, np.random.default_rng(1)
        shape = fine.regret.scores.shape
        recorded, chosen = (torch.zeros_like(fine.regret.scores, dtype=torch.bool) for _ in range(2))
        used, load = (torch.zeros(shape[0], shape[2], device=ids.device) for _ in range(2))
        for of, mask, count in ((ids, recorded, used), (fine.choice, chosen, load)):
            mask.scatter_(2, of, True)
            count.scatter_add_(1, of.flatten(1), count.new_ones(()).expand(len(of), of[0].numel()))
        if int(recorded.sum()) != ids.numel():
            layer, row = torch.nonzero(recorded.sum(2) < seen.top_k)[0].tolist()
            raise ReplayError(
                "a record names an expert twice",
                where={"layer": seen.layers[layer], "token": int(rows.position[at[row]])},
                got=ids[layer, row].tolist(),
                expected=f"{seen.top_k} different experts",
                do="look at what made the record: no router chooses an expert twice",
                fault="expert twice",
            )
        new, slot = (
            seen.on_device(rng.integers(0, below, (len(at), 1))).expand(len(ids), -1, -1)
            for below in (seen.experts, seen.top_k)
        )
        median = torch.argsort(load)[:, seen.experts // 2, None, None]

        def wrong(ids: Tensor) -> Wrong:
            return Wrong.of(ids, fine, chosen, seen.groups)

        one, same = (
            ids.scatter(2, slot, torch.where(recorded.gather(2, id), ids.gather(2, slot), id))
            for id in (new, median.expand_as(new))
        )
        return cls(
            wrong(ids),
            wrong(one),
            wrong(ids[:, fine.other]),
            wrong(same),
            recorded,
            chosen,
            seen.on_device(lag),
            seen.clusters(token),
            seen.clusters(cluster),
            used,
            load,
            not (rows.lag > 0).any(),
        )

    def even(self, hit: Tensor, wrong: Wrong) -> Tensor:
        """Drop the hits bool [L, F] of tokens that have twice their share of a layer's hits, and of experts that have
        twice their share of the hits with one wrong id: these alone may have drifted."""
        kept, one = hit, hit & (wrong.count == 1)
        rows = hit.shape[1]
        frequency = self.token.bincount().float().expand(len(hit), -1)
        for key, whole, of in (
            (self.token.expand(hit.shape), frequency, hit),
            (wrong.come, rows - self.load, one),
            (wrong.gone, self.load, one),
        ):
            count = torch.zeros_like(whole).scatter_add_(1, key, of.float())
            mean = count.sum(1, keepdim=True) / whole.sum(1, keepdim=True).clamp(min=1)
            many = (count >= _LEAST_HITS) & (count >= 2 * mean * whole)
            kept = kept & ~(many.gather(1, key) & of)
        return kept


def single_ids(seen: RowsSeen, rows: IdRows) -> Bets:
    """Make the tests of the claim "single ids": are one, two or three ids of each row deeply wrong, in a layer or in
    all? Noise of equal size for all experts of a row does this to less than half of the rows."""
    if seen.top_k < 2:
        return Bets.none("single ids")
    layers = seen.layers
    record, texts, planted = [], list[str](), list[Tensor]()
    for count in range(1, min(seen.top_k - 1, _MOST_WRONG) + 1):

        def value(of: Wrong, count: int = count) -> Tensor:
            return 1 - 2 * rows.even((of.count == count) & of.inside & (of.depth > _DEEP), of).float()

        x = value(rows.record)
        record += [log_e(by_cluster(x.T, rows.cluster)), log_e(by_cluster(x.mean(0), rows.cluster))[None]]
        what = f"{count} of {seen.top_k} recorded experts are wrong in every row"
        texts += [*(f"layer {layer}: {what}" for layer in layers), f"all layers: {what}"]
        if count == 1:
            planted = [log_e(by_cluster(value(of).T, rows.cluster)) for of in (rows.one, rows.same)]
    used = rows.used >= 0.99 * rows.recorded.shape[1]
    apart = seen.fine.apart.mean(1, keepdim=True) >= _APART

    def always(of: Wrong, used: Tensor | bool) -> Tensor:
        """Return log e-values [L], without statistics: inf if one expert is in every row, though the router would
        clearly leave it out of half of them."""
        one = ((of.count == 1) & of.inside).float()
        hits = torch.zeros_like(rows.load).scatter_add_(1, of.come, one)
        depth = torch.zeros_like(rows.load).scatter_add_(1, of.come, one * of.depth)
        seldom = (rows.load <= 0.5 * one.shape[1]) & (depth >= _RANDOM * hits) & (hits >= 32) & apart & rows.fresh
        return torch.where((seldom & used).any(1), math.inf, -math.inf).double()

    record.append(always(rows.record, used))
    texts += [f"layer {layer} has an expert in every row" for layer in layers]
    planted[1] = torch.maximum(planted[1], always(rows.same, True))  # the planted expert is in every row
    return Bets("single ids", torch.cat(record), torch.cat(planted), texts.__getitem__, len(texts))


def some_rows(seen: RowsSeen, rows: IdRows) -> Bets:
    """Make the tests of the claim "some rows": in rows that are sound in most other layers, are deep errors of a layer
    more frequent than errors just beyond a near tie? Noise has no second hump. The planted fault exchanges 8% of the
    rows for other rows."""
    layers = len(seen.layers)
    if layers < 2:
        return Bets.none("some rows")
    of = rows.record
    # A row of other groups is no error of single ids, but it is not sound either.
    deep = (of.count > 0) & (of.depth > _DEEP)
    sound = (deep.sum(0, keepdim=True) - deep.long()) <= 0.25 * (layers - 1)
    mixed = torch.rand(deep.shape[1], generator=torch.Generator().manual_seed(1)).to(deep.device) < _SHARE
    record, planted = [], []
    for lag in torch.unique(rows.lag).tolist():
        here = rows.lag == lag

        def value(of: Wrong, here: Tensor = here) -> Tensor:
            wrong = (of.count > 0) & (of.depth > _NEAR)
            error = wrong & of.inside
            hit, near = error & (of.depth > _DEEP), error & (of.depth <= _DEEP)
            quiet = (~wrong & here).sum(1) >= (0.5 if seen.top_k >= 4 else 0.7) * here.sum()
            hit = rows.even(hit & sound & here, of) & quiet[:, None]
            near = near & sound & here & quiet[:, None]
            return log_e(by_cluster((near.float() - hit.float()).T, rows.cluster, (hit | near).T))

        record.append(value(of))
        planted.append(value(of.where(mixed, rows.other)))
    return Bets(
        "some rows",
        torch.cat(record),
        torch.cat(planted),
        lambda at: f"layer {seen.layers[at % layers]} has some rows that match nothing",
        len(record) * layers,
    )


def labels(seen: RowsSeen, rows: IdRows) -> Bets:
    """Make the tests of the claim "labels": are two experts of a layer exchanged? Only the pair that most single errors
    exchange is tested. Both directions must be wrong in most rows, so that the drift of one expert does not count. The
    planted fault exchanges the busiest and the median expert."""
    experts, of, layers = seen.experts, rows.record, len(seen.layers)
    # The number of rows in which the first expert of a pair is missing, and the second is there.
    pair = of.gone * experts + of.come
    moved = torch.zeros(layers, experts * experts, dtype=torch.int64, device=pair.device)
    moved = moved.scatter_add_(1, pair, (of.count == 1).long()).view(layers, experts, experts)
    most = torch.minimum(moved, moved.transpose(1, 2)).flatten(1).argmax(1)
    one, two = most // experts, most % experts

    def rows_with(mask: Tensor, expert: Tensor) -> Tensor:  # bool [L, F, E], [L] -> [L, F]
        return mask.gather(2, expert[:, None, None].expand(layers, mask.shape[1], 1))[:, :, 0]

    def value(i: Tensor, j: Tensor, sign: float) -> Tensor:
        """Return the log e-values [L] of the rows where the router has i and not j."""
        here = rows_with(rows.chosen, i) & ~rows_with(rows.chosen, j)
        has_i, has_j = rows_with(rows.recorded, i), rows_with(rows.recorded, j)
        bad, good = here & has_j & ~has_i, here & has_i & ~has_j
        return log_e(by_cluster((good.float() - bad.float()).T, rows.cluster, (good | bad).T), sign)

    order = torch.argsort(-rows.load)
    busy, median = order[:, 0], order[:, min(experts - 1, experts // 2)]
    pairs = torch.stack((one, two), 1).tolist()
    return Bets(
        "labels",
        torch.minimum(value(one, two, -1.0), value(two, one, -1.0)),
        torch.minimum(value(busy, median, 1.0), value(median, busy, 1.0)),
        lambda at: f"layer {seen.layers[at]}: experts {pairs[at][0]} and {pairs[at][1]} are exchanged",
        layers * experts * experts // 2,
    )
