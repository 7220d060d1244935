"""When experts move: a placement planned from the routes of the last steps, on one rank, for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.schema import Config
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.planning.expert_placement import place
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.assignment import agreed, expert_counts
from moe_rl.types import Sequence


@dataclass(frozen=True, slots=True)
class _Planned:
    """A placement on its way from rank 0, with the excess expected of it."""

    order: list[list[int]]
    before: float
    after: float
    moved: int


class ExpertPlacement:
    """Moves a policy's experts at the start of some steps, before anything is computed, as the config says.

    The routes of the step that starts are among those that it is planned from: they are known by then.
    """

    def __init__(self, config: Config, policy: Policy, store: TraceStore, spec: TraceSpec):
        self.config, self.policy, self.store, self.spec = config, policy, store, spec
        self.counts: list[np.ndarray] = []  # int64 [L, E] of each of the last steps, the oldest first

    def start_step(self, step: int, sequences: list[Sequence]) -> dict[str, float]:
        """Count the step's routes and, if it is time, plan and move. All ranks call it; returns the step's metrics,
        none in a step without a plan. Raises on all ranks when a record is damaged on one."""
        settings = self.config.placement
        if settings.experts == "natural":
            return {}
        counts = torch.from_numpy(agreed(lambda: self._count(sequences))).to(world.device())
        dist.all_reduce(counts)
        self.counts = [*self.counts, counts.cpu().numpy()][-settings.window_steps :]
        if (step - 1) % settings.every_steps:
            return {}
        planned = world.broadcast(self._plan() if dist.get_rank() == 0 else None, _Planned)
        if planned.moved:
            self.policy.place(np.array(planned.order))
        return {
            "placement/excess_before": planned.before,
            "placement/excess_after": planned.after,
            "placement/experts_moved": planned.moved,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, for `restore`."""
        if not self.counts:
            return {}
        return {"placement": torch.from_numpy(self.policy.placement), "counts": torch.from_numpy(np.stack(self.counts))}

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """Go on as where the checkpoint was written; its weights are loaded by now. All ranks call it."""
        if kept:
            self.counts = list(kept["counts"].numpy())
            self.policy.place(kept["placement"].numpy())

    def _count(self, sequences: list[Sequence]) -> np.ndarray:
        """int64 [L, E] of this rank's part of the sequences; any rank can read any of them."""
        counts = np.zeros((len(self.spec.moe_layers), self.spec.num_experts), np.int64)
        for sequence in sequences[dist.get_rank() :: dist.get_world_size()]:
            if sequence.routes is not None:
                counts += expert_counts(self.store, sequence.routes, self.spec)
        return counts

    def _plan(self) -> _Planned:
        settings = self.config.placement
        order, report = place(
            np.stack(self.counts),
            self.config.parallel.expert,
            current=self.policy.placement,
            max_moved=settings.max_moved,
            min_gain=settings.min_gain,
        )
        return _Planned(order.tolist(), report.before, report.after, report.moved)
