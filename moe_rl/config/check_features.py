"""Finds the problems of configs that use a feature which not every setting goes with: environments, adapters
(`train.lora`), and completions that older weights sampled.

Adapters may not run under settings that need trained weights, nor under those for which no test has shown that adapters
learn what they should.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.config.schema import Config, TaskConfig
from moe_rl.config.section import Section
from moe_rl.errors import About, Problem, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.models.peft import folder_problems

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


_FROZEN = "routers are frozen beside adapters"
_UNPROVEN = "not tested with adapters"


def lora_problems(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield the problems of a config that trains adapters. facts None: not known."""
    lora, train = config.train.lora, config.train
    if lora is None:
        return
    yield from lora.problems()
    refused: tuple[tuple[str, Any, Any, str], ...] = (
        ("train.router_aux_loss", train.router_aux_loss, 0, _FROZEN),
        ("train.expert_bias_rate", train.expert_bias_rate, 0, _FROZEN),
        ("train.delay_wgrad_compute", train.delay_wgrad_compute, False, "TransformerEngine's layers get no adapters"),
        ("train.megatron", train.megatron, {}, _UNPROVEN),
        ("train.megatron_optimizer", train.megatron_optimizer, {}, _UNPROVEN),
        ("placement.experts", config.placement.experts, "natural", "adapters do not move with their experts"),
        ("placement.copies", config.placement.copies, 0, "adapters are not copied with their experts"),
        ("model.from_run", config.model.from_run, None, "another run's checkpoint has no adapters of this one"),
    )
    for key, got, expected, what in refused:
        if got != expected:
            do = "change it, or set train.lora to null"
            yield describe(what, where={"key": key, "given": "train.lora is set"}, got=got, expected=expected, do=do)
    if lora.sync == "adapter" and config.rollout.weights != "exact":
        yield describe(
            "a sampler that merges adapters itself does not round the sum to another precision",
            where={"key": "rollout.weights", "given": "train.lora.sync is adapter"},
            got=config.rollout.weights,
            expected="exact",
            do="set train.lora.sync to merged",
        )
    if facts is None:
        return
    if facts.linear_bias:
        yield describe(
            "not tested with adapters: its linear layers have biases, and its experts are stacked in shared tensors",
            where={"key": "train.lora", "folder": config.model.path},
            got="a model of this family",
            expected="null",
        )
    dense = len(facts.moe_layers) < facts.layers or facts.shared_intermediate_size
    if "mlp" in lora.targets and not dense:
        yield describe(
            "the model has neither dense layers nor shared experts",
            where={"key": "train.lora.targets", "folder": config.model.path},
            got=list(lora.targets),
            expected="attention and experts only",
        )
    if lora.start is not None:
        yield from folder_problems(lora.start, facts, lora.rank, lora.alpha, lora.targets, key="train.lora.start")


# Keys of `task` that only a run with reward functions uses.
_OF_REWARDS = ("rewards", "pass_reward", "chat", "overlong", "verifier_timeout_seconds", "verifier_workers")


def environment_problems(config: Config) -> Iterator[Problem]:
    """Yield the settings that cannot be combined with task.environment; nothing without one."""
    if config.task.environment is None:
        return
    given: About = {"given": "task.environment plays the prompts"}
    for key in _OF_REWARDS:
        value, unused = getattr(config.task, key), TaskConfig.model_fields[key].default
        if value != unused:
            yield describe(
                "not used when an environment writes the messages and gives the rewards",
                where={"key": f"task.{key}", **given},
                got=_told(value),
                do=f"remove task.{key}, or task.environment",
            )
    if config.rollout.stop:
        yield describe(
            "an environment itself says what ends a turn",
            where={"key": "rollout.stop", **given},
            got=list(config.rollout.stop),
            expected="none",
            do="remove it, and send stop with the requests of the environment",
        )
    if config.task.environment.credit == "turn" and config.objective.kl_coef > 0 and config.objective.kl_in == "reward":
        yield describe(
            "a KL penalty in the reward is for a whole completion, and turns have their own rewards",
            where={"key": "objective.kl_in", "given": "task.environment.credit: turn"},
            got="reward",
            expected="loss",
        )
    if config.pipeline.kv == "recompute":
        yield describe(
            "an episode whose turns were aborted cannot continue",
            where={"key": "pipeline.kv", **given},
            got="recompute",
            expected="keep",
        )
    if config.task.environment.host in ("0.0.0.0", "::"):
        yield describe(
            "the gateway needs an address that others reach",
            where={"key": "task.environment.host"},
            got=config.task.environment.host,
            expected="an address of rank 0's host",
        )
    if config.task.environment.concurrent > config.gateway.max_sessions:
        yield describe(
            "every episode has a session",
            where={"key": "task.environment.concurrent"},
            got=config.task.environment.concurrent,
            expected=f"at most gateway.max_sessions = {config.gateway.max_sessions}",
        )


def _told(value: object) -> object:
    """Return a key's value as the user wrote it: a dict's names, a section's non-default values, or the plain value."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(value) if isinstance(value, dict) else value
