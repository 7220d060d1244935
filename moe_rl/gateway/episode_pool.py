"""Runs the pool of a run that plays episodes, `python -m moe_rl.gateway.episode_pool FD PARENT_PID`.

It runs `moe_rl.rollout.pool` with the gateway.
"""

from __future__ import annotations

from pathlib import Path

from moe_rl.config.schema import Config
from moe_rl.gateway.episode_gateway import EpisodeGateway, EpisodeThread
from moe_rl.models.facts import ModelFacts
from moe_rl.rollout import pool
from moe_rl.rollout.sampler import Sampler
from moe_rl.trace import TraceStore


class _Environments:
    """Makes the episode players, see pool.Environments."""

    def beside(self, config: Config, facts: ModelFacts, sampler: Sampler, run_dir: Path) -> EpisodeGateway:
        return EpisodeGateway(config, facts, sampler, run_dir, TraceStore(run_dir / "trace"))

    def alone(self, config: Config, facts: ModelFacts, sampler: Sampler, run_dir: Path) -> EpisodeThread:
        return EpisodeThread(config, facts, sampler, run_dir, TraceStore(run_dir / "trace"))


if __name__ == "__main__":
    pool.main(_Environments())
