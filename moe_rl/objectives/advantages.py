"""Computes advantages from rewards with one of five estimators. All tokens of a completion get the same advantage.

    name            A_i                                 compared with            source
    group_std       (R_i - mean_g) / (std_g + eps)      its group                GRPO, arXiv 2402.03300, section 4.1.2
    group_mean      R_i - mean_g                        its group                Dr. GRPO, arXiv 2503.20783
    leave_one_out   R_i - mean of the others of g       its group                RLOO, arXiv 2402.14740
    batch_std       (R_i - mean_g) / (std_B + eps)      its group, scaled alike  Lite PPO, arXiv 2508.08221
    reinforce_pp    (R_i - mean_T) / (std_T + eps)      every token of the batch REINFORCE++, arXiv 2501.03262

R are the rewards, g is the group (prompt) of completion i, B are all scored completions of the batch, T all their
tokens. Every std is unbiased (n - 1). The code uses Python floats (float64) and exactly rounded sums, so the order of
the batch does not matter.

A failed verification has reward None. It enters no statistic, and its advantage is None. eps is EPSILON. Where rewards
have no spread, the advantage is exactly 0.0: rewards count as equal below the resolution that `equal` defines. For
reinforce_pp this means a batch whose tokens all have the same reward. For the other four it means a group with fewer
than two scored members or with equal rewards. A group in which every verification failed has no advantages and does
not change those of other groups.

The size of a penalty that was subtracted from the rewards (`objective.kl_in: reward`) is set by kl_coef. Where the
rewards are equal without it, the spread comes only from the penalty and is not divided: a std would make advantages of
size 1 from any penalty, however small.

Other frameworks differ in these points. verl, slime and NeMo-RL add the same 1e-6 to the std, TRL and Megatron-LM 1e-4.
They compare rewards exactly, so rounding errors in a group of equal rewards become small advantages. Megatron-LM's std
is biased, so its advantages are larger by sqrt(n / (n - 1)). In a group of one member verl and SkyRL return the raw
reward; NeMo-RL and slime return 0. verl counts a failed verification as reward 0, and TRL leaves it out. NeMo-RL
divides the leave-one-out difference by the std of the other members by default, which no estimator here does.
REINFORCE++ adds a KL at each token and sums over the following tokens. Here the whole sequence has one number
(`objective.kl_in: reward` subtracts the KL of all its tokens), which equals REINFORCE++ with discount 1 and the KL at
the last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moe_rl.errors import About, ArgumentError, ConfigError, RewardError
from moe_rl.types import LARGEST_REWARD

# Rewards are sums of parts, which reward functions often compute in float32. Equal outcomes may then differ by a few
# roundings: this is four units in the last place of float32.
RESOLUTION = 2.0**-21
# Added to a std that divides. Otherwise a spread hardly larger than rounding would become advantages of size 1.
EPSILON = 1e-6

Rewards = Sequence[float | None]
"""One reward a completion; None for a failed verification."""


def equal(reward: float, other: float) -> bool:
    """Return whether two rewards differ at most by rounding: by RESOLUTION times the larger size, or times 1 if both
    are smaller. Parts of size 1 may cancel to any smaller sum, but their rounding does not cancel."""
    return abs(reward - other) <= RESOLUTION * max(1.0, abs(reward), abs(other))


def has_spread(rewards: Rewards) -> bool:
    """Return whether two scored rewards differ, see `equal`. A group without such a difference teaches nothing.

    Raises:
        RewardError: a reward is not finite or is too large.
    """
    return _differ(_scored(_floats(rewards, [{"completion": index} for index in range(len(rewards))])))


def _differ(scored: list[float]) -> bool:
    return len(scored) > 1 and not equal(min(scored), max(scored))


def group_std(
    rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int], before: Rewards
) -> list[float | None]:
    """Return (R - mean) / (std + EPSILON) of the group, with the unbiased std: GRPO's definition, as in verl, TRL and
    slime."""
    return _within_groups(rewards, group_ids, before, scale=_divisor)


def group_mean(
    rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int], before: Rewards
) -> list[float | None]:
    """Return R - mean of the group. The missing std keeps very hard or very easy prompts from weighing more than
    others.
    """
    return _within_groups(rewards, group_ids, before, scale=lambda *_: 1.0)


def leave_one_out(
    rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int], before: Rewards
) -> list[float | None]:
    """Return R - mean of the other members, which equals n / (n - 1) (R - mean). No reward is part of its own
    baseline.
    """
    return _within_groups(rewards, group_ids, before, scale=lambda scored, _: (len(scored) - 1) / len(scored))


def batch_std(
    rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int], before: Rewards
) -> list[float | None]:
    """Return (R - mean of the group) / (std of all rewards of the batch + EPSILON): unbiased, not centred by group.

    TRL calls it scale_rewards="batch". All groups share one scale, so nearly equal rewards in a group are not
    magnified.
    """
    divisor = _divisor(_scored(rewards), _scored(before))
    return _within_groups(rewards, group_ids, before, scale=lambda *_: divisor)


def reinforce_pp(
    rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int], before: Rewards
) -> list[float | None]:
    """Return (R - mean) / (std + EPSILON) over all completion tokens of the batch (unbiased). A completion of n tokens
    counts n times.

    group_ids is not used. A completion without tokens does not count. verl raises an error for a batch of one token.
    """
    weighed = [(r, n) for r, n in zip(rewards, lengths, strict=True) if r is not None and n > 0]
    if not has_spread([r for r, _ in weighed]):
        return [None if r is None else 0.0 for r in rewards]
    tokens = sum(n for _, n in weighed)
    mean = math.fsum(n * r for r, n in weighed) / tokens
    divisor = math.sqrt(math.fsum(n * (r - mean) ** 2 for r, n in weighed) / (tokens - 1)) + EPSILON
    if not _differ([float(r) for r, n in zip(before, lengths, strict=True) if r is not None and n > 0]):
        divisor = 1.0
    return [None if r is None else (r - mean) / divisor for r in rewards]


ADVANTAGES: dict[str, Callable[[Rewards, Sequence[int], Sequence[int], Rewards], list[float | None]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
    "reinforce_pp": reinforce_pp,
}


def advantages(
    name: str, rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int], before: Rewards | None = None
) -> list[float | None]:
    """Compute the advantages of one batch.

    Args:
        name: an estimator, a key of ADVANTAGES.
        rewards: one reward per completion. None marks a failed verification: its advantage is None, and no other
            advantage changes. The caller must leave such a completion out of training, because an advantage of 0 would
            still count in the denominator of the loss.
        group_ids: the prompt of each reward, as any integers in any order.
        lengths: the number of completion tokens of each completion.
        before: the rewards before a penalty was subtracted, None in the same places; by default `rewards`.

    Returns:
        One advantage per reward, in the same order.

    Raises:
        ConfigError: the name is unknown.
        RewardError: a reward is not finite, or is larger than LARGEST_REWARD.
        ValueError: the lists differ in length.
    """
    if name not in ADVANTAGES:
        raise ConfigError(
            "unknown advantage estimator",
            where={"key": "objective.advantage"},
            got=repr(name),
            expected=" or ".join(ADVANTAGES),
            do="set objective.advantage to one of these",
        )
    if not len(rewards) == len(group_ids) == len(lengths):
        raise ArgumentError(
            "every reward needs a group id and a length",
            got=f"{len(group_ids)} group ids and {len(lengths)} lengths",
            expected=len(rewards),
            do="pass one of each for every reward",
        )
    rewards = _floats(rewards, [{"completion": index, "group": group} for index, group in enumerate(group_ids)])
    return ADVANTAGES[name](rewards, group_ids, lengths, rewards if before is None else before)


def _within_groups(
    rewards: Rewards, group_ids: Sequence[int], before: Rewards, *, scale: Callable[[list[float], list[float]], float]
) -> list[float | None]:
    """Return (R - mean of its group) / scale(scored rewards of the group, those before a penalty), and 0.0 in a group
    without a spread."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    result: list[float | None] = [None if reward is None else 0.0 for reward in rewards]
    for indices in members.values():
        scored = _scored([rewards[index] for index in indices])
        if not _differ(scored):
            continue
        mean, divisor = math.fsum(scored) / len(scored), scale(scored, _scored([before[index] for index in indices]))
        for index in indices:
            if (reward := rewards[index]) is not None:
                result[index] = (reward - mean) / divisor
    return result


