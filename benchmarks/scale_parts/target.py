"""Holds the sizes of a model's step, and the law by which a part's cost grows to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_published
from moe_rl.trace import TraceSpec

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """Describes a step of one of the configs: prompts as long as allowed, completions half as long on average."""

    config: Config
    facts: ModelFacts

    @classmethod
    def of(cls, name: str) -> Target:
        """Read configs/NAME.yaml and the published figures of its model."""
        config = load_config(ROOT / "configs" / f"{name}.yaml")
        return cls(config, read_published(ROOT / config.model.published))

    @property
    def spec(self) -> TraceSpec:
        facts = self.facts
        return TraceSpec.from_layers("scale", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)

    @property
    def sequences(self) -> int:
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @property
    def prompt_tokens(self) -> int:
        return self.config.rollout.max_prompt_tokens

    @property
    def longest(self) -> int:
        """Return the tokens of a sequence that is cut at the limit."""
        return self.prompt_tokens + self.config.rollout.max_completion_tokens

    @property
    def tokens(self) -> int:
        """Return the tokens of all sequences."""
        return self.sequences * (self.prompt_tokens + self.config.rollout.max_completion_tokens // 2)

    @property
    def rank_tokens(self) -> int:
        """Return the tokens of one data-parallel share."""
        parallel, gpus = self.config.parallel, self.config.cluster.gpus
        return self.tokens * parallel.tensor * parallel.context * parallel.pipeline // gpus


def at_full_size(costs: Mapping[float, float], full: float) -> tuple[float, float]:
    """Fit cost = a * size ** b to measured costs by size, in logarithms. Returns the cost at `full`, and b."""
    exponent, factor = np.polyfit(np.log(list(costs)), np.log(list(costs.values())), 1)
    return float(np.exp(factor) * full**exponent), float(exponent)


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the least processor seconds of this process over some runs."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)
