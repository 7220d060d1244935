"""Runs a task of an environment of the package `verifiers`, whose agents use the session's model.

A row has

    environment   config of the environment, such as {"taskset": {"id": "my-taskset"}, "agent": {"max_turns": 8}}
    task          number of the task in its taskset (default 0)
    seat          with several agents: the name of the agent whose reward counts
    sampling      fields of each request, such as max_tokens (default none)

An agent that has its own client in the config, such as a judge, keeps it. Agents run in a subprocess of the episode
unless the config names another runtime: the package's default is its provider's sandbox.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from moe_rl.errors import DataError, RewardError
from moe_rl.tasks.environments.adapters import missing
from moe_rl.tasks.environments.agent_session import AgentSession

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
except ImportError as error:
    raise missing("verifiers", error) from error

_KEY = "MOE_RL_SESSION_KEY"


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Return the weighted sum of the rewards of the task."""
    environment = vf.load_environment(_here(vf.resolve_env_config(row["environment"])))
    number = row.get("task", 0)
    task = next(itertools.islice(environment.taskset, number, None), None)
    if task is None:
        raise DataError("the taskset has no such task", where={"field": "task"}, got=number)
    os.environ[_KEY] = session.key
    context = vf.ModelContext(
        client=vf.EvalClientConfig(base_url=session.base_url, api_key_var=_KEY),
        model="policy",
        sampling=vf.SamplingConfig(**row.get("sampling", {})),
    )
    async with environment.serving():
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, context)
    if not episode.ok:
        faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        got = "; ".join(f"{fault.type}: {fault.message}" for fault in faults) or "no error"
        raise RewardError("an episode of verifiers failed", got=got)
    return _reward(episode, row.get("seat"))


def _here(config: vf.EnvConfig) -> vf.EnvConfig:
    """Return the config with a subprocess as the runtime of agents that name none."""
    local = {"runtime": vf.SubprocessConfig()}
    agents = agent_config_fields(config).items()
    changed = {name: spec.model_copy(update=local) for name, spec in agents if "runtime" not in spec.model_fields_set}
    return config.model_copy(update=changed)


def _reward(episode: vf.Episode, seat: str | None) -> float:
    traces = [trace for trace in episode.traces if seat is None or trace.agent.name == seat]
    if len(traces) != 1:
        names = ", ".join(sorted({trace.agent.name for trace in episode.traces}))
        raise DataError(
            "only the reward of one agent can count",
            where={"field": "seat"},
            got=f"{len(traces)} runs of {seat or 'any agent'}",
            expected=f"the name of one that ran once, of {names}",
        )
    return float(traces[0].reward)
