"""Saves a checkpoint as one of several replicas, and writes how much memory that took over what it updates."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.models.hf import read_model


def main(model: Path, dtype: Literal["bfloat16", "float32"], out: Path) -> None:
    parallel = ParallelConfig()
    world.start(parallel, seed=1, timeout_seconds=600)
    train = TrainConfig(dtype=dtype, microbatch_tokens=1024, optimizer=OptimizerConfig(lr=1e-12))
    policy = Policy(read_model(model), train, parallel, model, temperature=1.0)
    own = 0
    for optimizer in policy.optimizers:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for weight, moments in optimizer.optimizer.state.items():
            own += weight.nbytes + sum(moment.fill_(0.5).nbytes for moment in moments.values())
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the kernel's high-water mark
    before = _status("VmRSS")
    saving = Checkpoints(out, parallel, keep=1, asynchronous=True)
    saving.save(1, policy, {})
    saving.finish()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps((_status("VmHWM") - before) / own))
    world.stop()


def _status(key: str) -> int:
    """Return a size of this process in bytes, as the kernel tells it."""
    (kibibytes,) = re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kibibytes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
