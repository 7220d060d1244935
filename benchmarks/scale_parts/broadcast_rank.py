"""Broadcasts random tensors as one of several ranks, each of which has an equal share, and notes the seconds."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from itertools import batched
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from weight_sync import Drain

from moe_rl.config.training import ParallelConfig
from moe_rl.megatron import world
from moe_rl.weights.broadcast import Sender
from moe_rl.weights.stream import Round, WeightStream, broadcast
from moe_rl.weights.update import WeightUpdate

SHAPE, TENSORS, A_ROUND = (768, 2048), 128, 8
"""An expert's matrix of Qwen3-30B-A3B in bfloat16, 3 MiB; matrices in all, and of a round."""
REPEATS = 5


def main(out: Path) -> None:
    world.start(ParallelConfig(), seed=1, timeout_seconds=600)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = {f"{number}.weight": torch.full(SHAPE, number, dtype=torch.bfloat16) for number in range(TENSORS)}
    mine = list(tensors.items())[rank::ranks]
    sampler = sender = None
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / "model.safetensors")
            sampler = Drain(Path(folder), "cpu")
        sender = Sender(sampler.address, sampler.workers, A_ROUND * tensors["0.weight"].nbytes, world.device())
    seconds = []
    for version in range(1, REPEATS + 2):
        rounds = [Round([(name, t.dtype, SHAPE) for name, t in run], iter(run)) for run in batched(mine, A_ROUND)]
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        stream = WeightStream(rounds, world)
        if sampler is None:
            stream.hand_over(dist.barrier)
        else:
            part = partial(WeightUpdate, version=version, replaces=version - 1, changed=False)
            broadcast(stream, sender, sampler, part, dist.barrier)
        seconds.append((time.perf_counter() - began, time.process_time() - busy))
    if rank == 0:
        clock, processor = map(min, zip(*seconds[1:], strict=True))  # the first one connects
        size = sum(tensor.nbytes for tensor in tensors.values())
        out.write_text(json.dumps({"bytes": size, "clock": clock, "processor": processor}))
        sampler.close()
    world.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
