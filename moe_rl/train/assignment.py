"""Plans from recorded routes which sequences share a microbatch and a rank, and where each expert is placed. All ranks
make the same decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.schema import Config
from moe_rl.errors import TraceError
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.planning.balance import Plan, load_of, pack_by_load
from moe_rl.planning.expert_placement import place
from moe_rl.planning.packing import fill_rounds, pack
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.types import RouteRef, Sequence, by_completion


def assign(
    updates: list[list[Sequence]], config: Config, store: TraceStore, spec: TraceSpec, placement: np.ndarray
) -> list[tuple[Plan, bool]]:
    """Plan the microbatches of all ranks for each update, by length or by known expert load as the config says.

    All segments of a completion are in one microbatch, because the loss needs the whole completion.

    To find the load, each rank counts the experts of its part of the sequences: reading routes takes most of the time,
    so it runs in parallel. Different ranks plan different updates at the same time. Each planning rank sends its plan,
    so that ranks whose arithmetic rounds differently use the same plan. A token without a recorded route has no load.
    For interleaved stages, a plan is filled up to whole rounds with empty microbatches, which contain only padding.

    Args:
        updates: The sequences of each update.
        placement: int64 [L, E], the expert in each slot, of every MoE layer of the model.

    Returns:
        For each update its plan (see `packing.pack`), the same on every rank, and whether it is the plan by length.
            That is also the result if planning by load finds nothing better.

    Raises:
        MoeRLError: A record is damaged on some rank. Raised on all ranks.
    """
    sizes = [_Sizes.of(sequences) for sequences in updates]
    ranks = world.data_parallel()[1]
    budget = config.train.microbatch_tokens
    in_a_round = world.microbatches_in_a_round()

    def whole(size: _Sizes, plan: Plan) -> Plan:
        of_sequences = [[sorted(i for at in one for i in size.completions[at]) for one in rank] for rank in plan]
        return fill_rounds(of_sequences, in_a_round)

    by_length = [whole(size, pack(size.lengths, ranks=ranks, microbatch_tokens=budget)) for size in sizes]
    if config.train.packing == "length":
        return [(plan, True) for plan in by_length]
    parts = config.parallel.expert
    completions = [
        [sequences[i].routes for i in places]
        for sequences, size in zip(updates, sizes, strict=True)
        for places in size.completions
    ]

    counted = np.zeros((len(completions), len(spec.moe_layers), parts), np.int32)
    with world.agreed():
        for at in range(dist.get_rank(), len(completions), dist.get_world_size()):
            for ref in completions[at]:
                if ref is not None:
                    by_slot = np.take_along_axis(expert_counts(store, ref, spec), placement, axis=1)
                    counted[at] += load_of(by_slot[None], parts)[0]
    loads = torch.from_numpy(counted).to(world.device())
    dist.all_reduce(loads)
    of_update = np.split(loads.cpu().numpy(), np.cumsum([len(size.lengths) for size in sizes])[:-1])
    planners = [number % dist.get_world_size() for number in range(len(updates))]
    with world.agreed():
        exchange = world.dispatching_shares()
        planned = [
            whole(size, pack_by_load(size.lengths, load, ranks=ranks, microbatch_tokens=budget, exchange=exchange)[0])
            if planner == dist.get_rank()
            else None
            for planner, size, load in zip(planners, sizes, of_update, strict=True)
        ]
    plans = [world.broadcast(plan, Plan, planner) for plan, planner in zip(planned, planners, strict=True)]
    return [(plan, plan == other) for plan, other in zip(plans, by_length, strict=True)]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Holds, for each completion, the places of its sequences in the update and its number of forwarded tokens."""

    completions: list[list[int]]
    lengths: list[int]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> _Sizes:
        completions = by_completion(sequences)
        return cls(completions, [sum(sequences[i].forwarded for i in places) for places in completions])


def expert_counts(store: TraceStore, ref: RouteRef, spec: TraceSpec) -> np.ndarray:
    """Return integers [L, E], how often each expert occurs in a record, for all MoE layers of the model.

    Raises:
        TraceError: The record is damaged, or belongs to a model of another shape.
    """
    counts, shape = store.expert_counts(ref), (len(spec.moe_layers), spec.num_experts)
    if counts.shape != shape:
        raise TraceError(
            "the record belongs to another model",
            where={"record": ref.key},
            got=f"counts {counts.shape}",
            expected=f"{shape}",
        )
    return counts


@dataclass(frozen=True, slots=True)
class _Planned:
    """Carries a placement from rank 0 to the other ranks, with the expected load excess before and after."""

    order: list[list[int]]
    before: float
    after: float
    moved: int


class ExpertPlacement:
    """Moves a policy's experts at the start of some steps, as the config says, before anything is computed.

    The routes of the starting step are known by then, and are among the routes that the placement is planned from.
    """

    def __init__(self, config: Config, policy: Policy, store: TraceStore, spec: TraceSpec):
        self.config, self.policy, self.store, self.spec = config, policy, store, spec
        self.counts: list[np.ndarray] = []  # int64 [L, E] of each of the last steps, oldest first

    def start_step(self, step: int, sequences: list[Sequence]) -> dict[str, float]:
        """Count the step's routes and, if it is time, plan a new placement and move experts. All ranks call this
        together.

        Returns:
            The step's metrics; none in a step without a plan.

        Raises:
            MoeRLError: A record is damaged on some rank. Raised on all ranks.
        """
        settings = self.config.placement
        if settings.experts == "natural":
            return {}
        with world.agreed():
            counted = self._count(sequences)
        counts = torch.from_numpy(counted).to(world.device())
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
        """Return the tensors that a checkpoint keeps for `restore`."""
        if not self.counts:
            return {}
        return {"placement": torch.from_numpy(self.policy.placement), "counts": torch.from_numpy(np.stack(self.counts))}

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """Continue from where the checkpoint was written. Call it on all ranks, after the weights are loaded."""
        if kept:
            self.counts = list(kept["counts"].numpy())
            self.policy.place(kept["placement"].numpy())

    def _count(self, sequences: list[Sequence]) -> np.ndarray:
        """Return int64 [L, E] of this rank's part of the sequences; any rank can read any sequence."""
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
