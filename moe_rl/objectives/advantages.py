"""Group-relative advantages: a completion is judged against the other completions of its own prompt.

Plain Python floats (float64), exactly rounded sums: the result does not depend on the order of the members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.errors import RewardError, describe

# Rewards are weighted sums of parts, so equal outcomes may differ in the last bits. A spread below this (times the
# largest |reward|, at least 1) is rounding; dividing by it would turn rounding into advantages of size 1.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one batch, and how many groups carry no signal.

    advantages: one per reward, in the order given; None exactly where the reward was None. Such a completion must not
        be trained on (an advantage of 0 would still put it into the loss's denominator).
    groups: distinct group ids. zero_variance_groups: at least two scored members, all with the same reward.
    too_small_groups: fewer than two scored members, hence nothing to compare with. failed: rewards that were None.
    """

    advantages: list[float | None]
    groups: int
    zero_variance_groups: int
    too_small_groups: int
    failed: int


def group_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[int], *, normalize_std: bool
) -> GroupAdvantages:
    """A_i = R_i - mean_g, divided by std_g when `normalize_std`; mean and std over the scored members of i's group g.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without the division, Dr. GRPO (arXiv 2503.20783). std is the
    unbiased one (n - 1), as in verl, TRL and slime, so that the same clip and learning rate mean the same thing here;
    the biased one would give advantages larger by sqrt(n / (n - 1)). There is no epsilon in the denominator: a group
    whose rewards are all equal, or that has fewer than two scored members, gets exactly 0.0 and is counted.

    rewards: None is a verification that failed; it enters no statistic and its advantage is None.
    group_ids: the prompt of each reward, any integers in any order.
    Raises RewardError for a reward that is not finite, ValueError when the two lists differ in length.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(describe("every reward needs a group id", got=f"{len(group_ids)} group ids",
                                  expected=len(rewards), do="pass one group id for each reward"))
    members: dict[int, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is not None and not math.isfinite(reward):
            raise RewardError(describe("a reward is not finite", where=f"completion {index}, group {group}", got=reward,
                                       expected="a finite number, or None for a failed verification",
                                       do="mend the reward function"))
        members.setdefault(group, []).append(index)

    advantages: list[float | None] = [None if reward is None else 0.0 for reward in rewards]
    zero_variance = too_small = 0
    for indices in members.values():
        scored = {index: float(rewards[index]) for index in indices if rewards[index] is not None}
        if len(scored) < 2:
            too_small += 1
            continue
        low, high = min(scored.values()), max(scored.values())
        if high - low <= ROUNDING * max(1.0, abs(low), abs(high)):
            zero_variance += 1
            continue
        mean = math.fsum(scored.values()) / len(scored)
        scale = 1.0
        if normalize_std:
            scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored.values()) / (len(scored) - 1))
        for index, reward in scored.items():
            advantages[index] = (reward - mean) / scale
    return GroupAdvantages(
        advantages=advantages,
        groups=len(members),
        zero_variance_groups=zero_variance,
        too_small_groups=too_small,
        failed=sum(reward is None for reward in rewards),
    )
