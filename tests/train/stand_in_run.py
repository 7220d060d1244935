"""Runs training on one rank through its command, with the stand-in sampler of `one_step` and a reward by chance.

python stand_in_run.py ARGUMENT ...
"""

import runpy
import sys
import zlib
from pathlib import Path

from tests.support.one_rank import alone

OVERRIDES = [
    "run.peer_timeout_seconds=100", "parallel.expert=1", "rollout.prompts_per_step=2", "rollout.group_size=2",
    "rollout.dynamic_sampling_rounds=1", "eval.prompts=2", "eval.every_steps=100", "checkpoint.every_steps=2",
    "train.updates_per_step=1", "train.dtype=float32", "train.optimizer.warmup_steps=1", "guards.collapse_steps=0",
    "guards.alignment=false", "guards.max_canary_difference=1e9", "guards.max_policy_kl=1e9",  # routes are random
    "task.rewards.exact_match.function=tests.train.stand_in_run.chance",
]  # fmt: skip


def chance(completion: str) -> float:
    """Reward half of all completions."""
    return float(zlib.crc32(completion.encode()) % 2)


def begin(runs: Path, *overrides: str):
    """Run from the beginning. Returns the finished process and the run folder."""
    config = ["--config", "configs/tiny_moe_cpu.yaml", *OVERRIDES, f"run.runs_dir={runs}", *overrides]
    process = alone("tests/train/stand_in_run.py", *config)
    folders = sorted(runs.glob("tiny-moe-*"), key=lambda path: path.stat().st_ctime)
    return process, folders[-1] if folders else None


def resume(run: Path, *arguments: str):
    """Resume a run. Returns the finished process."""
    return alone("tests/train/stand_in_run.py", "--resume", str(run), *arguments)


if __name__ == "__main__":
    from moe_rl.rollout import rollouts
    from tests.train.one_step import RandomSampler

    rollouts.start_sampler = RandomSampler
    sys.argv[0] = "train_moe_rl.py"
    runpy.run_path("tools/train_moe_rl.py", run_name="__main__")
