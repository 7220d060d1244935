"""Advantages: what a completion is worth beside others, by one of five estimators. Constant over its tokens.

    name            A_i                                 compared with            source
    group_std       (R_i - mean_g) / std_g              its group                GRPO, arXiv 2402.03300, section 4.1.2
    group_mean      R_i - mean_g                        its group                Dr. GRPO, arXiv 2503.20783
    leave_one_out   R_i - mean of the others of g       its group                RLOO, arXiv 2402.14740
    batch_std       (R_i - mean_g) / std_B              its group, scaled alike  Lite PPO, arXiv 2508.08221
    reinforce_pp    (R_i - mean_T) / std_T              every token of the batch REINFORCE++, arXiv 2501.03262

R rewards, g the group (prompt) of i, B all scored completions of the batch, T all their tokens. Every std is the
unbiased one (n - 1). Plain Python floats (float64) and exactly rounded sums: the order of the batch does not matter.

Nothing to compare with. A failed verification has reward None: it enters no statistic and its advantage is None. No
denominator has an epsilon. Where there is no spread the advantage is exactly 0.0: for the four that compare within
groups, in a group with fewer than two scored members or whose rewards are all equal; for reinforce_pp, in a batch whose
tokens all have the same reward. A group in which everything failed has no advantages at all, and moves none elsewhere.

Where peers differ. Most add 1e-6 (verl, slime, NeMo-RL) or 1e-4 (TRL, Megatron-LM) to the std, which turns rounding in
a group of equal rewards into advantages; Megatron-LM's std is biased: advantages larger by sqrt(n / (n - 1)). In a
group of one member verl and SkyRL give the raw reward, NeMo-RL and slime 0. verl counts a failed verification as reward
0, TRL leaves it out. NeMo-RL's default divides the leave-one-out difference by the others' std, which is none of these.
REINFORCE++ adds a KL for each token and sums what follows it; here the whole sequence carries one number
(`objective.kl_in: reward` takes the KL of all its tokens off it), as with discount 1 and a KL that comes at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moe_rl.errors import About, ConfigError, RewardError, describe
from moe_rl.types import LARGEST_REWARD

# Rewards are weighted sums of parts, so equal outcomes may differ in the last bits. A spread below this (times the
# largest |reward|, at least 1) is rounding; dividing by it would turn rounding into advantages of size 1.
ROUNDING = 1e-12

Rewards = Sequence[float | None]


def has_spread(rewards: Rewards) -> bool:
    """Whether two of the scored rewards differ by more than rounding: only then do they teach which was better.

    Raises RewardError for a reward that is not finite, or too large.
    """
    _refuse_wrong(rewards, [{"completion": index} for index in range(len(rewards))])
    return _differ(_scored(rewards))


def _differ(scored: list[float]) -> bool:
    if len(scored) < 2:
        return False
    low, high = min(scored), max(scored)
    return high - low > ROUNDING * max(1.0, abs(low), abs(high))


def group_std(rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int]) -> list[float | None]:
    """(R - mean) / std of the group, unbiased. What GRPO's authors wrote, as verl, TRL and slime compute it."""
    return _within_groups(rewards, group_ids, scale=_unbiased_std)


def group_mean(rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int]) -> list[float | None]:
    """R - mean of the group, in units of the reward: a group of hard or easy prompts weighs no more than others."""
    return _within_groups(rewards, group_ids, scale=lambda scored: 1.0)


def leave_one_out(rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int]) -> list[float | None]:
    """R - mean of the other members, which is n / (n - 1) (R - mean): no reward is in its own baseline."""
    return _within_groups(rewards, group_ids, scale=lambda scored: (len(scored) - 1) / len(scored))


def batch_std(rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int]) -> list[float | None]:
    """(R - mean of the group) / std of the rewards of the whole batch, unbiased, not centred by group: as TRL's
    scale_rewards="batch". One scale for all groups, so that nearly equal rewards are not blown up."""
    scored = _scored(rewards)
    std = _unbiased_std(scored) if _differ(scored) else 1.0  # then no group has a spread either
    return _within_groups(rewards, group_ids, scale=lambda scored: std)


