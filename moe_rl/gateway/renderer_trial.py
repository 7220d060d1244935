"""Tries the renderer of a config before a run starts, in a process without torch.

The renderer loads its tokenizer with transformers, which imports torch if it can. That takes seconds,
too slow for a plan.

Run as a program, this file reads a config as JSON and prints what is wrong with its renderer.
"""

from __future__ import annotations

import json
import subprocess
import sys

from moe_rl.config.load import config_of
from moe_rl.config.schema import Config
from moe_rl.errors import ConfigError, Problem, describe
from moe_rl.models.hf import read_model
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens

_SECONDS = 300


def renderer_problems(config: Config) -> list[Problem]:
    """Return what is wrong with the renderer of a config, or why it could not be tried.

    config: its model and tokenizer must be readable.
    """
    command = [sys.executable, "-P", "-m", __name__]
    document = config.model_dump_json()
    try:
        done = subprocess.run(command, input=document, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [_untried(f"no answer after {_SECONDS} s")]
    if done.returncode:
        return [_untried((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])]
    problems = []
    for text, parts in json.loads(done.stdout):
        problems.append(Problem(text))
        vars(problems[-1]).update(parts)
    return problems


def _untried(got: str) -> Problem:
    return describe("the renderer could not be tried", where={"key": "gateway.renderer"}, got=got)


def _tried(config: Config) -> list[Problem]:
    from moe_rl.gateway.rendering import ChatRenderer

    facts = read_model(config.model.path)
    codec = TextCodec(config.model.path, stop_tokens(config, facts), config.rollout.stop)
    try:
        renderer = ChatRenderer(config.model.path, config.gateway.renderer, config.gateway.differs_in)
        renderer.refuse_endless(codec, facts, config.rollout)
    except ConfigError as error:
        return error.problems
    return []


if __name__ == "__main__":
    # A module that is None cannot be imported: transformers then works without torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(json.dumps([[str(problem), vars(problem)] for problem in _tried(config_of(json.load(sys.stdin), {}))]))
