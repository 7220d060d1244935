"""What two keys of the section `objective` make wrong together: its corrections, and its KL to the initial policy."""

from __future__ import annotations

from collections.abc import Iterator

from moe_rl.config.schema import CorrectionConfig, ObjectiveConfig
from moe_rl.errors import describe

# rule -> the bounds it must have, and those it may have beside them
_BOUNDS = {
    "truncate": ({"high"}, set()),
    "mask": ({"high"}, {"low"}),
    "reject": (set(), {"low", "high"}),
    "veto": ({"low"}, set()),
}
_WEIGH = ("truncate", "mask")  # their weight is the ratio itself
_OWN_WEIGHT = ("minirl", "decoupled")
_BY_SEQUENCE = {"gspo": "gspo_token", "gmpo": "grpo"}  # what to take for weights of single tokens


def correction_problems(objective: ObjectiveConfig) -> Iterator[str]:
    """Every reason why the corrections do not fit each other, the loss or the old policy, one message each."""
    for number, correction in enumerate(objective.corrections):
        key = f"objective.corrections.{number}"
        yield from _bound_problems(key, correction)
        yield from _loss_problems(key, correction, objective)
    weighing = [number for number, c in enumerate(objective.corrections) if c.rule in _WEIGH]
    if len(weighing) > 1:
        yield describe(
            "objective.corrections: more than one of them weighs by the ratio to the sampler, which would count twice",
            got=" and ".join(f"{c.level} {c.rule}" for c in objective.corrections if c.rule in _WEIGH),
            expected="one truncate or mask",
            do="make the others reject, which is mask without the weight",
        )
    seen = [(c.level, c.rule) for c in objective.corrections if c.rule not in _WEIGH]
    for level, rule in sorted({pair for pair in seen if seen.count(pair) > 1}):
        yield describe(
            "objective.corrections: the same level and rule twice",
            got=f"{level} {rule}",
            do="keep the one with the narrower bounds",
        )


def kl_problems(objective: ObjectiveConfig) -> Iterator[str]:
    """Every reason why the KL of the loss, or of the reward, would not hold the policy, one message each."""
    estimator, unbiased = objective.kl_estimator, objective.kl_unbiased
    if objective.kl_coef == 0:
        keys = (
            ("kl_estimator", estimator, "k3"),
            ("kl_unbiased", unbiased, False),
            ("kl_in", objective.kl_in, "loss"),
        )
        for key, value, default in keys:
            if value != default:
                yield describe(
                    f"objective.{key}: without effect where objective.kl_coef is 0",
                    got=str(value).lower(),
                    do="remove it, or set objective.kl_coef",
                )
    elif objective.kl_in == "reward":
        yield from _kl_in_reward_problems(objective)
    elif estimator == "k1" and not unbiased:
        yield describe(
            "objective.kl_estimator: the gradient of k1 in a loss is 0 on average, so that nothing holds the policy",
            got="k1",
            expected="k2 or k3, or objective.kl_unbiased, whose ratio gives k1 the gradient of the KL",
        )
    elif estimator == "k2" and unbiased:
        yield describe(
            "objective.kl_unbiased: k2 times the ratio has neither the value nor the gradient of the KL",
            where="objective.kl_estimator is k2",
            got="true",
            expected="false, or k1 or k3",
        )


def _kl_in_reward_problems(objective: ObjectiveConfig) -> Iterator[str]:
    where = "objective.kl_in is reward"
    if objective.old_logprobs != "trainer":
        yield describe(
            "objective.old_logprobs: a KL in the reward is of the trainer's policy before the step's first update",
            where=where,
            got=objective.old_logprobs,
            expected="trainer",
        )
    if objective.kl_unbiased:
        yield describe(
            "objective.kl_unbiased: is about a gradient, and none flows through a reward",
            where=where,
            got="true",
            expected="false",
        )


def _bound_problems(key: str, correction: CorrectionConfig) -> Iterator[str]:
    rule = correction.rule
    needed, allowed = _BOUNDS[rule]
    given = {bound for bound in ("low", "high") if getattr(correction, bound) is not None}
    for bound in sorted(needed - given):
        yield describe(f"{key}.{bound}: {rule} needs it", got="no value")
    for bound in sorted(given - needed - allowed):
        yield describe(
            f"{key}.{bound}: {rule} does not take it",
            got=getattr(correction, bound),
            expected=f"only {' and '.join(sorted(needed))}",
        )
    if not needed and not given:
        yield describe(f"{key}: {rule} without a bound keeps everything", got="neither low nor high")
    if correction.low == correction.high == 1:
        yield describe(f"{key}: the bounds leave a single ratio", got="low 1 and high 1", expected="low < high")
    if rule == "veto" and correction.level != "token":
        yield describe(
            f"{key}.level: a veto looks at single tokens",
            got=correction.level,
            expected="token",
            do=f"take level {correction.level} with rule reject to drop a sequence by its own ratio",
        )


def _loss_problems(key: str, correction: CorrectionConfig, objective: ObjectiveConfig) -> Iterator[str]:
    name, rule = objective.name, correction.rule
    if objective.old_logprobs == "sampler":
        yield describe(
            f"{key}: the old policy is the sampler, so that every ratio it looks at is 1",
            where="objective.old_logprobs is sampler",
            got=f"{correction.level} {rule}",
            expected="objective.old_logprobs trainer, or no correction; objective.off_policy_delta works with both",
        )
        return
    if name in _OWN_WEIGHT and rule in _WEIGH:
        yield describe(
            f"{key}.rule: the loss has the ratio to the sampler in it already, and it would count twice",
            where=f"objective.name is {name}",
            got=rule,
            expected="reject or veto",
            do="take reject to drop what is out of bounds; objective.weight_cap truncates the loss's own weight",
        )
    if name in _BY_SEQUENCE and correction.level == "token" and rule != "veto":
        yield describe(
            f"{key}.level: the loss has one term per sequence, and this gives each token a weight of its own",
            where=f"objective.name is {name}",
            got=f"token {rule}",
            expected="level sequence or geometric, or a veto",
            do=f"use {_BY_SEQUENCE[name]}, or a sequence-level correction",
        )
