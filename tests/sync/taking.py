"""A sampler that keeps the weights it gets, with the checks of a real one and no engine; and who sends to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.schema import RolloutConfig
from moe_rl.sync.intake import Intake
from moe_rl.sync.parts import checkpoint_shapes
from moe_rl.sync.update import Broadcast, Received, SharedMemory, decode, encode
from moe_rl.sync.ways import placed


class Taker:
    """places: for each part that came, how many files or segments it named; for each bucket, how many tensors."""

    def __init__(self, checkpoint: Path):
        self.intake, self.weights, self.places = Intake(checkpoint_shapes(checkpoint)), {}, []
        self.workers, self.address, self.link, self.woken = 1, "127.0.0.1", None, []

    def update_weights(self, update):
        update = decode(encode(update))
        self.intake.admit(update)
        if isinstance(update.source, Broadcast):
            self._receive(update)
        elif isinstance(update.source, Received):
            self.intake.confirm_received()
        else:
            tensors = dict(placed(update))
            self.intake.confirm(tensors, lambda: None)
            shared = isinstance(update.source, SharedMemory)
            self._keep(tensors, len(update.source.segments if shared else update.source.paths))
        if update.final:
            self.intake.finish()

    def _keep(self, tensors, places):
        self.intake.touch()
        self.weights |= {name: tensor.clone() for name, tensor in tensors.items()}
        self.places.append(places)

    def _receive(self, update):
        from moe_rl.sync.broadcast import Receiver

        def take(tensors):
            self.intake.received(tensors, lambda: None)
            self._keep(dict(tensors), len(tensors))

        if self.link is None or self.link.source != update.source:
            self.link = Receiver(update.source, update.source.first_rank, torch.device("cpu"))
        self.link.receive(update.tensors, take)

    def wake(self, part):
        self.woken.append((part, len(self.places)))

    def score(self, tokens):
        return np.zeros(len(tokens) - 1, np.float32)


def sender_of(policy, folder: Path, way: str, **settings):
    """A WeightSender of these ranks. settings: of rollout."""
    from moe_rl.train.weights import WeightSender

    lengths = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_completion_tokens": 1}
    rollout = RolloutConfig(**lengths, **{"dtype": "float32"} | settings)
    return WeightSender(policy, rollout, way, folder)


def taken(policy, checkpoint: Path, folder: Path, way: str = "disk", **settings) -> Taker | None:
    """What the policy's ranks, which all call it, send to a new Taker; on rank 0. settings: of rollout."""
    taker = Taker(checkpoint) if dist.get_rank() == 0 else None
    sender_of(policy, folder, way, **settings).send(taker, 1)
    return taker
