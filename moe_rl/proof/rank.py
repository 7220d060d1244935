"""One rank of the proof: run cases one after the other in one process group, write what was seen.

    torchrun --nproc-per-node N -m moe_rl.proof.rank CHECKPOINT OUT CASES

CASES: a JSON file with a list of the fields of `Case`. Rank r writes OUT/<number of the case>-rank<r>.pt. A case runs a
forward-only pass and an update on the fixed batch; see `proof.batch`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from moe_rl.config.hf import ModelFacts, read_model
from moe_rl.megatron import hf_map, model, world
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.witness import DispatchWitness, LayerWaits
from moe_rl.proof import faults
from moe_rl.proof.cases import Case
from moe_rl.proof.share import Share, whole_gradients


def main() -> None:
    checkpoint, out, cases = map(Path, sys.argv[1:])
    world.join(timeout_seconds=120)
    for number, fields in enumerate(json.loads(cases.read_text())):
        case = Case(**fields)
        world.lay_out(case.parallel_config, seed=1)
        torch.save(run(case, checkpoint), out / f"{number}-rank{dist.get_rank()}.pt")
        dist.barrier()
    world.stop()


def run(case: Case, checkpoint: Path) -> dict:
    """What this rank saw of one case. With a planted fault: the error it ended with, if any."""
    facts = read_model(checkpoint)
    with _computing_as_asked(case):
        policy = Policy(facts, case.train_config, case.parallel_config, checkpoint, temperature=1.0)
    try:
        return _seen(case, facts, policy)
    finally:
        policy.release()


def _seen(case: Case, facts: ModelFacts, policy: Policy) -> dict:
    share = Share(facts, case, policy)
    if case.fault != "none":
        return {"error": faults.error_of(case.fault, share)}
    witness, waits = DispatchWitness().attach(policy.chunks), LayerWaits().attach(policy.chunks)
    plans = SchedulePlans(policy.chunks)
    sessions, tables = [], None
    if case.mode == "native":
        logprobs = policy.logprobs(share.microbatches, None)
        result = policy.update(share.microbatches, None, share.loss)
    else:
        logprobs, first, tables = share.first_pass()
        if case.after_failure:
            seen = len(witness.seen)
            share.break_off(tables)
            del witness.seen[seen:]
        plans.asked = 0
        result, second = share.update(tables)
        sessions = [first, second]
    weights = hf_map.export(map(unwrap, policy.chunks), facts, dense=True, experts=True)
    return {
        "logprobs": share.by_sequence(logprobs),
        "grad_norm": result.grad_norm,
        "weights": {name: tensor.cpu().clone() for name, tensor in weights},
        "grads": whole_gradients(policy, facts),
        "tallies": [asdict(session.tally) for session in sessions],
        "dispatch": share.judge(witness) if case.mode in ("r3", "observe") else None,
        "chosen": share.chosen(tables) if case.mode == "r2" else None,
        "microbatches": len(share.microbatches),
        "layers": list(policy.layers),
        "recomputed_layers": sorted(policy.recomputed_layers),
        "schedule_plans": plans.asked,
        "waits": asdict(waits),
    }


class SchedulePlans:
    """How often a schedule asked for the parts of a forward, as combined 1F1B alone does."""

    def __init__(self, chunks: list[torch.nn.Module]):
        self.asked = 0
        for chunk in map(unwrap, chunks):
            chunk.build_schedule_plan = self._counting(chunk.build_schedule_plan)

    def _counting(self, build):
        def counted(*args, **kwargs):
            self.asked += 1
            return build(*args, **kwargs)

        return counted


@contextmanager
def _computing_as_asked(case: Case) -> Iterator[None]:
    """Megatron overlaps in bfloat16 only, and asks its config for that when it is made: that of a float32 case says so,
    and computes in float32 all the same."""
    build = model.TransformerConfig

    def as_if_bfloat16(**settings):
        config = build(**settings | {"bf16": True})
        config.bf16 = False
        return config

    if case.train.get("overlap_expert_parallel_comm") and case.train_config.dtype == "float32":
        model.TransformerConfig = as_if_bfloat16
    try:
        yield
    finally:
        model.TransformerConfig = build


if __name__ == "__main__":
    main()
