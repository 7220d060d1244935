"""Tests single ids of the recorded rows: the claims "single ids", "some rows" and "labels" of the alignment test.

They look at some rows of the pass, `Watched.fine`. An id is wrong if the router would not choose it, and deeply wrong
if its own regret is large. A near tie makes ids wrong, but not deeply.

Legend: F rows, L layers, E experts, K top-k, U clusters of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.replay.claims import Bets, by_cluster, log_e
from moe_rl.replay.regret import RowsSeen

_DEEP, _NEAR = 0.5, 0.1  # regret of a deeply wrong id, and of an id beyond a near tie
_APART, _RANDOM = 0.5, 0.75
_MOST_WRONG = 3
_LEAST_HITS = 5


@dataclass(frozen=True, slots=True, eq=False)
class FineRows:
    """Holds the rows whose ids are tested.

    Attributes:
        wrong, depth, come, gone: [4, L, F], as in `LayerSeen`, with the variants as first axis. Rows whose groups of
            experts differ count as right.
        lag, token, cluster: int64 [F]; rows with the same token, or in the same cluster, have the same number.
        load: float64 [L, E], number of these rows for which the router chooses each expert.
        fresh: No row was routed by older weights.
    """

    wrong: Tensor
    depth: Tensor
    come: Tensor
    gone: Tensor
    lag: Tensor
    token: Tensor
    cluster: Tensor
    load: Tensor
    fresh: bool

    @classmethod
    def of(cls, seen: RowsSeen) -> FineRows:
        """Take these rows of a pass."""
        rows, at = seen.watched.rows, seen.watched.fine
        names = ("wrong", "depth", "come", "gone", "inside")
        wrong, depth, come, gone, inside = (seen.table(name).transpose(0, 1) for name in names)
        lag, token = rows.lag[at], rows.token[at]
        # Older weights may be wrong in the same way wherever a token is.
        cluster = np.where(lag > 0, token.astype(np.uint64), rows.context[at])
        load = torch.stack([torch.bincount(one.flatten(), minlength=seen.experts) for one in seen.table("choice")])
        return cls(
            wrong * inside,
            depth,
            come,
            gone,
            seen.on_device(lag),
            seen.clusters(token),
            seen.clusters(cluster),
            load.double(),
            not (rows.lag > 0).any(),
        )

    def even(self, hit: Tensor, wrong: Tensor, come: Tensor, gone: Tensor) -> Tensor:
        """Drop the hits bool [L, F] of tokens that have twice their share of a layer's hits, and of experts that have
        twice their share of the hits with one wrong id: these alone may have drifted."""
        kept, one = hit, hit & (wrong == 1)
        rows = hit.shape[1]
        frequency = self.token.bincount().double().expand(len(hit), -1)
        for key, whole, of in (
            (self.token.expand(hit.shape), frequency, hit),
            (come, rows - self.load, one),
            (gone, self.load, one),
        ):
            count = torch.zeros_like(whole).scatter_add_(1, key, of.double())
            mean = count.sum(1, keepdim=True) / whole.sum(1, keepdim=True).clamp(min=1)
            many = (count >= _LEAST_HITS) & (count >= 2 * mean * whole)
            kept = kept & ~(many.gather(1, key) & of)
        return kept


def single_ids(seen: RowsSeen, rows: FineRows) -> Bets:
    """Make the tests of the claim "single ids": are one, two or three ids of each row deeply wrong, in a layer or in
    all? Noise of equal size for all experts of a row does this to less than half of the rows."""
    if seen.top_k < 2:
        return Bets.none("single ids")
    layers = seen.layers
    record, texts, planted = [], list[str](), list[Tensor]()
    for wrong in range(1, min(seen.top_k - 1, _MOST_WRONG) + 1):

        def value(variant: int, wrong: int = wrong) -> Tensor:
            count, depth, come, gone = (one[variant] for one in (rows.wrong, rows.depth, rows.come, rows.gone))
            return 1 - 2 * rows.even((count == wrong) & (depth > _DEEP), count, come, gone).double()

        x = value(0)
        record += [log_e(by_cluster(x.T, rows.cluster)), log_e(by_cluster(x.mean(0), rows.cluster))[None]]
        what = f"{wrong} of {seen.top_k} recorded experts are wrong in every row"
        texts += [*(f"layer {layer}: {what}" for layer in layers), f"all layers: {what}"]
        if wrong == 1:
            planted = [log_e(by_cluster(value(one).T, rows.cluster)) for one in (1, 3)]
    used = seen.table("used").sum(1) >= 0.99 * len(seen.watched.rows.row)
    apart = seen.table("apart").mean(1, keepdim=True) >= _APART

    def always(variant: int) -> Tensor:
        """Return log e-values [L], without statistics: inf if one expert is in every row, though the router would
        clearly leave it out of three quarters of them."""
        one, come = (rows.wrong[variant] == 1).double(), rows.come[variant]
        hits = torch.zeros_like(rows.load).scatter_add_(1, come, one)
        depth = torch.zeros_like(rows.load).scatter_add_(1, come, one * rows.depth[variant])
        seldom = (rows.load <= 0.25 * one.shape[1]) & (depth >= _RANDOM * hits) & (hits >= 32) & apart & rows.fresh
        # The planted expert is in every row.
        return torch.where((seldom & (used if variant == 0 else True)).any(1), math.inf, -math.inf).double()

    record.append(always(0))
    texts += [f"layer {layer} has an expert in every row" for layer in layers]
    planted[1] = torch.maximum(planted[1], always(3))
    return Bets("single ids", torch.cat(record), torch.cat(planted), texts.__getitem__, len(texts))


def some_rows(seen: RowsSeen, rows: FineRows) -> Bets:
    """Make the tests of the claim "some rows": in rows that are sound in most other layers, are deep errors of a layer
    more frequent than errors just beyond a near tie? Noise has no second hump. The planted fault exchanges 10% of the
    rows for other rows."""
    layers = len(seen.layers)
    if layers < 2:
        return Bets.none("some rows")
    deep = (rows.wrong[0] > 0) & (rows.depth[0] > _DEEP)
    sound = (deep.sum(0, keepdim=True) - deep.long()) <= 0.25 * (layers - 1)
    mixed = torch.rand(deep.shape[1], generator=torch.Generator().manual_seed(1)).to(deep.device) < 0.1
    record, planted = [], []
    for lag in torch.unique(rows.lag).tolist():
        here = rows.lag == lag

        def value(replaced: Tensor, here: Tensor = here) -> Tensor:
            wrong, depth, come, gone = (
                torch.where(replaced, one[2], one[0]) for one in (rows.wrong, rows.depth, rows.come, rows.gone)
            )
            hit, near = (wrong > 0) & (depth > _DEEP), (wrong > 0) & (depth > _NEAR) & (depth <= _DEEP)
            quiet = (~((wrong > 0) & (depth > _NEAR)) & here).sum(1) >= (0.5 if seen.top_k >= 4 else 0.7) * here.sum()
            hit = rows.even(hit & sound & here, wrong, come, gone) & quiet[:, None]
            near = near & sound & here & quiet[:, None]
            return log_e(by_cluster((near.double() - hit.double()).T, rows.cluster, (hit | near).T))

        record.append(value(torch.zeros_like(mixed)))
        planted.append(value(mixed))
    return Bets(
        "some rows",
        torch.cat(record),
        torch.cat(planted),
        lambda at: f"layer {seen.layers[at % layers]} has some rows that match nothing",
        len(record) * layers,
    )


def labels(seen: RowsSeen, rows: FineRows) -> Bets:
    """Make the tests of the claim "labels": are two experts of a layer exchanged? Only the pair that most single errors
    exchange is tested. Both directions must be wrong in most rows, so that the drift of one expert does not count. The
    planted fault exchanges the busiest and the median expert."""
    experts, device = seen.experts, rows.load.device
    ids, choice = seen.table("ids"), seen.table("choice")
    record, planted, pairs = [], [], []
    for layer in range(len(seen.layers)):
        recorded, chosen = (
            torch.zeros(one.shape[1], experts, dtype=torch.bool, device=device).scatter_(1, one[layer], True)
            for one in (ids, choice)
        )
        gone, come = chosen & ~recorded, recorded & ~chosen
        single = gone.sum(1) == 1
        pair = gone[single].int().argmax(1) * experts + come[single].int().argmax(1)
        moved = torch.bincount(pair, minlength=experts * experts).view(experts, experts)
        i, j = divmod(int(torch.minimum(moved, moved.T).argmax()), experts)

        def value(i: int, j: int, sign: float, recorded: Tensor = recorded, chosen: Tensor = chosen) -> Tensor:
            """Return the log e-value of the rows where the router has i and not j."""
            if i == j:
                return torch.zeros((), dtype=torch.float64, device=device)
            here = chosen[:, i] & ~chosen[:, j]
            bad, good = here & recorded[:, j] & ~recorded[:, i], here & recorded[:, i] & ~recorded[:, j]
            return log_e(by_cluster(good.double() - bad.double(), rows.cluster, good | bad), sign)

        record.append(torch.minimum(value(i, j, -1.0), value(j, i, -1.0)))
        order = torch.argsort(-rows.load[layer])
        busy, median = int(order[0]), int(order[min(experts - 1, experts // 2)])
        planted.append(torch.minimum(value(busy, median, 1.0), value(median, busy, 1.0)))
        pairs.append((i, j))
    return Bets(
        "labels",
        torch.stack(record),
        torch.stack(planted),
        lambda at: f"layer {seen.layers[at]}: experts {pairs[at][0]} and {pairs[at][1]} are exchanged",
        len(record) * experts * experts // 2,
    )
