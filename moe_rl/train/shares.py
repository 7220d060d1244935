"""Divides a training step among the ranks: each rank's microbatches, with their routes read and checked before any
pass.

Also plans from recorded routes which sequences share a microbatch and a rank, and where each expert is placed. All
ranks make the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.schema import Config
from moe_rl.errors import ReplayError, TraceError
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import Share, Work, pack
from moe_rl.megatron.policy import Policy
from moe_rl.objectives.lags import with_keys
from moe_rl.objectives.losses import global_denominator, nonempty
from moe_rl.planning import packing
from moe_rl.planning.balance import Plan, load_of, pack_by_load
from moe_rl.planning.expert_placement import place
from moe_rl.planning.packing import fill_rounds, row_multiple, split_groups
from moe_rl.replay.evidence import refuse_other_sums
from moe_rl.replay.plans import plan_dispatch
from moe_rl.replay.routes import RowPolicy, missing_rows
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.sampling_support import read_head, read_support
from moe_rl.types import RouteRef, SamplerHead, SamplingSupport, Sequence, held_together, unit_lengths


def assign(
    updates: list[list[Sequence]], config: Config, store: TraceStore, spec: TraceSpec, placement: np.ndarray
) -> list[tuple[Plan, bool]]:
    """Plan the microbatches of all ranks for each update, by length or by known expert load as the config says.

    All segments of a completion are in one microbatch where the loss needs the whole completion.

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
        of_sequences = [[sorted(i for c in batch for i in size.completions[c]) for batch in rank] for rank in plan]
        return fill_rounds(of_sequences, in_a_round)

    by_length = [whole(size, packing.pack(size.lengths, ranks=ranks, microbatch_tokens=budget)) for size in sizes]
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
        for index in range(dist.get_rank(), len(completions), dist.get_world_size()):
            for ref in completions[index]:
                if ref is not None:
                    by_slot = np.take_along_axis(expert_counts(store, ref, spec), placement, axis=1)
                    counted[index] += load_of(by_slot[None], parts)[0]
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
    """Holds, for each completion, or part of one that may be apart from the others, the places of its sequences in the
    update and its number of forwarded tokens."""

    completions: list[list[int]]
    lengths: list[int]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> _Sizes:
        completions = held_together(sequences)
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
        planned = None
        if dist.get_rank() == 0:
            order, report = place(
                np.stack(self.counts),
                self.config.parallel.expert,
                current=self.policy.placement,
                max_moved=settings.max_moved,
                min_gain=settings.min_gain,
            )
            planned = order.tolist(), report.before, report.after, report.moved
        slots, before, after, moved = world.broadcast(planned, tuple[list[list[int]], float, float, int])
        if moved:
            self.policy.place(np.array(slots))
        return {
            "placement/excess_before": before,
            "placement/excess_after": after,
            "placement/experts_moved": moved,
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


def divisors(objective: str, sequences: list[Sequence], longest: int) -> tuple[int, int, int]:
    """Return `denominator`, `sequences` and `tokens` of a Share.

    Args:
        objective: Name of the loss.
        sequences: All of the update, on all ranks.
        longest: The longest completion allowed, in tokens.
    """
    lengths = unit_lengths(sequences)
    return global_denominator(objective, lengths, longest), nonempty(lengths), sum(lengths)


class Shares:
    """Divides rollout batches into the shares of the ranks. All ranks call it together.

    Args:
        layers: Global numbers of the MoE layers that this rank holds. Only their routes are read.
        vocabulary: Vocabulary size.
    """

    def __init__(self, config: Config, layers: tuple[int, ...], store: TraceStore, spec: TraceSpec, *, vocabulary: int):
        self.config, self.layers, self.store, self.spec = config, layers, store, spec
        self.vocabulary = vocabulary
        replay = config.replay
        self.rows = RowPolicy(
            missing="native" if replay.missing == "native" else "refuse",
            stale=replay.stale,
            max_staleness=config.pipeline.lag,
            keep_keys=config.pipeline.kv == "keep",
        )

    def divide(
        self, sequences: list[Sequence], group_ids: list[int], weight_version: int, placement: np.ndarray
    ) -> tuple[list[Share], dict[str, float]]:
        """Return this rank's share of every update, and metrics on routes that are not replayed.

        Args:
            placement: int64 [L, E], the expert in each slot, of every MoE layer of the model.

        Returns:
            The shares, and metrics that are equal on every rank.

        Raises:
            MoeRLError: On some rank, routes are missing, damaged, wrong or too old beyond what the config allows, or a
                required sampling support or sampler head is missing or wrong. Raised on all ranks.
        """
        sequences, group_ids, dropped = self._complete(sequences, group_ids)
        split = split_groups(group_ids, self.config.train.updates_per_step)
        updates = [[sequences[i] for i in chosen] for chosen in split if chosen]
        planned = assign(updates, self.config, self.store, self.spec, placement)
        plans = [plan for plan, _ in planned]
        with world.agreed():
            shares = self._read(updates, plans, weight_version)
        tables = [work.table for share in shares for work in share.work]
        # Before any update, also if no pass will take the routes.
        known = [table.read for table in tables if table.source is not None]
        read = world.sum_over_share(torch.cat(known)).tolist() if known else []
        with world.agreed():
            refuse_other_sums(tables, read, "read", {})
        return shares, {
            **self._loads(tables, sequences, placement),
            "routing/dropped_sequences": dropped,
            "routing/packed_by_length": sum(by_length for _, by_length in planned),
        }

    def plan_rows(self, policy: Policy, work: list[Work], step: int) -> tuple[float, float | None]:
        """Make dispatch plans from the microbatches' routes, with one exchange between ranks for all of them.

        `work` is in the order in which passes run it, so that the first pass waits for the plans of its first
        microbatch only.

        Returns:
            The largest number of rows that a rank's experts get in a layer of a microbatch. How much fuller the fullest
                rank is than the mean, minus 1; None unless experts may be copied.

        Raises:
            ReplayError: A rank would get more rows than `replay.max_rows`. Raised on all ranks.
        """
        replay, placement = self.config.replay, self.config.placement
        if replay.plan is False:
            return 0.0, None
        rules = policy.dispatch_rules(
            overlap_chunks=replay.overlap_chunks,
            copies=placement.copies,
            least_copied_rows=placement.least_copied_rows,
            node_ranks=placement.node_ranks,
        )
        plans = plan_dispatch([item.table for item in work], rules)
        limit, (peak,) = replay.max_rows, world.all_reduce([plans.peak], dist.ReduceOp.MAX)
        if limit is not None and peak > limit:
            raise ReplayError(
                "the routes would give a rank too many rows in a layer of a microbatch",
                where={"step": step},
                got=f"{peak:.0f} (token, expert) pairs",
                expected=f"at most {limit} (replay.max_rows)",
                do="lower train.microbatch_tokens, try train.packing: load, or raise replay.max_rows",
            )
        for item, plan in zip(work, plans.by_microbatch, strict=True):
            item.plan = plan
        if not placement.copies:
            return peak, None
        fullest, rows = world.all_reduce([plans.fullest, plans.rows])
        return peak, fullest * self.config.parallel.expert / rows - 1 if rows else 0.0

    def _complete(self, sequences: list[Sequence], group_ids: list[int]) -> tuple[list[Sequence], list[int], int]:
        """Return the sequences to train on, their groups, and how many were dropped because routes are missing.

        Dropping a segment drops its whole completion. Every rank makes the same decision, from the route references
        alone.
        """
        if self.config.replay.missing == "native":
            return sequences, group_ids, 0
        broken = {sequence.completion for sequence in sequences if missing_rows(sequence)}
        kept = [i for i, sequence in enumerate(sequences) if sequence.completion not in broken]
        dropped, limit = len(sequences) - len(kept), self.config.replay.max_fallback_fraction
        if dropped > limit * len(sequences) or (dropped and not kept):
            first = next(sequence for sequence in sequences if missing_rows(sequence))
            raise ReplayError(
                "too many sequences have tokens without a recorded route",
                where={"request": first.key},
                got=f"{dropped} of {len(sequences)} sequences, {missing_rows(first)} tokens of this one",
                expected=f"at most {limit:.2%} (replay.max_fallback_fraction)",
                do="look in engine.log for why the sampler did not record; replay.missing can allow this",
            )
        return [sequences[i] for i in kept], [group_ids[i] for i in kept], dropped

    def _read(self, updates: list[list[Sequence]], plans: list[Plan], weight_version: int) -> list[Share]:
        """Read this rank's part of every update. `updates` holds the sequences of each."""
        shares, rank, longest = [], world.data_parallel()[0], self.config.rollout.max_completion_tokens
        for sequences, plan in zip(updates, plans, strict=True):
            work = []
            for indices in plan[rank]:
                packed = [sequences[i] for i in indices]
                supports, heads = self._distributions(packed)
                context, multiple = world.context_parallel(), row_multiple(self.config.train, self.config.parallel)
                microbatch = pack(sequences, indices, world.device(), context, supports, heads, multiple)
                table = microbatch.read_routes(
                    self.store, packed, self.spec, weight_version=weight_version, layers=self.layers, policy=self.rows
                )
                old, lags = microbatch.rollout_logprobs, weight_version - microbatch.versions
                if self.rows.keep_keys:
                    lags = with_keys(lags, microbatch.counts)
                work.append(Work(microbatch, table, old_logprobs=old, lags=lags))
            divided = divisors(self.config.objective.name, sequences, longest)
            shares.append(Share(work, *divided, all=tuple(sequences)))
        return shares

    def _distributions(self, packed: list[Sequence]) -> tuple[list[SamplingSupport] | None, list[SamplerHead] | None]:
        """Read the sampling supports and the sampler heads of the packed sequences, as far as this rank needs them."""
        supports, heads, size = None, None, self.config.objective.score_centering
        if world.is_last_stage() and self.config.rollout.keep_sampling_mask:
            supports = [read_support(self.store, sequence, self.vocabulary) for sequence in packed]
        if world.is_last_stage() and size is not None:
            heads = [read_head(self.store, sequence, self.vocabulary, size) for sequence in packed]
        return supports, heads

    def _loads(
        self, tables: list[MicrobatchRoutes], sequences: list[Sequence], placement: np.ndarray
    ) -> dict[str, float]:
        """Return metrics, over all ranks, on how much of the step is replayed, and how even the expert load is.

        The excess is the sum, over microbatches and layers, of the fullest expert-parallel rank's (token, expert) pairs
        divided by the sum of the mean, minus 1. Rows without a recorded route, such as padding, do not count. It is 0
        if no row has a route.

        Raises:
            ReplayError: Too little is replayed. Raised on all ranks.
        """
        layers, ranks, most, pairs = len(self.layers), self.config.parallel.expert, 0, 0
        if tables:
            order = torch.from_numpy(placement[[self.spec.moe_layers.index(layer) for layer in self.layers]])
            counts = world.sum_over_dispatch(torch.stack([_count(table, order.shape[1]) for table in tables]))
            by_slot = torch.take_along_dim(counts, order.to(counts.device)[None], 2)
            loads = by_slot.view(*counts.shape[:2], ranks, -1).sum(dim=3)
            most, pairs = int(loads.amax(dim=2).sum()), int(loads.sum())
        covered, native, stale, most_of_all, all_pairs = world.all_reduce(
            [
                layers * sum(table.replayed_tokens for table in tables),
                layers * sum(table.native_tokens for table in tables),
                layers * sum(table.stale_tokens for table in tables),
                most,
                pairs,
            ]
        )
        positions = sum(s.forwarded for s in sequences) * len(self.spec.moe_layers)
        if covered + native != positions:
            raise ReplayError(
                "the ranks together do not have every token exactly once in every layer",
                got=f"{covered + native:.0f} (token, layer) positions",
                expected=positions,
            )
        limit = self.config.replay.max_fallback_fraction
        if native > limit * positions:
            raise ReplayError(
                "too much of a step would be routed natively",
                got=f"{native:.0f} of {positions} (token, layer) positions, {native / positions:.2%}",
                expected=f"at most {limit:.2%} (replay.max_fallback_fraction)",
                do="look in engine.log for why the sampler did not record, or change replay.stale",
            )
        return {
            "routing/coverage": covered / positions,
            "routing/fallback_positions": native,
            "routing/stale_tokens": stale / len(self.spec.moe_layers),
            "routing/load_excess": most_of_all * ranks / all_pairs - 1 if all_pairs else 0.0,
        }


def _count(table: MicrobatchRoutes, experts: int) -> torch.Tensor:
    """Return int64 [L, E], how often this rank's rows chose each expert of this rank's layers."""
    chosen = torch.stack([table.routes[layer][table.recorded] for layer in sorted(table.routes)]).long().flatten(1)
    counts = torch.zeros(len(chosen), experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))
