"""Defines the section `task.environment`: the episodes that a run samples instead of single completions; and the
section `gateway`: how agents reach the model through `moe-rl serve --gateway`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moe_rl.config.section import Count, Few, Location, Reward, Seconds, Section

DialogueKind = Literal["first_turns", "later_turns", "tools", "tool_calls", "reasoning"]


class GatewayConfig(Section):
    """Says how messages become tokens, and what a session of an agent may use."""

    renderer: dict[str, Any] = {"name": "default"}
    """Turns messages into tokens and completions into messages: a renderer of the package `renderers` by its name, such
    as qwen3, and its settings, such as enable_thinking. default: the model's own chat template, with the settings
    tool_parser and reasoning_parser. It renders a whole dialogue anew for each turn, so a turn continues the turn
    before only if the template writes the model's earlier output with the same tokens."""
    differs_in: tuple[DialogueKind, ...] = ()
    """Kinds of dialogue in which the renderer may write other tokens than the model's chat template. A difference in
    any other kind is refused. The history of a session of such a kind is not compared with the template."""
    max_sessions: Few = 1024
    """Largest number of sessions that are open at once. Those whose time is over make room for others."""
    session_tokens: Count = 131072
    """Largest number of tokens of a session: the tokens of its prompts that are new to it, and of its completions."""
    session_turns: Count = 256
    """Largest number of turns of a session. Each completion is a turn."""
    session_seconds: Seconds = 3600.0
    """Age in seconds from which the key of a session serves nothing."""
    max_body_mib: Few = 16
    """Largest body of a request in MiB."""


class EnvironmentConfig(Section):
    """Names the environment whose episodes a run trains on, and limits them. docs/howto/environments.md says how to
    write an environment. It gives the rewards, so task.rewards and task.pass_reward are left out."""

    run: str
    """Dotted path of the environment, an async function run(session, row). Each row of the prompt sources is the `row`
    of the episodes of one group."""
    python: Location | None = None
    """Interpreter for the episodes, Python 3.12 or newer, with its own packages, such as .environments/bin/python. It
    needs msgspec, and also moe_rl if that is installed rather than a checkout. null: the run's interpreter."""
    options: dict[str, Any] = {}
    """Settings of the environment, which it finds in `session.options`."""
    env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables that the episodes may see, such as DOCKER_HOST or an API key of a sandbox. They
    see no others but PATH, HOME, TMPDIR, TZ, LD_LIBRARY_PATH and those of the locale. Each must be set on the host of
    rank 0."""
    host: str | None = None
    """Address of rank 0's host at which the harnesses and sandboxes of an episode reach the gateway, from other hosts
    too. Each needs the session's key, and key and messages travel unencrypted: use a network of your own, or a tunnel.
    null: only processes on rank 0's host reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the gateway at `host`. 0: any free one."""
    concurrent: Few = 16
    """Number of episodes that are played at once. Each has its own process."""
    seconds: Seconds = 300.0
    """Time limit of an episode, without the import of the environment. A slower episode fails."""
    memory_limit_mib: Count = 4096
    """Address space that each process of an episode may map."""
    turns: Count = 32
    """Largest number of turns of an episode. Each completion is a turn, of at most rollout.max_completion_tokens. A
    dialogue has at most rollout.max_prompt_tokens + rollout.max_completion_tokens tokens in all."""
    tokens: Count = 32768
    """Largest number of tokens of an episode: the tokens of its prompts that are new to it, and of its completions."""
    credit: Literal["trajectory", "branch", "turn"] = "trajectory"
    """Unit that counts in the loss as a completion does. trajectory: the episode. All its sampled tokens have its
    advantage, and all its sequences must fit into train.microbatch_tokens together. If the environment returns a reward
    for each turn, the reward of the episode is their sum. branch: each sequence, with the advantage of the episode, and
    only a sequence must fit. An episode of many branches weighs more, except in losses that divide by tokens. turn:
    each turn, with its own advantage, from its reward and those of the turns that continue it; only a sequence must
    fit. The environment must return a reward for each turn."""
    pass_threshold: Reward = 1.0
    """Smallest reward with which an episode passes, for the pass rates."""
