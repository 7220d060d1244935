"""What summary.json says of a run besides what was measured."""

from __future__ import annotations

from importlib.metadata import version

from moe_rl.config.schema import Config


def run_facts(config: Config, vllm_version: str) -> dict[str, object]:
    """Versions, seed and the settings that a reader of the numbers asks for first."""
    return {
        "vllm_version": vllm_version,
        "megatron_core_version": version("megatron-core"),
        "torch_version": version("torch"),
        "replay_mode": config.replay.mode,
        "objective": config.objective.name,
        "seed": config.run.seed,
        "expert_parallel": config.parallel.expert,
        "trainer_dtype": config.train.dtype,
        "sampler_dtype": config.rollout.dtype,
    }
