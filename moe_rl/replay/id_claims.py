"""Tests single ids of the recorded rows: the claims "single ids", "some rows" and "labels" of the alignment test.

They look at the fine rows of the pass. An id is wrong if the router would not choose it, and deeply wrong
if its own regret is large. A near tie makes ids wrong, but not deeply. Faults are planted into some clusters of these
rows, and their evidence is scaled up to all.

Legend: V versions of the record, F rows, L layers, E experts, K top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import ReplayError
from moe_rl.replay.claims import Bets, Clusters, log_e
from moe_rl.replay.regret import Regret, RowsSeen, same_groups

_DEEP, _NEAR = 0.5, 0.1  # regret of a deeply wrong id, and of an id beyond a near tie
_APART = 0.5
_MOST_WRONG = 3
_LEAST_HITS = 5
# Share of a layer's rows that the fault "some rows" changes. It is told in 10%: other rows show less than the planted.
_SHARE = 0.08


# Faults are planted into a part of the clusters, but not into fewer than this.
_PLANTED = 512

ONE, SAME, MIXED = range(3)


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
    def of(cls, ids: Tensor, choice: Tensor, regret: Regret, chosen: Tensor, groups: int) -> Wrong:
        """Compare ids [V, L, F, K] with the routers' choice [L, F, K]. chosen: bool [L, F, E], the same."""
        wrong = ~chosen.expand(len(ids), -1, -1, -1).gather(3, ids)
        count = wrong.sum(3)
        come = (ids * wrong).sum(3)
        gone = choice.sum(2) - ids.sum(3) + come
        return cls(
            count,
            regret.mean(ids).clamp(min=0) * (count > 0) * ids.shape[3] / count.clamp(min=1),
            torch.where(count == 1, come, 0),
            torch.where(count == 1, gone, 0),
            same_groups(ids, choice, groups, chosen.shape[2]).expand(count.shape),
        )

    def pick(self, versions: slice) -> Wrong:
        """Return these versions."""
        return Wrong(*(getattr(self, name)[versions] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class IdRows:
    """Holds rows whose ids are tested.

    Attributes:
        wrong: Their wrong ids.
        recorded, chosen: bool [L, F, E], the record and the routers' choice.
        lag: int64 [F].
        token, cluster: Rows with the same token, and rows that count as one.
        load: [L, E], number of these rows for which the router chooses each expert.
        at: int64 [F], indices into the fine rows.
        scale: Clusters of all fine rows for each cluster of these.
    """

    wrong: Wrong
    recorded: Tensor
    chosen: Tensor
    lag: Tensor
    token: Clusters
    cluster: Clusters
    load: Tensor
    at: Tensor
    scale: float

    def log_e(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the log e-values [..., L] of the values x [..., L, F]; valid: bool, of the same shape."""
        rows = None if valid is None else valid.flatten(0, -2).T
        return log_e(self.cluster.mean(x.flatten(0, -2).T, rows), self.scale).view(x.shape[:-1])

    def even(self, hit: Tensor, wrong: Wrong) -> Tensor:
        """Drop the hits bool [V, L, F] of tokens that have twice their share of a layer's hits, and of experts that
        have twice their share of the hits with one wrong id: these alone may have drifted. Hits beyond the versions of
        `wrong` have several wrong ids."""
        kept = hit.clone()
        single = hit[: len(wrong.count)] & (wrong.count == 1)
        for key, whole, of in (
            (self.token.of.expand(hit.shape), self.token.size.expand(hit.shape[1], -1), hit),
            (wrong.come, hit.shape[2] - self.load, single),
            (wrong.gone, self.load, single),
        ):
            count = whole.new_zeros(len(of), *whole.shape).scatter_add_(2, key[: len(of)], of.float())
            mean = count.sum(2, keepdim=True) / whole.sum(1, keepdim=True).clamp(min=1)
            many = (count * self.scale >= _LEAST_HITS) & (count >= 2 * mean * whole)
            kept[: len(of)] &= ~(many.gather(2, key[: len(of)]) & of)
        return kept


def id_rows(seen: RowsSeen) -> tuple[IdRows, IdRows]:
    """Return the fine rows as recorded, and some of them with faults planted: ONE id replaced in every row; the SAME
    expert in every row; some rows MIXED with others. The same expert is one that the router leaves out of at least half
    of the rows, and of these the one with the least regret. Raises ReplayError if a row names an expert twice."""
    rows, indices, fine = seen.watched.rows, seen.watched.fine, seen.fine
    lag, token = rows.lag[indices], rows.token[indices]
    # Older weights may be wrong in the same way wherever a token is.
    key = np.where(lag > 0, token.astype(np.uint64), rows.context[indices])
    _, cluster = np.unique(key, return_inverse=True)
    count, ids, rng = int(cluster.max()) + 1, fine.ids, np.random.default_rng(1)
    recorded, chosen = torch.zeros(2, *fine.regret.scores.shape, dtype=torch.bool, device=ids.device)
    recorded.scatter_(2, ids, True)
    chosen.scatter_(2, fine.choice, True)
    if int(recorded.sum()) != ids.numel():
        layer, row = torch.nonzero(recorded.sum(2) < seen.top_k)[0].tolist()
        raise ReplayError(
            "a record names an expert twice",
            where={"layer": seen.layers[layer], "token": int(rows.position[indices[row]])},
            got=ids[layer, row].tolist(),
            expected=f"{seen.top_k} different experts",
            do="look at what made the record: no router chooses an expert twice",
            fault="expert twice",
        )
    every = max(1, count // _PLANTED)
    some = np.flatnonzero(cluster % every == 0)
    here, total = seen.on_device(some), -(-count // every)

    def of(wrong: Wrong, recorded: Tensor, chosen: Tensor, choice: Tensor, part: np.ndarray, scale: float) -> IdRows:
        load = choice.new_zeros(len(choice), seen.experts, dtype=torch.float32)
        load.scatter_add_(1, choice.flatten(1), load.new_ones(()).expand(len(choice), choice[0].numel()))
        lags, rows = seen.on_device(lag[part]), seen.on_device(part)
        tokens, units = seen.clusters(token[part]), seen.clusters(key[part])
        return IdRows(wrong, recorded, chosen, lags, tokens, units, load, rows, scale)

    witness = (fine.choice, fine.regret, chosen, seen.groups)
    record = of(Wrong.of(ids[None], *witness), recorded, chosen, fine.choice, np.arange(len(indices)), 1.0)
    recorded, chosen, choice, ids = (tensor.index_select(1, here) for tensor in (recorded, chosen, fine.choice, ids))
    new, slot = (
        seen.on_device(rng.integers(0, below, (len(some), 1))).expand(len(ids), -1, -1)
        for below in (seen.experts, seen.top_k)
    )
    regret, out = fine.regret.pick(here), (~chosen).float()
    depth = (regret.each() * out).sum(1) / out.sum(1).clamp(min=1)  # [L, E]
    least = torch.where(_seldom(record), depth, math.inf).argmin(1)[:, None, None]
    single, same = (
        ids.scatter(2, slot, torch.where(recorded.gather(2, id), ids.gather(2, slot), id))
        for id in (new, least.expand_as(new))
    )
    mixed = seen.on_device(rng.random((len(some), 1)) < _SHARE)
    versions = torch.stack((single, same, torch.where(mixed, fine.ids[:, fine.other[here]], ids)))
    wrong = Wrong.of(versions, choice, regret, chosen, seen.groups)
    return record, of(wrong, recorded, chosen, choice, some, count / total)


def _seldom(rows: IdRows) -> Tensor:
    """Return bool [L, E]: experts that the router leaves out of half of the rows."""
    return rows.load <= 0.5 * rows.chosen.shape[1]


def single_ids(seen: RowsSeen, record: IdRows, planted: IdRows) -> Bets | None:
    """Make the tests of the claim "single ids": are one, two or three ids of each row deeply wrong, in a layer or in
    all? Noise of equal size for all experts of a row does this to less than half of the rows."""
    if seen.top_k < 2 or seen.far:
        return None
    counts = [*range(1, min(seen.top_k - 1, _MOST_WRONG) + 1)]
    of, wanted = record.wrong, torch.tensor(counts, device=record.lag.device)[:, None, None]
    x = 1 - 2 * record.even((of.count == wanted) & of.inside & (of.depth > _DEEP), of).float()
    evidence = record.log_e(torch.cat((x, x.mean(1, keepdim=True)), 1))  # [counts, L + 1], the last for all layers
    of = planted.wrong.pick(slice(MIXED))
    of_planted = planted.log_e(1 - 2 * planted.even((of.count == 1) & of.inside & (of.depth > _DEEP), of).float())
    used = torch.zeros_like(record.load)
    used.scatter_add_(1, seen.fine.ids.flatten(1), used.new_ones(()).expand(len(used), seen.fine.ids[0].numel()))
    texts = list[str]()
    for count in counts:
        what = f"{count} of {seen.top_k} recorded experts are wrong in every row"
        texts += [*(f"layer {layer}: {what}" for layer in seen.layers), f"all layers: {what}"]
    texts += [f"layer {layer} has an expert in every row" for layer in seen.layers]
    return Bets(
        "single ids",
        torch.cat((evidence.flatten(), _always(seen, record, 0, used >= 0.99 * x.shape[2]))),
        torch.cat((of_planted[ONE], torch.maximum(of_planted[SAME], _always(seen, planted, SAME)))),
        texts.__getitem__,
        len(texts),
    )


def _always(seen: RowsSeen, rows: IdRows, version: int, everywhere: Tensor | bool = True) -> Tensor:
    """Return log e-values [L], without statistics: inf if an expert is in every row, though the router would clearly
    leave it out of half of them. everywhere: bool [L, E], experts that are in every row; True: whichever was planted.
    """
    count, depth, come, inside = (getattr(rows.wrong, name)[version] for name in ("count", "depth", "come", "inside"))
    single = ((count == 1) & inside).float()
    hits, deep = (torch.zeros_like(rows.load).scatter_add_(1, come, x) for x in (single, single * depth))
    told = _seldom(rows) & (deep >= _DEEP * hits) & (hits * rows.scale >= 32)
    apart = seen.fine.apart.mean(1) >= _APART
    return torch.where((told & everywhere & seen.fresh).any(1) & apart, math.inf, -math.inf).double()


def some_rows(seen: RowsSeen, record: IdRows, planted: IdRows) -> Bets | None:
    """Make the tests of the claim "some rows": in rows that are sound in most other layers, are deep errors of a layer
    more frequent than errors just beyond a near tie? Noise has no second hump. The planted fault exchanges 8% of the
    rows for other rows."""
    layers = len(seen.layers)
    if layers < 2 or seen.far:
        return None
    deep = (record.wrong.count > 0) & (record.wrong.depth > _DEEP)
    # A row of other groups is no error of single ids, but it is not sound either.
    sound = (deep.sum(1, keepdim=True) - deep.long()) <= 0.25 * (layers - 1)
    lags, evidence = np.unique(seen.watched.rows.lag[seen.watched.fine]).tolist(), []
    for rows, of in ((record, record.wrong), (planted, planted.wrong.pick(slice(MIXED, MIXED + 1)))):
        wrong, deep = (of.count > 0) & (of.depth > _NEAR), (of.count > 0) & (of.depth > _DEEP)
        tests, error = [], wrong & of.inside & sound[:, :, rows.at]
        for lag in lags:
            here = rows.lag == lag
            quiet = (~wrong & here).sum(2, keepdim=True) >= (0.5 if seen.top_k >= 4 else 0.7) * here.sum()
            hit, near = rows.even(error & here & deep, of) & quiet, error & here & ~deep & quiet
            tests.append(rows.log_e(near.float() - hit.float(), hit | near)[0])
        evidence.append(torch.cat(tests))
    return Bets(
        "some rows",
        evidence[0],
        evidence[1],
        lambda test: f"layer {seen.layers[test % layers]} has some rows that match nothing",
        len(evidence[0]),
    )


def labels(seen: RowsSeen, record: IdRows, planted: IdRows) -> Bets:
    """Make the tests of the claim "labels": are two experts of a layer exchanged? Only the pair that most single errors
    exchange is tested. Both directions must be wrong in most rows, so that the drift of one expert does not count. The
    planted fault exchanges the busiest and the median expert."""
    experts, of, layers = seen.experts, record.wrong, len(seen.layers)
    # The number of rows in which the first expert of a pair is missing, and the second is there.
    pair = (of.gone * experts + of.come)[0]
    moved = torch.zeros(layers, experts * experts, dtype=torch.int64, device=pair.device)
    moved = moved.scatter_add_(1, pair, (of.count[0] == 1).long()).view(layers, experts, experts)
    most = torch.minimum(moved, moved.transpose(1, 2)).flatten(1).argmax(1)
    expert, partner, order = most // experts, most % experts, torch.argsort(-record.load)
    pairs = torch.stack((expert, partner), 1).tolist()
    evidence = []
    for rows, first, second in (
        (record, expert, partner),
        (planted, order[:, 0], order[:, min(experts - 1, experts // 2)]),
    ):
        # [2, L, F]: rows where the router has one of the two experts and not the other, both ways round.
        ids = torch.stack((first, second), 1)[:, None, :].expand(-1, len(rows.at), -1)
        has, chosen = (mask.gather(2, ids).permute(2, 0, 1) for mask in (rows.recorded, rows.chosen))
        known = chosen & ~chosen.flip(0) & (has[0] ^ has[1])
        x = has.float() - has.flip(0).float()
        evidence.append(rows.log_e((x if rows is record else -x) * known, known).amin(0))
    return Bets(
        "labels",
        evidence[0],
        evidence[1],
        lambda test: f"layer {seen.layers[test]}: experts {pairs[test][0]} and {pairs[test][1]} are exchanged",
        layers * experts * experts // 2,
    )
