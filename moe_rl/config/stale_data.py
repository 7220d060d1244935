"""Decides which objectives tolerate completions that older weights sampled."""

from __future__ import annotations

from collections.abc import Iterator

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.errors import Problem, describe

# The largest lag, in weight versions, that every objective tolerates. At 1 a run without corrections is what most call
# one step off-policy (arXiv 2410.18252). Its error is small as long as one step moves the policy little.
UNCORRECTED_LAG = 1
# Rules that bound the ratio of old policy to sampler from both sides, or weigh by it. A veto only looks for tokens that
# are nearly impossible.
_RULES = ("truncate", "vtrace", "mask", "reject")


def stale_problems(objective: ObjectiveConfig, lag: int) -> Iterator[Problem]:
    """Yield the problems of training on completions sampled by weights that lag the trainer's by up to `lag` versions.

    Beyond UNCORRECTED_LAG something must use the ratio to the sampler: the loss itself, its old policy, a correction,
    or a mask. Without it the gradient is that of a policy which did not sample the tokens, and its error grows with the
    lag.
    """
    looks = (
        objective.old_logprobs == "sampler"
        or objective.weighs_by_sampler
        or any(correction.rule in _RULES for correction in objective.corrections)
        or objective.off_policy_delta is not None
        or objective.second_moment_limit is not None
    )
    if lag > UNCORRECTED_LAG and not looks:
        yield describe(
            "nothing in the objective uses the ratio to the sampler, whose weights are older",
            where={"key": "objective", "given": f"completions may be {lag} weight versions old"},
            got=f"objective.name {objective.name} with objective.old_logprobs trainer and no correction",
            expected=f"a lag of at most {UNCORRECTED_LAG}, or an objective that corrects it",
            do="set objective.name to decoupled, minirl, dppo_tv or topr, or objective.old_logprobs to sampler, or add "
            "a truncate, vtrace, mask or reject to objective.corrections, or set objective.off_policy_delta or "
            "objective.second_moment_limit",
        )