def _floats(rewards: Rewards, where: Sequence[About]) -> list[float | None]:
    """Return rewards as Python's floats, because numpy's smaller floats compute and compare in their own precision."""
    for reward, place in zip(rewards, where, strict=True):
        # An integer may be too large for a float, and a float16 compares infinity as equal to the limit.
        if reward is not None and not (abs(reward) <= LARGEST_REWARD and math.isfinite(reward)):
            raise RewardError(
                "a reward is not finite, or too large",
                where=place,
                got=reward,
                expected=f"at most {LARGEST_REWARD:g} in size, or None for a failed verification",
                do="correct the reward function",
            )
    return [None if reward is None else float(reward) for reward in rewards]


def _scored(rewards: Rewards) -> list[float]:
    return [float(reward) for reward in rewards if reward is not None]


def _divisor(scored: list[float], before: list[float]) -> float:
    """Return std + EPSILON of rewards; 1 where their spread comes only from a penalty."""
    return _unbiased_std(scored) + EPSILON if _differ(before) else 1.0


def _unbiased_std(scored: list[float]) -> float:
    mean = math.fsum(scored) / len(scored)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))


def overlong_penalty(tokens: int, *, limit: int, cache: int, penalty: float) -> float:
    """Return DAPO's soft penalty for a long completion (arXiv 2503.14476, equation 13): a number <= 0 to add to the
    reward.

            0                                            where tokens <= limit - cache
            (limit - cache - tokens) / cache * penalty   up to limit, where it is -penalty
            -penalty                                     beyond

    The paper uses penalty 1, limit 20480 and cache 4096. In verl and AReaL the penalty keeps growing beyond -penalty;
    in TRL it does not.

    Args:
        tokens: the length of the completion, including its stop token.
        limit: the length at which completions are truncated.
        cache: the number of tokens before `limit` over which the penalty grows, with 0 < cache < limit.
        penalty: the penalty at `limit`, in units of the reward.
    """
    over = min(max(tokens - (limit - cache), 0), cache)
    return -over / cache * penalty if over else 0.0
