"""Does the work of one rank of the proof: its microbatches and routes, its passes, and the check of what was
dispatched."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.megatron import hf_map, world
from moe_rl.megatron.microbatch import Microbatch, ScoredWork, Work, pack
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy, UpdateResult
from moe_rl.megatron.schedule import LossFunction
from moe_rl.megatron.witness import DispatchWitness
from moe_rl.models.hf import ModelFacts
from moe_rl.planning.packing import fill_rounds
from moe_rl.planning.packing import pack as assign
from moe_rl.proof.batch import batch
from moe_rl.proof.cases import MICROBATCH_TOKENS, Case
from moe_rl.replay.plans import plan_dispatch
from moe_rl.replay.replay_pass import Mode, PassSeen, Watch
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import MemoryTrace, TraceSpec
from moe_rl.types import Provenance, Span

# The mode of the first pass, for each mode of a case.
_FIRST: dict[str, Mode | None] = {"r3": "replay", "observe": "observe", "r2": "record", "native": None}


class BrokenOff(Exception):
    """Ends an update in the middle of its schedule."""


class Trial:
    """Holds this rank's sequences in microbatches, with the routes of its layers and rows."""

    def __init__(self, facts: ModelFacts, case: Case, policy: Policy):
        self.facts, self.case, self.policy, self.layers = facts, case, policy, policy.layers
        self.sequences, routes = batch(facts)
        self.spec = TraceSpec.from_layers("proof", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
        rank, ranks = world.data_parallel()
        plan = assign([s.forwarded for s in self.sequences], ranks=ranks, microbatch_tokens=MICROBATCH_TOKENS)
        mine = fill_rounds(plan, world.microbatches_in_a_round())[rank]
        context = world.context_parallel()
        self.microbatches = [
            pack(self.sequences, indices, world.device(), context, multiple=policy.row_multiple) for indices in mine
        ]
        for microbatch in self.microbatches:
            microbatch.give_advantages([[s.reward] for s in self.sequences])
        self.force(routes)

    def force(self, routes: list[np.ndarray]) -> None:
        """Make these the routes of the sequences [T, L, K], in all later passes."""
        trace, self.routes = MemoryTrace(self.spec), routes
        for index, (sequence, experts) in enumerate(zip(self.sequences, routes, strict=True)):
            ref = trace.add(sequence.key, experts, sequence.ids[:-1], [Span(len(experts), 0, Provenance.DECODE)])
            self.sequences[index] = replace(sequence, routes=ref)
        self.tables = []
        for microbatch in self.microbatches:
            packed = [self.sequences[i] for i in microbatch.indices]
            self.tables.append(microbatch.read_routes(trace, packed, self.spec, weight_version=0, layers=self.layers))

    def work(self, tables: list[MicrobatchRoutes], mode: Mode | None) -> list[Work]:
        """Return the microbatches under these tables, with plans if the case uses them."""
        case, work = self.case, zip(self.microbatches, tables, strict=True)
        items = [Work(microbatch, table, microbatch.rollout_logprobs) for microbatch, table in work]
        if case.plan and mode == "replay":
            rules = self.policy.dispatch_rules(
                overlap_chunks=case.overlap_chunks,
                copies=case.expert_copies,
                least_copied_rows=1,
                node_ranks=case.node_ranks,
            )
            for item, plan in zip(items, plan_dispatch(tables, rules).by_microbatch, strict=True):
                item.plan = plan
        return items

    def first_pass(self) -> tuple[ScoredWork, list[MicrobatchRoutes]]:
        """Run the forward-only pass. Returns its results, and the tables that the update will take."""
        mode, watch = _FIRST[self.case.mode], Watch(native=self.case.mode != "native")
        work = self.work(self.tables, mode)
        if mode != "record":
            return self.policy.score(work, mode, "logprobs", watch), self.tables
        # Record with other router weights than those of the update, so that the update's routers would choose
        # otherwise.
        routers = [layer.mlp.router for c in self.policy.chunks for layer in unwrap(c).decoder.layers]
        kept = [router.weight.detach().clone() for router in routers]
        for router in routers:
            router.weight.data = router.weight.data.flip(0)
        scored = self.policy.score(work, mode, "logprobs", watch)
        for router, weight in zip(routers, kept, strict=True):
            router.weight.data.copy_(weight)
        return scored, scored.seen.recorded

    def update(self, tables: list[MicrobatchRoutes], loss: LossFunction | None = None) -> tuple[UpdateResult, PassSeen]:
        """Make one optimizer step under these tables, by default with the reference's loss."""
        mode = "replay" if self.case.mode == "r2" else _FIRST[self.case.mode]
        return self.policy.update(self.work(tables, mode), loss or self.loss, mode, "update")

    def break_off(self, tables: list[MicrobatchRoutes]) -> None:
        """Start an update that fails in the loss of its second microbatch."""

        def loss(number, logprobs):
            if number == 1:
                raise BrokenOff
            return self.loss(number, logprobs)

        with suppress(BrokenOff):
            self.update(tables, loss)
            raise AssertionError("the update was not broken off")

    def loss(self, number: int, logprobs: torch.Tensor) -> torch.Tensor:
        microbatch = self.microbatches[number]
        return -(logprobs * microbatch.advantages[microbatch.sequence_ids]).sum() / len(self.sequences)

    def by_sequence(self, logprobs: Seq[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            i: values[microbatch.sequence_ids == n].cpu()
            for microbatch, values in zip(self.microbatches, logprobs, strict=True)
            for n, i in enumerate(microbatch.indices)
        }

    def _rows(self, microbatch: Microbatch) -> list[tuple[int, int] | None]:
        """Return (sequence, position) of every row that this rank's routers see; None for padding."""
        tokens = [(i, position) for i in microbatch.indices for position in range(self.sequences[i].forwarded)]
        return [tokens[row] if row < len(tokens) else None for row in microbatch.routed_rows]

    def chosen(self, tables: list[MicrobatchRoutes]) -> list[tuple[int, int, int, list[int]]]:
        """Return (sequence, position, layer, experts) of every row, without padding, that this rank recorded."""
        return [
            (*row, layer, sorted(table.routes[layer][n].tolist()))
            for microbatch, table in zip(self.microbatches, tables, strict=True)
            for layer in self.layers
            for n, row in enumerate(self._rows(microbatch))
            if row is not None
        ]

    def judge(self, witness: DispatchWitness) -> dict[str, int]:
        """Compare every routing map and every count of received rows with the forced routes, bit for bit.

        Also returns the largest numbers of rows that arrived on this rank, and for one expert, in a layer of a
        microbatch, and how many rows copies of other ranks' experts computed.
        """
        counts = torch.zeros(len(self.tables), len(self.layers), self.facts.num_experts, dtype=torch.int64)
        for m, table in enumerate(self.tables):
            for column, layer in enumerate(self.layers):
                ids = table.routes[layer].long().flatten().cpu()
                counts[m, column] = torch.bincount(ids, minlength=self.facts.num_experts)
        received = world.sum_over_dispatch(counts.to(world.device())).cpu()
        by_slot = torch.from_numpy(self.policy.order).expand_as(received)
        received = received.gather(2, by_slot)
        is_own = torch.zeros_like(received[0, 0], dtype=torch.bool)
        is_own[world.own_slots(self.facts.num_experts)] = True
        counted = torch.stack([event.received for event in witness.seen])  # Megatron counts them on the host
        everywhere = world.sum_over_dispatch(counted.to(world.device())).cpu()
        everywhere //= (
            self.case.parallel_config.expert_tensor
        )  # ranks that share an expert's matrices get the same rows
        totals = {"maps": 0, "wrong_maps": 0, "wrong_received": 0, "first": 0, "with_grad": 0}
        totals |= {"most_rows": 0, "most_of_an_expert": 0, "copied": 0}
        for dispatch, by_all in zip(witness.seen, everywhere, strict=True):
            column = self.layers.index(dispatch.layer)
            wanted = torch.zeros_like(dispatch.routing_map, device="cpu")
            made_up = self.tables[dispatch.microbatch].routes[dispatch.layer].long().cpu()
            for n, row in enumerate(self._rows(self.microbatches[dispatch.microbatch])):
                if row is None:  # padding
                    wanted[n, made_up[n]] = True
                else:
                    sequence, position = row
                    chosen = self.routes[sequence][position, self.facts.moe_layers.index(dispatch.layer)]
                    wanted[n, chosen.astype(int)] = True
            totals["maps"] += 1
            totals["with_grad" if dispatch.with_grad else "first"] += 1
            totals["wrong_maps"] += not torch.equal(wanted, dispatch.routing_map.cpu())
            here, due = dispatch.received.cpu(), received[dispatch.microbatch, column]
            without_copies = bool(self.case.expert_copies) or torch.equal(here, due * is_own)
            totals["wrong_received"] += not (torch.equal(by_all, due) and without_copies)
            totals["copied"] += int(here[~is_own].sum())
            totals["most_rows"] = max(totals["most_rows"], int(dispatch.received.sum()))
            totals["most_of_an_expert"] = max(totals["most_of_an_expert"], int(dispatch.received.max()))
        return totals


def whole_main_gradients(policy: Policy) -> None:
    """Gather main gradients, because the distributed optimizer leaves each rank a piece."""
    for buffer in [b for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            pieces = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(pieces, mine, group=group)
            bucket.grad_data.copy_(torch.cat(pieces))


def whole_gradients(policy: Policy, facts: ModelFacts) -> dict[str, torch.Tensor]:
    """Return main gradients under Hugging Face names."""
    whole_main_gradients(policy)
    gradients = hf_map.export(
        map(unwrap, policy.chunks), facts, dense=True, experts=True, get=lambda parameter: parameter.main_grad
    )
    return {name: tensor.cpu().clone() for name, tensor in gradients}
