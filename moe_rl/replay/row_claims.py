"""Tests whether recorded rows belong to other rows: all claims of the alignment test about whole rows, except those of
replay/layer_claims.py.

Legend: N recorded rows of a pass, L layers, M pairs of rows, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from moe_rl.replay.claims import Bets, log_e, log_e_by, no_noise, rarely
from moe_rl.replay.regret import MANY_IDS, RowsSeen, same_groups

# Rows nearer than this, in regret, cannot be told apart.
_APART = 0.2
_RUN = 32
# A record is related to its rows if chance explains that with a probability below one in a hundred.
_RELATED = math.log(100.0)
# Regret x limit = that of unrelated rows: where a record counts as unrelated. With 0 it never does.
_OF_FRESH, _OF_STALE = 2.0, 4 / 3


def sequence_tests(seen: RowsSeen) -> Iterator[Bets]:
    """Make the tests of the claims "prompts" and "completions". The layers of a row count together."""
    watched = seen.watched
    kinds = {what: pair for what, pair in watched.pairs.items() if pair.shape[1]}
    if not kinds:
        return
    ids, choice = seen.whole("pair_ids"), seen.whole("pair_choice")
    regret = seen.pair_regret()
    # Each pair is tested from both sides: the record of the rows `here`, on the `other` rows.
    sides = [side for pair in kinds.values() for side in (pair, pair[::-1])]
    ends = np.cumsum([0, *(side.shape[1] for side in sides)])
    parts = [np.arange(*ends[index : index + 2]) for index in range(len(sides))]
    here, other = seen.on_device(np.searchsorted(watched.paired, np.concatenate(sides, 1)))
    turned = seen.on_device(np.concatenate([parts[index ^ 1] for index in range(len(parts))]))
    own, fit = regret(ids).mean(0)[here], regret(ids[:, here], other).mean(0)
    near = regret(choice[:, other], here).mean(0)[:, None]
    # The planted fault is the record of the other row, which fits that row as well as before. It stands for a known
    # donor and, without the gain, for an unknown donor.
    mine, on_other, clear = torch.stack((own, fit[turned]), 1), torch.stack((fit, own[turned]), 1), near >= _APART
    gain = no_noise(on_other - mine) * clear
    unit = seen.clusters(*(watched.rows.context[side[0]] for side in sides))
    x = unit.mean(torch.cat((gain, _of_unrelated(near, clear, _limit(seen))(mine), -gain), 1))
    known, unrelated, related = log_e(x.view(len(sides), -1, 6).transpose(0, 1)).split(2, 1)
    tests = torch.stack((known, torch.where(related < _RELATED, unrelated, -math.inf)), 1)  # [sides, 2, 2]

    for number, what in enumerate(kinds):
        (known, unknown), two = tests[2 * number : 2 * number + 2].unbind(1), parts[2 * number : 2 * number + 2]

        def describe(test: int, what: str = what, two: Seq[np.ndarray] = two) -> str:
            rows = seen.on_device(two[test % 2])
            regrets = f"{float(own[rows].mean()):.2f} with their own"
            if test >= 2:
                return f"{what} have rows that match nothing that was tried: regret {regrets}"
            return f"{what} have the rows of other {what}: regret {float(fit[rows].mean()):.2f}, {regrets}"

        planted = torch.cat((unknown[:, 1], torch.maximum(known, unknown)[:, 1]))
        yield Bets(what, torch.cat((known[:, 0], unknown[:, 0])), planted, describe, 4)


def no_rows(seen: RowsSeen) -> Bets:
    """Make the tests of the claim "no rows": is the record of a layer unrelated to its rows?"""
    own, away, row_apart = seen.fine.own, seen.fine.away, seen.fine.apart
    apart = row_apart.mean(1, keepdim=True)
    rows, indices = seen.watched.rows, seen.watched.fine
    # Older weights may be wrong in the same way wherever a token is, so such rows count once per token.
    unit = seen.clusters(np.where(rows.lag[indices] > 0, rows.token[indices].astype(np.uint64), rows.context[indices]))
    ratio = _of_unrelated(apart, apart >= _APART, _limit(seen))
    # planted: the experts that the routers choose for other rows
    x = unit.mean(torch.cat((no_noise(own - away), ratio(own), ratio(row_apart))).T)
    related, unrelated, planted = log_e(x).split(len(seen.layers))
    mean = own.mean(1).tolist()
    return Bets(
        "no rows",
        torch.where(related < _RELATED, unrelated, -math.inf),
        planted,
        lambda test: f"layer {seen.layers[test]} has rows that match nothing that was tried: regret {mean[test]:.2f}",
        len(seen.layers),
    )


def special_rows(seen: RowsSeen) -> Iterator[Bets]:
    """Make the tests of rows at special places: do they hold the row before? The layers of a row count together."""
    watched, rows = seen.watched, seen.watched.rows
    places = {name: indices for name, indices in watched.special.items() if len(indices)}
    if not places:
        return
    own, late, early, step = (seen.whole(name) for name in ("own", "late", "early", "step"))
    special = np.concatenate([*places.values()])
    mine, behind, here = map(seen.on_device, (special, rows.before[special], np.searchsorted(watched.placed, special)))
    unit = seen.clusters(*(rows.prefix[indices] for indices in places.values()))
    clear = (step[here] >= _APART)[:, None]
    # The planted fault is the record of the row before, which fits its own row as well as before.
    fit, other = torch.stack((own[mine], early[here]), 1), torch.stack((late[here], own[behind]), 1)
    rare = seen.whole_layers * seen.top_k >= MANY_IDS
    x = unit.mean(rarely(fit, other, clear) if rare else no_noise(other - fit) * clear)
    x = x.view(len(places), -1, 2).transpose(0, 1)
    evidence = torch.log1p(x).sum(0) if rare else log_e(x)
    for name, (record, planted) in zip(places, evidence[:, :, None], strict=True):
        text = f"sequences have the experts of the row before in their {name}"
        yield Bets(name, record, planted, lambda _, text=text: text, 1)  # type: ignore[misc]


def stuck_rows(seen: RowsSeen, name: Callable[[int], str]) -> Bets | None:
    """Make the tests of the claim "stuck rows", one for each sequence: do rows in a run of equal records fit the first
    row of the run better than their own? name: returns the name of a sequence."""
    sequences, of = np.unique(seen.watched.rows.sequence, return_inverse=True)
    count = len(sequences)
    if seen.whole_layers * seen.top_k < MANY_IDS:  # rows of so few ids are equal by chance
        return None
    own, run, apart = (seen.whole(name) for name in ("stuck_own", "stuck_run", "stuck_apart"))
    clear = (seen.whole("stuck") >= max(1, MANY_IDS / seen.top_k)) & (apart >= _APART)
    mine = rarely(own, run, clear).log1p_()
    # The planted faults are runs of rows that repeat their first row, of _RUN rows if the sequence is long enough. One
    # first row decides for all rows of its run, so each is a fault by itself.
    size, rows = np.unique(np.minimum(np.bincount(of), _RUN), return_counts=True)
    fine, (later, first) = seen.fine, _repeated(seen)
    unit, later, first = seen.clusters(first), seen.on_device(later), seen.on_device(first)
    ids, choice = fine.ids[:, first], fine.choice
    inside = same_groups(ids, choice[:, later], seen.groups, seen.experts)
    near = torch.minimum(fine.regret(choice[:, first], later), fine.regret(choice[:, later], first))
    here, there, near = ((values * inside).mean(0) for values in (fine.regret(ids, later), fine.own[:, first], near))
    row_evidence = unit.mean(rarely(here, there, near >= _APART).log1p_())
    return Bets(
        "stuck rows",
        mine.new_zeros(count).index_add_(0, seen.on_device(of), mine),
        torch.outer(row_evidence, seen.on_device(size - 1.0)).flatten(),
        lambda test: f"{name(int(sequences[test]))} repeats a row",
        count,
        weights=seen.on_device(size * rows).repeat(len(row_evidence)),
        lasting=False,
    )


def pieces(seen: RowsSeen, name: Callable[[int], str]) -> Bets:
    """Make the tests of the claim "pieces", one for each piece: are its rows from elsewhere? name: returns the name of
    a piece."""
    numbers, of = np.unique(seen.watched.rows.piece, return_inverse=True)
    count, of = len(numbers), seen.on_device(of)
    own, apart, away = (seen.whole(attribute) for attribute in ("own", "apart", "away"))
    clear = apart >= _APART
    # In the record, and planted: the experts that the routers choose for other rows.
    x = _of_unrelated(apart, clear, 0.0 if seen.far else _OF_FRESH)(torch.stack((own, apart)))
    hit = (x < -0.4) & clear
    columns = torch.stack((torch.ones_like(own), own, clear, (away - own) * clear, apart * clear, *hit), 1).double()
    size, total, rows, nearer, distance, *hits = columns.new_zeros(count, 7).index_add_(0, of, columns).unbind(1)
    # Rows with an unrelated record are at most ten times as frequent in a piece as in the rest of the pass.
    share = 10 * (hits[0].sum() - hits[0] + 1) / (rows.sum() - rows).clamp(min=1)
    lost = torch.stack(hits) * torch.log(1 / share.clamp(0.002, 1) + 1) - rows * math.log(2)
    record, planted = torch.logaddexp(log_e_by(x.T, of, count).T, lost) - math.log(
        2
    )  # a mean of e-values is an e-value
    mean = (total / size).tolist()
    return Bets(
        "pieces",
        torch.where(3 * nearer < distance, record, -math.inf),
        planted,
        lambda test: f"{name(int(numbers[test]))}: regret {mean[test]:.2f}, {float(own.mean()):.2f} in the pass",
        count,
        weights=size,
        lasting=False,
    )


def _limit(seen: RowsSeen) -> float:
    return 0.0 if seen.far else _OF_FRESH if seen.fresh else _OF_STALE


def _of_unrelated(apart: Tensor, clear: Tensor, limit: float) -> Callable[[Tensor], Tensor]:
    """Return the function from regrets to test values: 1 for the own choice, below 0 where limit x regret exceeds the
    distance `apart` of unrelated rows."""
    return lambda regret: (1 - limit * regret / apart.clamp(min=_APART)).clamp(-1, 1) * clear


def _repeated(seen: RowsSeen) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampled rows that follow another sampled row, and for each the first row of its run of neighbours.
    Both are indices into the fine rows."""
    sample, before = seen.watched.sample, seen.watched.rows.before
    starts = np.r_[True, before[sample[1:]] != sample[:-1]][: len(sample)]
    first = sample[np.maximum.accumulate(np.where(starts, np.arange(len(sample)), 0))]
    later, first = (np.searchsorted(seen.watched.fine, rows[~starts]) for rows in (sample, first))
    return later, first
