"""One rank of the proof: run cases one after the other in one process group, write what was seen.

    torchrun --nproc-per-node N -m moe_rl.proof.rank CHECKPOINT OUT CASES

CASES: a JSON file with a list of the fields of `Case`. Rank r writes OUT/<number of the case>-rank<r>.pt. A case runs a
forward-only pass and an update on the fixed batch; see `proof.batch`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.hf import ModelFacts, read_model
from moe_rl.errors import ReplayError, describe
from moe_rl.megatron import hf_map, model, world
from moe_rl.megatron.microbatch import Microbatch, pack
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.router import ReplayLayer
from moe_rl.megatron.witness import DispatchWitness
from moe_rl.planning.packing import pack as assign
from moe_rl.proof.batch import batch
from moe_rl.proof.cases import MICROBATCH_TOKENS, Case
from moe_rl.replay.routes import SequenceRoutes, microbatch_routes
from moe_rl.replay.session import MicrobatchRoutes, ReplaySession
from moe_rl.trace import TraceSpec


def main() -> None:
    checkpoint, out, cases = map(Path, sys.argv[1:])
    world.join(timeout_seconds=120)
    for number, fields in enumerate(json.loads(cases.read_text())):
        case = Case(**fields)
        world.lay_out(case.parallel_config, seed=1)
        seen = run(case, checkpoint)
        torch.save(seen, out / f"{number}-rank{dist.get_rank()}.pt")
        dist.barrier()
        world.clear()
    dist.destroy_process_group()


def run(case: Case, checkpoint: Path) -> dict:
    """What this rank saw of one case. With a planted fault: the error it ended with, if any."""
    facts = read_model(checkpoint)
    with _any_precision_may_overlap():
        policy = Policy(facts, case.train_config, case.parallel_config, checkpoint, temperature=1.0)
    share = Share(facts, case, policy.layers)
    if case.fault in FAULTS:
        if dist.get_rank() == dist.get_world_size() - 1:
            FAULTS[case.fault](policy)
        return {"error": _error_of(share, policy)}
    if case.fault in UPDATE_FAULTS:
        return {"error": _error_of_update(share, policy, UPDATE_FAULTS[case.fault])}
    if case.fault == "broken off":
        _break_off(share, policy)
    witness = DispatchWitness().attach(policy.chunks)
    plans = _count_plans(policy)
    if case.mode == "native":
        sessions = None, None
        logprobs = policy.logprobs(share.microbatches, None)
        result = policy.update(share.microbatches, None, share.loss)
    else:
        first, tables = share.first_pass(policy)
        logprobs = first.pop("logprobs")
        second = share.session(tables, "observe" if case.mode == "observe" else "replay", "update", policy=policy)
        with second:
            result = policy.update(share.microbatches, second, share.loss)
        sessions = first["session"], second
    weights = hf_map.export(map(unwrap, policy.chunks), facts, dense=True, experts=True)
    return {
        "logprobs": share.by_sequence(logprobs),
        "grad_norm": result.grad_norm,
        "weights": {name: tensor.cpu().clone() for name, tensor in weights},
        "grads": whole_gradients(policy, facts),
        "tallies": [None if s is None else _numbers(s) for s in sessions],
        "dispatch": share.judge(witness) if case.mode in ("r3", "observe") else None,
        "chosen": share.chosen(tables) if case.mode == "r2" else None,
        "microbatches": len(share.microbatches),
        "layers": list(policy.layers),
        "recomputed_layers": sorted(policy.recomputed_layers),
        "plans": len(plans),
    }


class Share:
    """What this rank works on: its sequences in microbatches, and the routes of its layers and rows."""

    def __init__(self, facts: ModelFacts, case: Case, layers: tuple[int, ...]):
        self.facts, self.case, self.layers = facts, case, layers
        self.sequences, self.routes = batch(facts)
        self.spec = TraceSpec.from_layers("proof", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
        rank, ranks = world.data_parallel()
        plan = assign([s.forwarded for s in self.sequences], ranks=ranks, microbatch_tokens=MICROBATCH_TOKENS)[rank]
        context = world.context_parallel()
        self.microbatches = [pack(self.sequences, indices, world.device(), context) for indices in plan]
        self.tables = [self._table(microbatch) for microbatch in self.microbatches]

    def _table(self, microbatch: Microbatch) -> MicrobatchRoutes:
        columns = [self.facts.moe_layers.index(layer) for layer in self.layers]
        parts = []
        for i in microbatch.indices:
            nothing = np.zeros(len(self.routes[i]), bool)
            tokens = np.array((self.sequences[i].prompt_token_ids + self.sequences[i].token_ids)[:-1])
            parts.append(SequenceRoutes(self.sequences[i].key, tokens, self.routes[i][:, columns], nothing, ~nothing))
        return microbatch_routes(
            parts,
            self.spec,
            layers=self.layers,
            names=[part.key for part in parts],
            fed=microbatch.fed([self.sequences[i] for i in microbatch.indices]),
            padded_tokens=sum(microbatch.lengths),
            rows=microbatch.rows[world.own_rows(microbatch.tokens.shape[1])],
            expert_parallel=self.case.parallel_config.expert,
            device=world.device(),
        )

    def session(self, tables, mode, name, *, policy: Policy, training=True, compare_native=False) -> ReplaySession:
        return ReplaySession(
            tables,
            self.layers,
            mode=mode,
            name=name,
            rank=dist.get_rank(),
            compare_native=compare_native,
            recomputed_layers=policy.recomputed_layers if training else frozenset(),
            any_stage=world.any_stage,
        )

    def first_pass(self, policy: Policy) -> tuple[dict, list[MicrobatchRoutes]]:
        """The forward-only pass, and the tables that the update is going to replay."""
        mode = {"r3": "replay", "observe": "observe", "r2": "record"}[self.case.mode]
        session = self.session(self.tables, mode, "logprobs", policy=policy, training=False, compare_native=True)
        if self.case.mode == "r2":
            # Other routers than those that will be updated, so that what was recorded is not what they would choose.
            routers = [layer.mlp.router for c in policy.chunks for layer in unwrap(c).decoder.layers]
            kept = [router.weight.detach().clone() for router in routers]
            for router in routers:
                router.weight.data = router.weight.data.flip(0)
        with session:
            logprobs = policy.logprobs(self.microbatches, session)
        if self.case.mode != "r2":
            return {"logprobs": logprobs, "session": session}, self.tables
        for router, weight in zip(routers, kept, strict=True):
            router.weight.data.copy_(weight)
        return {"logprobs": logprobs, "session": session}, session.recorded_routes()

    def loss(self, number: int, logprobs: torch.Tensor) -> torch.Tensor:
        microbatch = self.microbatches[number]
        return -(logprobs * microbatch.advantages[microbatch.sequence_ids]).sum() / len(self.sequences)

    def by_sequence(self, logprobs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            i: values[microbatch.sequence_ids == n].cpu()
            for microbatch, values in zip(self.microbatches, logprobs, strict=True)
            for n, i in enumerate(microbatch.indices)
        }

    def _rows(self, microbatch: Microbatch) -> list[tuple[int, int] | None]:
        """(sequence, position) of every row that this rank's routers see; None: padding."""
        tokens = [(i, at) for i in microbatch.indices for at in range(self.sequences[i].forwarded)]
        rows = microbatch.rows[world.own_rows(microbatch.tokens.shape[1])]
        return [tokens[row] if row < len(tokens) else None for row in rows]

    def chosen(self, tables: list[MicrobatchRoutes]) -> list[tuple[int, int, int, list[int]]]:
        """(sequence, position, layer, experts) of every real row that this rank recorded."""
        return [
            (*row, layer, sorted(table.routes[layer][n].tolist()))
            for microbatch, table in zip(self.microbatches, tables, strict=True)
            for layer in self.layers
            for n, row in enumerate(self._rows(microbatch))
            if row is not None
        ]

    def judge(self, witness: DispatchWitness) -> dict[str, int]:
        """Every map and every count of received rows, bit for bit against the forced routes."""
        counts = torch.zeros(len(self.tables), len(self.layers), self.facts.num_experts, dtype=torch.int64)
        for m, table in enumerate(self.tables):
            for column, layer in enumerate(self.layers):
                ids = table.routes[layer].long().flatten().cpu()
                counts[m, column] = torch.bincount(ids, minlength=self.facts.num_experts)
        received = world.sum_over_dispatch(counts.to(world.device())).cpu()
        received = received[..., world.own_experts(self.facts.num_experts)]
        totals = {"maps": 0, "wrong_maps": 0, "wrong_received": 0, "first": 0, "with_grad": 0}
        for dispatch in witness.seen:
            column = self.layers.index(dispatch.layer)
            wanted = torch.zeros_like(dispatch.routing_map)
            known = torch.zeros(len(wanted), dtype=torch.bool)
            for n, row in enumerate(self._rows(self.microbatches[dispatch.microbatch])):
                if row is not None:
                    sequence, position = row
                    chosen = self.routes[sequence][position, self.facts.moe_layers.index(dispatch.layer)]
                    known[n] = wanted[n, chosen.astype(int)] = True
            totals["maps"] += 1
            totals["with_grad" if dispatch.with_grad else "first"] += 1
            totals["wrong_maps"] += not torch.equal(wanted[known], dispatch.routing_map.cpu()[known])
            totals["wrong_received"] += not torch.equal(received[dispatch.microbatch, column], dispatch.received.cpu())
        return totals


