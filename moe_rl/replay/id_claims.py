"""Tests single ids of the recorded rows: the claims "single ids", "some rows" and "labels" of the alignment test.

They look at the fine rows of the pass. An id is wrong if the router would not choose it, and deeply wrong
if its own regret is large. A near tie makes ids wrong, but not deeply.

Legend: V versions of the record, F rows, L layers, E experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import ReplayError
from moe_rl.replay.claims import Bets, Clusters, log_e
from moe_rl.replay.regret import FineRows, RowsSeen, same_groups

_DEEP, _NEAR = 0.5, 0.1  # regret of a deeply wrong id, and of an id beyond a near tie
_APART, _RANDOM = 0.5, 0.75
_MOST_WRONG = 3
_LEAST_HITS = 5
# Share of a layer's rows that the fault "some rows" changes. It is told in 10%: other rows show less than the planted.
_SHARE = 0.08


RECORD, ONE, MIXED, SAME = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Wrong:
    """Holds the wrong ids of the fine rows, in V versions of the record.

    Attributes:
        count: int64 [V, L, F], number of ids that the router would not choose.
        depth: [V, L, F], their mean regret.
        come, gone: int64 [V, L, F], where `count` is 1: the wrong id, and the expert that is missing. Elsewhere 0.
        inside: bool [V, L, F], the row's ids belong to groups of experts that the router would choose.
    """

    count: Tensor
    depth: Tensor
    come: Tensor
    gone: Tensor
    inside: Tensor

    @classmethod
    def of(cls, ids: Tensor, fine: FineRows, chosen: Tensor, groups: int) -> Wrong:
        """Compare ids [V, L, F, K] with the routers' choice. chosen: bool [L, F, E], the choice."""
        wrong = ~chosen.expand(len(ids), -1, -1, -1).gather(3, ids)
        count = wrong.sum(3)
        come = (ids * wrong).sum(3)
        gone = fine.choice.sum(2) - ids.sum(3) + come
        return cls(
            count,
            fine.regret.mean(ids).clamp(min=0) * (count > 0) * ids.shape[3] / count.clamp(min=1),
            torch.where(count == 1, come, 0),
            torch.where(count == 1, gone, 0),
            same_groups(ids, fine.choice, groups, chosen.shape[2]).expand(count.shape),
        )

    def pick(self, versions: Seq[int]) -> Wrong:
        """Return these versions."""
        return Wrong(**{name: getattr(self, name)[versions] for name in self.__slots__})


