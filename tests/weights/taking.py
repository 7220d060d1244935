"""Provides a sampler that keeps its weights and checks them as a real one does, without an engine, and its sender."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.types import ScoredTokens
from moe_rl.weights.intake import Intake
from moe_rl.weights.reader import Reader
from moe_rl.weights.shared_disk import checkpoint_shapes
from moe_rl.weights.update import DTypeName, Files, SharedMemory, decode, encode


class Taker:
    """places: for each part that came, how many files or segments it named; for each bucket, how many tensors."""

    def __init__(self, checkpoint: Path, dtype: DTypeName = "bfloat16"):
        self.intake, self.weights, self.places = Intake(checkpoint_shapes(checkpoint), dtype), {}, []
        self.reader = Reader(self.intake, checkpoint, self._keep, torch.device("cpu"))
        self.workers, self.address, self.woken = ["worker"], "127.0.0.1", []

    def update_weights(self, update):
        update = self.update = decode(encode(update))
        try:
            self.reader.take(update)
        except Exception:
            self._end()
            raise
        if update.final:
            self.intake.finish()
            self._end()

    def _end(self):
        self.intake.abandon()
        self.reader.release()

    def _keep(self, tensors):
        self.weights |= {name: tensor.clone() for name, tensor in tensors.items()}
        match self.update.source:
            case SharedMemory(segments):
                self.places.append(len(segments))
            case Files(paths):
                self.places.append(len(paths))
            case _:
                self.places.append(len(tensors))

    def wake(self, part):
        self.woken.append((part, len(self.places)))

    def score(self, runs, *, shard=None):
        return [ScoredTokens([np.zeros(len(run) - 1, np.float32) for run in runs], [], "a taker")]


def sender_of(policy, folder: Path, way: str, ranks=None, train=None, **settings):
    """Make a WeightSender of these ranks (default: megatron's own), with settings of the rollout section. train: says
    whether only adapters are sent."""
    from moe_rl.megatron import world
    from moe_rl.weights.sender import WeightSender

    lengths = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_completion_tokens": 1}
    rollout = RolloutConfig(**lengths | {"dtype": "float32"} | settings)
    return WeightSender(policy, rollout, folder, ranks or world, train=train, way=way)


def taken(policy, checkpoint: Path, folder: Path, way: str = "disk", **settings) -> Taker | None:
    """Send a policy's weights to a new Taker, which rank 0 returns. All ranks call this together.

    `settings` are of the rollout section.
    """
    taker = Taker(checkpoint) if dist.get_rank() == 0 else None
    sender_of(policy, folder, way, **settings).send(taker, 1)
    return taker
