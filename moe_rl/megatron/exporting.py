"""Writes the weights of a run as Hugging Face checkpoints, in the background.

During the step, the ranks that share a tensor gather it, one weight at a time, and the first of them copies it to host
memory. The threads of `behind.py` then write the copies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.errors import ConfigError
from moe_rl.megatron import hf_files, hf_map, world
from moe_rl.megatron.behind import StepFolders
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import ModelFacts


class Exports(StepFolders):
    """Writes the weights of a run into `folder`, one at a time. All ranks call every method but `settle` together.

    The files are those that `moe-rl export` writes from the checkpoint of the same step, in the same layout.

    Attributes:
        model: Folder of the checkpoint from which config, tokenizer and untrained layers are copied.
        dtype: Precision of the exported weights.
    """

    what = "exported weights"

    def __init__(
        self,
        folder: Path,
        facts: ModelFacts,
        model: Path,
        dtype: torch.dtype,
        *,
        keep: int | None,
        resume_from: Path,
        published: Callable[[float], None] = lambda seconds: None,
    ):
        super().__init__(folder, keep=keep, published=published, resume_from=resume_from)
        self.facts, self.model, self.dtype = facts, model, dtype

    def save(self, step: int, policy: Policy) -> None:
        """Begin to write the weights after `step` steps, once the previous ones are published. Weights that already
        exist are not written again.

        Raises:
            CheckpointError: The previous weights could not be written, or these not begun. Raised on all ranks.
        """
        self.finish()
        rank, began = dist.get_rank(), time.perf_counter()
        there = rank == 0 and step in dict(checkpoints.complete(self.folder))
        if world.broadcast(there, bool):
            return
        hidden = self._begin(step)
        dense, experts = world.holds_first_replica()
        whole = hf_map.export(map(unwrap, policy.chunks), self.facts, dense=dense, experts=experts)
        host = deque(hf_files.on_host(whole, self.dtype))

        def write() -> bytes:
            hf_files.write_part(hidden, rank, _taken(host))
            if rank == 0:
                source = hf_files.CheckpointReader(self.model, self.facts)
                hf_files.write_untrained(hidden, self.facts, source, self.dtype)
            return b""

        def complete(payloads: list[bytes]) -> None:
            if problems := hf_files.write_index(hidden, self.facts):
                raise ConfigError(problems)

        self._start(step, hidden, write, complete, began)


def _taken(host: deque[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and drop each from the queue."""
    while host:
        yield host.popleft()
