"""Samples a step with a stand-in for the engine, and measures how long the step waits for its verdicts."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the verifiers import this module
    from scale_parts.target import Target

SAMPLING_SECONDS = 60.0
VERIFIER_SECONDS = 0.05


def patient(completion: str) -> float:
    """Wait as for a judge elsewhere."""
    time.sleep(VERIFIER_SECONDS)
    return 0.0


def cheap(completion: str) -> float:
    """Return at once."""
    return 0.0


def measured(target: Target) -> dict[str, float]:
    """Return seconds from the last completion of a step to its last verdict.

    All completions have half the tokens that they may have. They end one by one, at an even pace for a minute.
    """
    return {f"verdict_wait_seconds_{reward.__name__}": _waited(target, reward.__name__) for reward in (cheap, patient)}


def _waited(target: Target, reward: str) -> float:
    import numpy as np

    from moe_rl.clock import Clock
    from moe_rl.config.load import load_config
    from moe_rl.models.hf import read_model
    from moe_rl.rollout.kept import SampledStep
    from moe_rl.rollout.rollouts import Rollouts, Unjudged
    from moe_rl.tasks.prompts import load_task
    from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
    from moe_rl.tasks.verifiers import VerifierPool
    from moe_rl.types import Completion, sampled_by

    wanted = target.config.rollout
    config = load_config(
        Path(__file__).parents[2] / "configs" / "tiny_moe_cpu.yaml",
        [
            f"rollout.prompts_per_step={wanted.prompts_per_step}",
            f"rollout.group_size={wanted.group_size}",
            f"task.verifier_workers={target.config.task.verifier_workers}",
            f"task.rewards.exact_match.function=scale_parts.verdicts.{reward}",
        ],
    )
    facts = read_model(config.model.path)
    task = load_task(config, TextCodec(config.model.path, stop_tokens(config, facts), config.rollout.stop))
    length = wanted.max_completion_tokens // 2
    tokens = np.random.default_rng(0).integers(3, 20, length).tolist()

    async def sample(place, requests, *, shard, leave, ended):
        completions = []
        begin = time.monotonic()
        for at, one in enumerate(requests):
            logprobs, versions = np.zeros(length, np.float32), sampled_by(0, length)
            made = Completion(
                one.key, one.prompt_token_ids, tuple(tokens), logprobs, "length", versions, None, drawing=one.drawing
            )
            completions.append(made)
            await asyncio.sleep(max(0.0, begin + SAMPLING_SECONDS * (at + 1) / len(requests) - time.monotonic()))
            ended(at, made)
        return completions

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, VerifierPool.of(config.task) as verifiers:
        sampler = SimpleNamespace(sample=sample, places=(0,))
        rollouts = Rollouts(config, facts, task, sampler, verifiers, Path(folder), None)

        async def judged():
            unjudged = Unjudged(1, SampledStep(0, [], {}, ""))
            await rollouts._round(unjudged, 0, clock)
            await rollouts._groups(unjudged, clock)

        asyncio.run(judged())
    return clock.seconds["reward"]
