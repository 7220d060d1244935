"""Broadcasts random tensors as one of several ranks, each of which has an equal share, and notes what that took."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from itertools import batched
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from weight_sync import Drain

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.training import ParallelConfig
from moe_rl.megatron import world
from moe_rl.weights.conservation import Content
from moe_rl.weights.sender import WeightSender
from moe_rl.weights.stream import Round

SHAPE, TENSORS, A_ROUND = (768, 2048), 128, 8
"""An expert's matrix of Qwen3-30B-A3B in bfloat16, 3 MiB; matrices in all, and of a round."""
REPEATS = 5


class Share:
    """Stands in for a `Policy` of one rank, which exports these tensors. What it holds is not summed up."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]):
        self._tensors, self.moves = tensors, 0

    def content(self, dtype: torch.dtype, *, updated: bool) -> Content:
        return Content({}, torch.zeros(2, 0, dtype=torch.int64))

    def export_rounds(self, dtype: torch.dtype, limit: float, *, host: bool) -> list[Round]:
        runs = batched(self._tensors, A_ROUND)
        return [Round([(name, tensor.dtype, SHAPE) for name, tensor in run], iter(run)) for run in runs]


def main(out: Path) -> None:
    world.start(ParallelConfig(), seed=1, timeout_seconds=600)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = {f"{number}.weight": torch.full(SHAPE, number, dtype=torch.bfloat16) for number in range(TENSORS)}
    size, bucket = (count * tensors["0.weight"].nbytes for count in (TENSORS, A_ROUND))
    sampler = None
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / "model.safetensors")
            sampler = Drain(Path(folder), "cpu")
    lengths = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_completion_tokens": 1}
    rollout = RolloutConfig(**lengths, dtype="bfloat16", weight_bucket_mib=bucket / 2**20)
    share = Share(list(tensors.items())[rank::ranks])
    sender = WeightSender(share, rollout, out.parent, world, way="broadcast")
    took = []
    for version in range(1, REPEATS + 2):
        dist.barrier()
        began = _now()
        sender.send(sampler, version)
        took.append([now - then for now, then in zip(_now(), began, strict=True)])
    if sampler is not None:
        clock, processor, sent = map(min, zip(*took[1:], strict=True))  # the first one connects
        out.write_text(json.dumps({"bytes": size, "clock": clock, "processor": processor, "sent": sent}))
        sampler.close()
    world.stop()


def _now() -> tuple[float, float, int]:
    """Return the seconds by the clock, those of the processor, and the bytes that this process has written so far."""
    (written,) = re.findall(r"wchar: (\d+)", Path("/proc/self/io").read_text())
    return time.perf_counter(), time.process_time(), int(written)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
