"""Saves a checkpoint as one of several replicas, and writes how much memory that took over its own state."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch.distributed as dist

from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.models.hf import read_model


def main(folder: Path) -> None:
    parallel, model = ParallelConfig(), folder / "model"
    world.start(parallel, seed=1, timeout_seconds=600)
    train = TrainConfig(microbatch_tokens=1024, optimizer=OptimizerConfig(lr=1e-12))
    policy = Policy(read_model(model), train, parallel, model, temperature=1.0)
    own = 0
    for optimizer in policy.optimizers:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for weight, moments in optimizer.optimizer.state.items():
            own += weight.nbytes + sum(moment.fill_(0.5).nbytes for moment in moments.values())
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the kernel's high-water mark
    before, replicas = _status("VmRSS"), dist.get_world_size()
    saving = Checkpoints(folder / str(replicas), parallel, keep=1, asynchronous=True)
    saving.save(1, policy, {})
    saving.finish()
    (folder / f"{replicas}-{dist.get_rank()}.json").write_text(json.dumps((_status("VmHWM") - before) / own))
    world.stop()


def _status(key: str) -> int:
    """Return a size of this process in bytes, as the kernel tells it."""
    (kibibytes,) = re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kibibytes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