def whole_gradients(policy: Policy, facts: ModelFacts) -> dict[str, torch.Tensor]:
    """Main gradients under Hugging Face names. The distributed optimizer leaves each rank one reduced piece: gather."""
    for buffer in [b for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            pieces = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(pieces, mine, group=group)
            bucket.grad_data.copy_(torch.cat(pieces))
    gradients = hf_map.export(
        map(unwrap, policy.chunks), facts, dense=True, experts=True, get=lambda parameter: parameter.main_grad
    )
    return {name: tensor.cpu().clone() for name, tensor in gradients}


@contextmanager
def _any_precision_may_overlap() -> Iterator[None]:
    """Megatron's config wants half precision for combined 1F1B, its schedule does not: show it bf16, compute as set."""
    transformer_config, overlap = model.TransformerConfig, "overlap_moe_expert_parallel_comm"

    def build(**settings):
        config = transformer_config(**settings | {"bf16": settings["bf16"] or settings[overlap]})
        config.bf16 = settings["bf16"]
        return config

    with mock.patch.object(model, "TransformerConfig", build):
        yield


def _count_plans(policy: Policy) -> list[object]:
    """Grows by one with every forward that combined 1F1B takes apart."""
    plans = []

    def counted(build):
        def build_schedule_plan(*args, **kwargs):
            plans.append(build(*args, **kwargs))
            return plans[-1]

        return build_schedule_plan

    for chunk in map(unwrap, policy.chunks):
        chunk.build_schedule_plan = counted(chunk.build_schedule_plan)
    return plans


def _numbers(session: ReplaySession) -> dict:
    return {name: getattr(session.tally, name) for name in session.tally.__slots__}


def _error_of(share: Share, policy: Policy) -> str | None:
    """Two microbatch passes under a session without collectives of its own, so that one rank may fail alone."""
    session = share.session(share.tables, "replay", "logprobs", policy=policy, training=False)
    try:
        with session:
            policy.logprobs(share.microbatches, session)
    except ReplayError as error:
        return str(error)
    return None


def _error_of_update(share: Share, policy: Policy, plant: Callable[[Policy], None]) -> str | None:
    """An update with a fault on every rank, so that they end together, after a forward-only pass without it."""
    share.first_pass(policy)
    plant(policy)
    try:
        with share.session(share.tables, "replay", "update", policy=policy) as session:
            policy.update(share.microbatches, session, share.loss)
    except ReplayError as error:
        return str(error)
    return None


class _BrokenOff(Exception):
    pass


def _break_off(share: Share, policy: Policy) -> None:
    """An update whose loss raises for the second microbatch, when the gradient of the first is in the buffers."""

    def loss(number: int, logprobs: torch.Tensor) -> torch.Tensor:
        if number == 1:
            raise _BrokenOff
        return share.loss(number, logprobs)

    try:
        with share.session(share.tables, "replay", "broken off", policy=policy) as session:
            policy.update(share.microbatches, session, loss)
    except _BrokenOff:
        return
    raise ReplayError(describe("the update that was to be broken off went through", where=share.case.name))


def _swapped(policy: Policy) -> None:
    """Other experts than recorded reach the dispatcher."""
    router = unwrap(policy.chunks[0]).decoder.layers[0].mlp.router
    whole = router.routing
    router.routing = lambda *a, **k: (lambda probs, chosen: (probs, chosen.roll(1, -1)))(*whole(*a, **k))


def _repeated(policy: Policy) -> None:
    """A router runs twice."""
    layer = unwrap(policy.chunks[-1]).decoder.layers[-1].mlp
    route = layer.route
    layer.route = lambda *a, **k: (route(*a, **k), route(*a, **k))[1]


def _orphan(policy: Policy) -> None:
    """A router has lost the microbatch it works on, as one of a model that nobody forwards through would have."""
    layer = unwrap(policy.chunks[0]).decoder.layers[0].mlp
    route = layer.route

    def forget(*a, **k):
        layer.router.handle = None
        return route(*a, **k)

    layer.route = forget


def _late_key(policy: Policy) -> None:
    """The key is bound behind the router, which works with that of the microbatch before."""
    layer = unwrap(policy.chunks[-1]).decoder.layers[-1]
    whole, bound = layer._forward_attention, [None]

    def forward_attention(*args, **kwargs):
        out = whole(*args, **kwargs)
        bound.append(layer.mlp.router.handle)
        layer.mlp.router.handle = bound[-2]
        return out

    layer._forward_attention = forward_attention


def _kept_key(policy: Policy) -> None:
    """The key is bound where combined 1F1B does not pass: the router still has that of the last pass."""
    layer = unwrap(policy.chunks[-1]).decoder.layers[-1]
    layer._forward_attention = super(ReplayLayer, layer)._forward_attention

    def bind(layer, args, kwargs):
        layer.mlp.router.handle = kwargs["packed_seq_params"].replay

    layer.register_forward_pre_hook(bind, with_kwargs=True)


# Planted on the last rank, in a forward-only pass.
FAULTS = {"swapped": _swapped, "repeated": _repeated, "orphan": _orphan}
# Planted on every rank, in an update.
UPDATE_FAULTS = {"late key": _late_key, "kept key": _kept_key}


if __name__ == "__main__":
    main()