def reinforce_pp(rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int]) -> list[float | None]:
    """(R - mean) / std over all completion tokens of the batch, unbiased: a completion of n tokens counts n times.

    group_ids are not looked at. A completion without a token counts nothing. verl raises for a batch of one token.
    """
    weighed = [(r, n) for r, n in zip(rewards, lengths, strict=True) if r is not None and n > 0]
    if not has_spread([r for r, _ in weighed]):
        return [None if r is None else 0.0 for r in rewards]
    tokens = sum(n for _, n in weighed)
    mean = math.fsum(n * r for r, n in weighed) / tokens
    std = math.sqrt(math.fsum(n * (r - mean) ** 2 for r, n in weighed) / (tokens - 1))
    return [None if r is None else (r - mean) / std for r in rewards]


ADVANTAGES: dict[str, Callable[[Rewards, Sequence[int], Sequence[int]], list[float | None]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
    "reinforce_pp": reinforce_pp,
}


def advantages(name: str, rewards: Rewards, group_ids: Sequence[int], lengths: Sequence[int]) -> list[float | None]:
    """The advantages of one batch by the estimator `name` of ADVANTAGES, in the order given.

    rewards: None is a verification that failed; its advantage is None, and only its. Such a completion must not be
    trained on: an advantage of 0 would still put it into the loss's denominator. group_ids: the prompt of each reward,
    any integers in any order. lengths: completion tokens.
    Raises ConfigError for an unknown name, RewardError for a reward that is not finite or larger than LARGEST_REWARD,
    ValueError for lists of different length.
    """
    if name not in ADVANTAGES:
        raise ConfigError(
            describe(
                "unknown advantage estimator",
                where={"key": "objective.advantage"},
                got=repr(name),
                expected=" or ".join(ADVANTAGES),
                do="set objective.advantage to one of these",
            )
        )
    if not len(rewards) == len(group_ids) == len(lengths):
        raise ValueError(
            describe(
                "every reward needs a group id and a length",
                got=f"{len(group_ids)} group ids and {len(lengths)} lengths",
                expected=len(rewards),
                do="pass one of each for every reward",
            )
        )
    _refuse_wrong(rewards, [{"completion": index, "group": group} for index, group in enumerate(group_ids)])
    return ADVANTAGES[name](rewards, group_ids, lengths)


def _within_groups(
    rewards: Rewards, group_ids: Sequence[int], *, scale: Callable[[list[float]], float]
) -> list[float | None]:
    """(R - mean of its group) / scale(the group's scored rewards); 0.0 in a group without a spread."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    result: list[float | None] = [None if reward is None else 0.0 for reward in rewards]
    for indices in members.values():
        scored = _scored([rewards[index] for index in indices])
        if not _differ(scored):
            continue
        mean, divisor = math.fsum(scored) / len(scored), scale(scored)
        for index in indices:
            if (reward := rewards[index]) is not None:
                result[index] = (reward - mean) / divisor
    return result


def _refuse_wrong(rewards: Rewards, where: Sequence[About]) -> None:
    for reward, place in zip(rewards, where, strict=True):
        if reward is not None and not abs(reward) <= LARGEST_REWARD:  # nor is a NaN
            raise RewardError(
                describe(
                    "a reward is not finite, or too large",
                    where=place,
                    got=reward,
                    expected=f"at most {LARGEST_REWARD:g} in size, or None for a failed verification",
                    do="mend the reward function",
                )
            )


def _scored(rewards: Rewards) -> list[float]:
    return [float(reward) for reward in rewards if reward is not None]


def _unbiased_std(scored: list[float]) -> float:
    mean = math.fsum(scored) / len(scored)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))


def overlong_penalty(tokens: int, *, limit: int, cache: int, penalty: float) -> float:
    """DAPO's soft punishment of overlong answers (arXiv 2503.14476, equation 13), to be added to the reward; <= 0.

        0                                            where tokens <= limit - cache
        (limit - cache - tokens) / cache * penalty   up to limit, where it is -penalty
        -penalty                                     beyond

    tokens: of the completion, its stop token included. limit: longest completion allowed, at which one is truncated;
    0 < cache < limit: tokens before it over which the punishment grows. The paper has penalty 1, limit 20480 and cache
    4096. verl and AReaL let it grow on beyond -penalty; TRL does not.
    """
    over = min(max(tokens - (limit - cache), 0), cache)
    return -over / cache * penalty if over else 0.0
