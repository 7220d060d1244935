"""Computes advantages from rewards, and puts them into every rank's microbatches.

This runs after the passes without gradients and before the updates, because a KL penalty in the reward is computed with
the policy that the step began with. Every rank has all rewards, receives the KL of all sequences, and computes the
advantages of the whole batch in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.errors import MoeRLError
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import Share
from moe_rl.objectives import second_moment
from moe_rl.objectives.advantages import advantages, has_spread
from moe_rl.objectives.loss_parts import sum_by_sequence
from moe_rl.objectives.penalties import KL_ESTIMATORS
from moe_rl.types import RewardedTurn, Sequence, by_completion


def give_credit(
    objective: ObjectiveConfig, sequences: list[Sequence], group_ids: list[int], shares: list[Share]
) -> dict[str, float]:
    """Set the advantages of every microbatch in `shares`. All ranks call this together.

    With `kl_in: reward`, the reward of sequence i becomes R'_i = R_i - kl_coef * sum_t k(l_old_t, l_ref_t). The sum
    runs over its completion tokens, and k is the chosen estimator of KL(policy || reference). `shares` must then have
    old_logprobs and ref_logprobs. A sequence that was dropped because its routes are missing has no KL, and enters no
    statistic. A KL that is not finite makes every advantage NaN, so that the guards skip the step's updates.

    The segments of a completion count as one: they have one reward, their lengths and KLs add up, and all get the
    advantage of the completion. Turns with their own rewards have their own advantages: see `_to_go`.

    Args:
        sequences, group_ids: The whole batch.
        shares: This rank's part of each update.

    Returns:
        Metrics, equal on all ranks.
    """
    turns = [(number, turn) for number, sequence in enumerate(sequences) for turn in sequence.turns]
    if turns:
        rewards, groups = [turn.reward for _, turn in turns], [group_ids[number] for number, _ in turns]
        units = _Units([[number] for number, _ in turns], rewards, groups, [turn.tokens for _, turn in turns])
        metrics: dict[str, float] = {}
    else:
        units, metrics = _completions(objective, sequences, group_ids, shares)
    if turns or all(reward is None or math.isfinite(reward) for reward in units.rewards):
        values = advantages(objective.advantage, units.rewards, units.groups, units.lengths, units.before)
    else:
        values = [math.nan] * len(units.rewards)
    if turns:
        cap = next((correction.high for correction in objective.corrections if correction.rule == "vtrace"), None)
        weights = None if cap is None else _turn_weights(cap, sequences, shares)
        values = _to_go(sequences, turns, values, weights)
    credit: dict[str, list[float]] = {}
    for value, numbers in zip(values, units.owners, strict=True):
        for number in numbers:
            if value is not None:
                credit.setdefault(sequences[number].key, []).append(value)
    known = [value for value in values if value is not None]
    metrics["objective/zero_advantage_fraction"] = sum(value == 0 for value in known) / len(known)
    # A sequence without an advantage is in no share.
    for share in shares:
        share.credit.update((sequence.key, credit[sequence.key]) for sequence in share.all)
        for work in share.work:
            work.microbatch.give_advantages([credit[sequence.key] for sequence in share.all])
    limit = objective.second_moment_limit
    return metrics if limit is None else metrics | trust(limit, shares)


def trust(limit: float, shares: list[Share]) -> dict[str, float]:
    """Find the tokens of each update that `objective.second_moment_limit` keeps. Needs the advantages.

    Returns:
        Metrics, equal on all ranks.
    """
    means = []
    for share in shares:
        squares = []
        for work in share.work:
            batch = work.microbatch
            squares.append(
                second_moment.squares(work.old_logprobs, batch.rollout_logprobs, batch.advantages, batch.sequence_ids)
            )
        mine = [values[region] for values, region in squares] if world.speaks_for_its_sequences() else []
        empty = torch.empty(0, dtype=torch.float64, device=world.device())
        everyone = world.concatenate(torch.cat([empty, *mine])).cpu().numpy()
        largest = second_moment.largest_kept(everyone, limit)
        for work, (values, region) in zip(share.work, squares, strict=True):
            work.trusted = ~region | (values <= largest)
        means.append(everyone.mean() if len(everyone) else 0.0)
    return {"objective/second_moment": sum(means) / len(means)}


class _Units(NamedTuple):
    """Holds completions or turns: the numbers of the sequences that get the advantage of each, and what `advantages`
    compares."""

    owners: list[list[int]]
    rewards: Seq[float | None]
    groups: list[int]
    lengths: list[int]
    before: list[float | None] | None = None


def _to_go(
    sequences: list[Sequence],
    turns: list[tuple[int, RewardedTurn]],
    values: list[float | None],
    weights: list[float] | None,
) -> list[float | None]:
    """Return the advantage of each turn: the sum of the values of the turn and all turns that continue it. This is GRPO
    with process supervision (arXiv 2402.03300, section 4.1.3), with any estimator instead of its division by the
    group's std.

    With `weights`, the value of a later turn is multiplied by the weights of all turns from the next one to it. A
    turn's own weight is left to the loss. This is V-trace (arXiv 1802.01561, section 4) with rho and c truncated at the
    same bound, no discount, and the estimator's baseline for each remaining turn as the value of a state.

    Args:
        values: Of each turn, whose reward was compared with those of all turns of its group.
    """
    places = {(sequences[number].completion, turn.number): index for index, (number, turn) in enumerate(turns)}
    to_go = [value for value in values if value is not None]  # every turn has a reward
    for (episode, _), index in sorted(places.items(), reverse=True):  # a turn has a larger number than its parent
        if (parent := turns[index][1].parent) is not None:
            to_go[places[episode, parent]] += to_go[index] * (weights[index] if weights else 1.0)
    return [*to_go]


def _completions(
    objective: ObjectiveConfig, sequences: list[Sequence], group_ids: list[int], shares: list[Share]
) -> tuple[_Units, dict[str, float]]:
    """Return the completions, whose segments share an advantage, and metrics."""
    completions = by_completion(sequences)
    rewards: list[float | None] = [sequences[numbers[0]].reward for numbers in completions]
    lengths = [sum(len(sequences[n].token_ids) for n in numbers) for numbers in completions]
    groups = [group_ids[numbers[0]] for numbers in completions]
    metrics, before = dict[str, float](), rewards
    if objective.kl_in == "reward":
        of_sequences = _sequence_kl(objective.kl_estimator, sequences, shares)
        known = [[value for n in numbers if (value := of_sequences[n]) is not None] for numbers in completions]
        kl = [math.fsum(parts) if parts else None for parts in known]
        measured = [(value, length) for value, length in zip(kl, lengths, strict=True) if value is not None]
        nonempty = [value / length for value, length in measured if length]
        metrics["objective/kl_ref"] = math.fsum(nonempty) / max(len(nonempty), 1)
        metrics["reward/kl_penalty"] = -objective.kl_coef * math.fsum(v for v, _ in measured) / len(measured)
        before = [None if value is None else reward for reward, value in zip(rewards, kl, strict=True)]
        rewards = [
            None if value is None or reward is None else reward - objective.kl_coef * value
            for reward, value in zip(before, kl, strict=True)
        ]
        if all(reward is None or math.isfinite(reward) for reward in rewards):
            metrics |= _of_spread(rewards, groups)  # of those that are compared, instead of those that were sampled
    return _Units(completions, rewards, groups, lengths, before), metrics


def _of_spread(rewards: list[float | None], group_ids: list[int]) -> dict[str, float]:
    scored: dict[int, list[float]] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        members = scored.setdefault(group, [])
        if reward is not None:
            members.append(reward)
    same = sum(len(members) > 1 and not has_spread(members) for members in scored.values())
    return {"group/zero_variance": same, "group/zero_variance_fraction": same / len(scored)}


def _sequence_kl(estimator: str, sequences: list[Sequence], shares: list[Share]) -> list[float | None]:
    """Return the sum of the KL estimates over the tokens of each sequence, in nats.

    The first of a completion's segments has the sum over all of them, the others have 0. The value is None for a
    sequence that is in no share, and NaN for one that is not finite. Several ranks can hold a sequence, and exactly one
    of them reports its KL.

    Raises:
        MoeRLError: Two ranks report the same sequence.
    """
    where = {sequence.key: number for number, sequence in enumerate(sequences)}
    totals = []
    for share in shares if world.speaks_for_its_sequences() else ():
        for work in share.work:
            microbatch = work.microbatch
            if not microbatch.indices:
                continue
            assert work.ref_logprobs is not None  # a KL penalty needs the reference, whose pass has run by now
            tokens = KL_ESTIMATORS[estimator](work.ref_logprobs.double() - work.old_logprobs.double())
            # The tokens of a completion are contiguous, and the completions are in order.
            counts = torch.bincount(microbatch.sequence_ids, minlength=len(microbatch.indices))
            sums_here = torch.segment_reduce(tokens, "sum", lengths=counts, initial=0)
            keys = [share.all[index].key for index in microbatch.indices]
            totals += [(where[key], total) for key, total in zip(keys, sums_here.tolist(), strict=True)]
    return _from_all(totals, list(where))


def _turn_weights(cap: float, sequences: list[Sequence], shares: list[Share]) -> list[float]:
    """Return the ratio of each turn's tokens, old policy to sampler, truncated at the cap; 1 for a turn that no rank
    trains on, and NaN for one that is not finite."""
    starts, turns = dict[str, int](), 0
    for sequence in sequences:
        starts[sequence.key], turns = turns, turns + len(sequence.turns)
    totals = []
    for share in shares if world.speaks_for_its_sequences() else ():
        for work in share.work:
            batch = work.microbatch
            drift = work.old_logprobs.double() - batch.rollout_logprobs.double()
            sums = iter(sum_by_sequence(drift, batch.advantages, batch.sequence_ids).tolist())
            for sequence in (share.all[index] for index in batch.indices):
                totals += [(starts[sequence.key] + n, next(sums)) for n in range(len(sequence.turns))]
    names = [sequence.key for sequence in sequences for _ in sequence.turns]
    return [1.0 if total is None else math.exp(min(total, math.log(cap))) for total in _from_all(totals, names)]


def _from_all(reports: list[tuple[int, float]], names: list[str]) -> list[float | None]:
    """Return the number that a rank found for each of `names`: None for one that no rank found, NaN for one that is
    not finite. Raises MoeRLError if two ranks found one."""
    sums, speakers = [0.0] * len(names), [0] * len(names)
    for index, value in reports:
        sums[index], speakers[index] = value, speakers[index] + 1
    reduced = world.all_reduce([*sums, *speakers])
    totals, spoke = reduced[: len(names)], reduced[len(names) :]
    if max(spoke) > 1:
        number = spoke.index(max(spoke))
        raise MoeRLError(
            "a sequence is reported by more than one rank",
            where={"request": names[number]},
            got=f"{spoke[number]:.0f} ranks",
            expected=1,
        )
    # x - (x - x) turns an infinity into NaN: infinities of different signs would have no sum.
    return [total - (total - total) if count else None for total, count in zip(totals, spoke, strict=True)]
