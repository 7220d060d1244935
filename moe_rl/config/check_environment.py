"""Finds the problems of a config whose prompts are the rows of an environment."""

from __future__ import annotations

from collections.abc import Iterator

from moe_rl.config.schema import Config, TaskConfig
from moe_rl.config.section import Section
from moe_rl.errors import About, Problem, describe

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