@dataclass(frozen=True, slots=True, eq=False)
class IdRows:
    """Holds the rows whose ids are tested.

    Attributes:
        wrong: Four versions. RECORD is the record. The others have a fault planted: ONE id replaced in every row; some
            rows MIXED with others; the SAME expert, of median load, in every row.
        recorded, chosen: bool [L, F, E], the record and the routers' choice.
        lag: int64 [F].
        token, cluster: Rows with the same token, and rows that count as one.
        used, load: [L, E], number of these rows for which each expert is recorded, and chosen by the router.
    """

    wrong: Wrong
    recorded: Tensor
    chosen: Tensor
    lag: Tensor
    token: Clusters
    cluster: Clusters
    used: Tensor
    load: Tensor

    @classmethod
    def of(cls, seen: RowsSeen) -> IdRows:
        """Take these rows of a pass, and plant the faults. Raises ReplayError if a row names an expert twice."""
        rows, at, fine = seen.watched.rows, seen.watched.fine, seen.fine
        lag, token = rows.lag[at], rows.token[at]
        # Older weights may be wrong in the same way wherever a token is.
        cluster = np.where(lag > 0, token.astype(np.uint64), rows.context[at])
        ids, rng = fine.ids, np.random.default_rng(1)
        shape = fine.regret.each.shape
        recorded, chosen = torch.zeros(2, *shape, dtype=torch.bool, device=ids.device)
        used, load = torch.zeros(2, shape[0], shape[2], device=ids.device)
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
        mixed = torch.rand(len(at), generator=torch.Generator().manual_seed(1)).to(ids.device) < _SHARE
        median = torch.argsort(load)[:, seen.experts // 2, None, None]
        one, same = (
            ids.scatter(2, slot, torch.where(recorded.gather(2, id), ids.gather(2, slot), id))
            for id in (new, median.expand_as(new))
        )
        others = torch.where(mixed[:, None], ids[:, fine.other], ids)
        return cls(
            Wrong.of(torch.stack((ids, one, others, same)), fine, chosen, seen.groups),
            recorded,
            chosen,
            seen.on_device(lag),
            seen.clusters(token),
            seen.clusters(cluster),
            used,
            load,
        )

    def log_e(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the log e-values [..., L] of the values x [..., L, F]; valid: bool, of the same shape."""
        rows = None if valid is None else valid.flatten(0, -2).T
        return log_e(self.cluster.mean(x.flatten(0, -2).T, rows)).view(x.shape[:-1])

    def even(self, hit: Tensor, wrong: Wrong) -> Tensor:
        """Drop the hits bool [V, L, F] of tokens that have twice their share of a layer's hits, and of experts that
        have twice their share of the hits with one wrong id: these alone may have drifted."""
        kept, one = hit, hit & (wrong.count == 1)
        for key, whole, of in (
            (self.token.of.expand(hit.shape), self.token.size.expand(hit.shape[1], -1), hit),
            (wrong.come, hit.shape[2] - self.load, one),
            (wrong.gone, self.load, one),
        ):
            count = whole.new_zeros(len(hit), *whole.shape).scatter_add_(2, key, of.float())
            mean = count.sum(2, keepdim=True) / whole.sum(1, keepdim=True).clamp(min=1)
            many = (count >= _LEAST_HITS) & (count >= 2 * mean * whole)
            kept = kept & ~(many.gather(2, key) & of)
        return kept


def single_ids(seen: RowsSeen, rows: IdRows) -> Bets | None:
    """Make the tests of the claim "single ids": are one, two or three ids of each row deeply wrong, in a layer or in
    all? Noise of equal size for all experts of a row does this to less than half of the rows."""
    if seen.top_k < 2:
        return None
    counts = [*range(1, min(seen.top_k - 1, _MOST_WRONG) + 1)]
    of = rows.wrong.pick([RECORD] * len(counts) + [ONE, SAME])
    wanted = torch.tensor([*counts, 1, 1], device=of.count.device)[:, None, None]
    x = 1 - 2 * rows.even((of.count == wanted) & of.inside & (of.depth > _DEEP), of).float()
    each, (record, same) = rows.log_e(x), _always(seen, rows)
    together = rows.log_e(x[: len(counts)].mean(1, keepdim=True))
    texts = list[str]()
    for count in counts:
        what = f"{count} of {seen.top_k} recorded experts are wrong in every row"
        texts += [*(f"layer {layer}: {what}" for layer in seen.layers), f"all layers: {what}"]
    texts += [f"layer {layer} has an expert in every row" for layer in seen.layers]
    return Bets(
        "single ids",
        torch.cat((torch.cat((each[:-2], together), 1).flatten(), record)),
        torch.cat((each[-2], torch.maximum(each[-1], same))),
        texts.__getitem__,
        len(texts),
    )


def _always(seen: RowsSeen, rows: IdRows) -> Tensor:
    """Return log e-values [2, L], without statistics, of RECORD and SAME: inf if one expert is in every row, though the
    router would clearly leave it out of half of them."""
    of = rows.wrong.pick([RECORD, SAME])
    one = ((of.count == 1) & of.inside).float()
    hits, depth = (one.new_zeros(2, *rows.load.shape).scatter_add_(2, of.come, x) for x in (one, one * of.depth))
    seldom = (rows.load <= 0.5 * one.shape[2]) & (depth >= _RANDOM * hits) & (hits >= 32) & seen.fresh
    seldom[RECORD] &= rows.used >= 0.99 * one.shape[2]  # the planted expert is in every row
    apart = seen.fine.apart.mean(1) >= _APART
    return torch.where(seldom.any(2) & apart, math.inf, -math.inf).double()


def some_rows(seen: RowsSeen, rows: IdRows) -> Bets | None:
    """Make the tests of the claim "some rows": in rows that are sound in most other layers, are deep errors of a layer
    more frequent than errors just beyond a near tie? Noise has no second hump. The planted fault exchanges 8% of the
    rows for other rows."""
    layers = len(seen.layers)
    if layers < 2:
        return None
    of = rows.wrong.pick([RECORD, MIXED])
    wrong, deep = (of.count > 0) & (of.depth > _NEAR), (of.count > 0) & (of.depth > _DEEP)
    # A row of other groups is no error of single ids, but it is not sound either.
    sound = (deep[:1].sum(1, keepdim=True) - deep[:1].long()) <= 0.25 * (layers - 1)
    tests = []
    for lag in torch.unique(rows.lag).tolist():
        here = rows.lag == lag
        quiet = (~wrong & here).sum(2, keepdim=True) >= (0.5 if seen.top_k >= 4 else 0.7) * here.sum()
        error = wrong & of.inside & sound & here
        hit, near = rows.even(error & deep, of) & quiet, error & ~deep & quiet
        tests.append(rows.log_e(near.float() - hit.float(), hit | near))
    record, planted = torch.stack(tests, 1).flatten(1)
    return Bets(
        "some rows",
        record,
        planted,
        lambda at: f"layer {seen.layers[at % layers]} has some rows that match nothing",
        len(record),
    )


def labels(seen: RowsSeen, rows: IdRows) -> Bets:
    """Make the tests of the claim "labels": are two experts of a layer exchanged? Only the pair that most single errors
    exchange is tested. Both directions must be wrong in most rows, so that the drift of one expert does not count. The
    planted fault exchanges the busiest and the median expert."""
    experts, of, layers = seen.experts, rows.wrong.pick([RECORD]), len(seen.layers)
    # The number of rows in which the first expert of a pair is missing, and the second is there.
    pair = (of.gone * experts + of.come)[0]
    moved = torch.zeros(layers, experts * experts, dtype=torch.int64, device=pair.device)
    moved = moved.scatter_add_(1, pair, (of.count[0] == 1).long()).view(layers, experts, experts)
    most = torch.minimum(moved, moved.transpose(1, 2)).flatten(1).argmax(1)
    one, two, order = most // experts, most % experts, torch.argsort(-rows.load)
    busy, median = order[:, 0], order[:, min(experts - 1, experts // 2)]
    # [4, L, F]: rows where the router has the first expert and not the second, for each pair both ways round.
    first, second = torch.stack((one, two, busy, median)), torch.stack((two, one, median, busy))

    def rows_with(mask: Tensor, expert: Tensor) -> Tensor:  # bool [L, F, E], [4, L]
        at = expert[:, :, None, None].expand(-1, -1, mask.shape[1], -1)
        return mask.expand(4, -1, -1, -1).gather(3, at)[..., 0]

    has_first, has_second = rows_with(rows.recorded, first), rows_with(rows.recorded, second)
    known = rows_with(rows.chosen, first) & ~rows_with(rows.chosen, second) & (has_first ^ has_second)
    x = has_first.float() - has_second.float()
    x[2:] *= -1  # the planted fault
    e = rows.log_e(x * known, known)
    pairs = torch.stack((one, two), 1).tolist()
    return Bets(
        "labels",
        torch.minimum(*e[:2]),
        torch.minimum(*e[2:]),
        lambda at: f"layer {seen.layers[at]}: experts {pairs[at][0]} and {pairs[at][1]} are exchanged",
        layers * experts * experts // 2,
    )
