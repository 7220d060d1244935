"""Tests whether recorded rows belong to other rows: all claims of the alignment test about whole rows, except those of
replay/layer_claims.py.

Legend: N recorded rows of a pass, L layers, M pairs of rows, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from moe_rl.replay.claims import RARE, Bets, by_cluster, log_e, log_e_by, no_noise, rarely
from moe_rl.replay.regret import MANY_IDS, Regret, RowsSeen, same_groups

# Rows nearer than this, in regret, cannot be told apart.
_APART = 0.2
_RUN = 32
# A record is related to its rows if chance explains that with a probability below one in a hundred.
_RELATED = math.log(100.0)


def sequence_tests(seen: RowsSeen, *, fresh: bool) -> Iterator[Bets]:
    """Make the tests of the claims "prompts" and "completions". The layers of a row count together."""
    watched, paired = seen.watched, seen.watched.paired
    ids, choice = seen.whole("pair_ids"), seen.whole("pair_choice")
    regret = Regret.of(choice, seen.whole("pair_scores"))
    on_own_row = regret(ids).mean(0)

    for what, pair in watched.pairs.items():
        if not pair.shape[1]:
            yield Bets.none(what)
            continue
        record: list[Tensor] = []
        planted: list[Tensor] = []
        texts: list[str] = []
        sides = [seen.on_device(np.searchsorted(paired, side)) for side in pair]
        units = [seen.clusters(watched.rows.context[side]) for side in pair]
        # The regret of each side's record, and of its choice, on the other side.
        there = [regret(ids[:, a], b).mean(0) for a, b in (sides, sides[::-1])]
        near_there = [regret(choice[:, a], b).mean(0) for a, b in (sides, sides[::-1])]
        for here, other in ((0, 1), (1, 0)):
            own, theirs = on_own_row[sides[here]], on_own_row[sides[other]]
            fit, left, near, unit = there[here], there[other], near_there[other], units[here]
            told = near >= _APART
            ratio = _of_unrelated(near, told, fresh)
            # The planted fault is the record of the other row, which fits that row as well as before. It stands for a
            # known donor and, without the first value, for an unknown donor.
            for values, mine, on_other in ((record, own, fit), (planted, left, theirs)):
                gain = by_cluster(no_noise(on_other - mine) * told, unit)
                lost = _unrelated(by_cluster(ratio(mine), unit), log_e(gain, 1.0))
                values += [log_e(gain), lost]
            regrets = f"{float(own.mean()):.2f} with their own"
            texts.append(f"{what} have the rows of other {what}: regret {float(fit.mean()):.2f}, {regrets}")
            texts.append(f"{what} have rows that match nothing that was tried: regret {regrets}")
        known, unknown = torch.stack(planted[::2]), torch.stack(planted[1::2])
        plants = torch.cat([unknown, torch.maximum(known, unknown)])
        yield Bets(what, torch.stack(record), plants, texts.__getitem__, len(texts))


def no_rows(seen: RowsSeen, *, fresh: bool) -> Bets:
    """Make the tests of the claim "no rows": is the record of a layer unrelated to its rows?"""
    own, away, each = seen.fine.own, seen.fine.away, seen.fine.apart
    apart = each.mean(1, keepdim=True)
    rows, at = seen.watched.rows, seen.watched.fine
    # Older weights may be wrong in the same way wherever a token is, so such rows count once per token.
    unit = seen.clusters(np.where(rows.lag[at] > 0, rows.token[at].astype(np.uint64), rows.context[at]))
    ratio = _of_unrelated(apart, apart >= _APART, fresh)
    related = log_e(by_cluster(no_noise(away - own).T, unit), 1.0)
    mean = own.mean(1).tolist()
    return Bets(
        "no rows",
        _unrelated(by_cluster(ratio(own).T, unit), related),
        log_e(by_cluster(ratio(each).T, unit)),  # planted: the experts that the routers choose for other rows
        lambda at: f"layer {seen.layers[at]} has rows that match nothing that was tried: regret {mean[at]:.2f}",
        len(seen.layers),
    )


def special_rows(seen: RowsSeen) -> Iterator[Bets]:
    """Make the tests of rows at special places: do they hold the row before? The layers of a row count together."""
    watched, rows = seen.watched, seen.watched.rows
    own, late, early, step = (seen.whole(name) for name in ("own", "late", "early", "step"))
    for name, at in watched.special.items():
        if not len(at):
            yield Bets.none(name)
            continue
        unit, mine = seen.clusters(rows.prefix[at]), seen.on_device(at)
        behind, here = seen.on_device(rows.before[at]), seen.on_device(np.searchsorted(watched.placed, at))
        told = step[here] >= _APART
        # The planted fault is the record of the row before, which fits its own row as well as before.
        values = [(own[mine], late[here]), (early[here], own[behind])]
        if seen.whole_layers * seen.top_k >= MANY_IDS:
            record, plan = (rarely(fit, other, told, unit) for fit, other in values)
        else:
            record, plan = (log_e(by_cluster(no_noise(other - fit) * told, unit)) for fit, other in values)
        text = f"sequences have the experts of the row before in their {name}"
        yield Bets(name, record[None], plan[None], lambda _, text=text: text, 1)  # type: ignore[misc]


def stuck_rows(seen: RowsSeen, name: Callable[[int], str]) -> Bets:
    """Make the tests of the claim "stuck rows", one for each sequence: do rows in a run of equal records fit the first
    row of the run better than their own? name: returns the name of a sequence."""
    sequences, of = np.unique(seen.watched.rows.sequence, return_inverse=True)
    count = len(sequences)
    if seen.whole_layers * seen.top_k < MANY_IDS:  # rows of so few ids are equal by chance
        return Bets.none("stuck rows")
    own, run, apart = (seen.whole(name) for name in ("stuck_own", "stuck_run", "stuck_apart"))
    told = (seen.whole("stuck") >= max(1, MANY_IDS / seen.top_k)) & (apart >= _APART)

    def value(told: Tensor, own: Tensor, run: Tensor) -> Tensor:
        hit = (own > 0.1) & (run < own / 2)
        return torch.where(hit, math.log(0.5 + 0.5 / RARE), math.log(0.5)).double() * told

    size = np.bincount(of)
    mine = value(told, own, run)
    # The planted faults are runs of rows that repeat their first row, of _RUN rows if the sequence is long enough.
    fine, (later, first) = seen.fine, _repeated(seen)
    ids, choice = fine.ids[:, first], fine.choice
    inside = same_groups(ids, choice[:, later], seen.groups, seen.experts)
    near = torch.minimum(fine.regret(choice[:, first], later), fine.regret(choice[:, later], first))
    here, there, near = ((one * inside).mean(0) for one in (fine.regret(ids, later), fine.own[:, first], near))
    each = value(near >= _APART, here, there).mean()
    return Bets(
        "stuck rows",
        mine.new_zeros(count).index_add_(0, seen.on_device(of), mine),
        each * seen.on_device(np.minimum(size, _RUN) - 1.0),
        lambda at: f"{name(int(sequences[at]))} repeats a row",
        count,
        weights=seen.on_device(size),
        lasting=False,
    )


def pieces(seen: RowsSeen, name: Callable[[int], str]) -> Bets:
    """Make the tests of the claim "pieces", one for each piece: are its rows from elsewhere? name: returns the name of
    a piece."""
    numbers, of = np.unique(seen.watched.rows.piece, return_inverse=True)
    count, of = len(numbers), seen.on_device(of)
    own, apart, away = (seen.whole(one) for one in ("own", "apart", "away"))
    told = apart >= _APART
    ratio = _of_unrelated(apart, told, fresh=True)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=x.device).index_add_(0, of, x.double())

    rows, strange = total(told), total((ratio(own) < -0.4) & told)
    # Rows with an unrelated record are at most ten times as frequent in a piece as in the rest of the pass.
    share = 10 * (strange.sum() - strange + 1) / (rows.sum() - rows).clamp(min=1)

    def score(fit: Tensor) -> Tensor:
        x = ratio(fit)
        hits = total((x < -0.4) & told)
        lost = hits * torch.log(0.5 + 0.5 / share.clamp(0.002, 1)) + (rows - hits) * math.log(0.5)
        return torch.logaddexp(log_e_by(x, of, count), lost) - math.log(2)  # a mean of e-values is an e-value

    unrelated = 3 * total((away - own) * told) < total(apart * told)
    mean, size = (total(own) / total(torch.ones_like(own))).tolist(), total(torch.ones_like(own))
    return Bets(
        "pieces",
        torch.where(unrelated, score(own), -math.inf),
        score(apart),  # planted: the experts that the routers choose for other rows
        lambda at: f"{name(int(numbers[at]))}: regret {mean[at]:.2f}, {float(own.mean()):.2f} in the pass",
        count,
        weights=size,
        lasting=False,
    )


def _of_unrelated(apart: Tensor, told: Tensor, fresh: bool) -> Callable[[Tensor], Tensor]:
    """Return the function from regrets to test values: 1 for the own choice, below 0 for a regret above half of the
    distance `apart` of unrelated rows, or above three quarters of it for rows of older weights."""
    limit = 2.0 if fresh else 4 / 3
    return lambda regret: (1 - limit * regret / apart.clamp(min=_APART)).clamp(-1, 1) * told


def _unrelated(values: Tensor, related: Tensor) -> Tensor:
    """Return the log e-values [T] of records that are unrelated to their rows: -inf for those with some relation.

    Args:
        values: [U, T], test values by cluster.
        related: [T], log e-value of a relation.
    """
    return torch.where(related < _RELATED, log_e(values), -math.inf)


def _repeated(seen: RowsSeen) -> tuple[Tensor, Tensor]:
    """Return the sampled rows that follow another sampled row, and for each the first row of its run of neighbours.
    Both are indices into the fine rows."""
    sample, before = seen.watched.sample, seen.watched.rows.before
    starts = np.r_[True, before[sample[1:]] != sample[:-1]][: len(sample)]
    first = sample[np.maximum.accumulate(np.where(starts, np.arange(len(sample)), 0))]
    later, first = (np.searchsorted(seen.watched.fine, one[~starts]) for one in (sample, first))
    return seen.on_device(later), seen.on_device(first)
