"""Runs one rank of the proof: cases one after the other in one process group, and writes what it saw.

    torchrun --nproc-per-node N -m moe_rl.proof.rank CHECKPOINT OUT CASES

CASES is a JSON file with a list of the fields of `Case`. Rank r writes OUT/<number of the case>-rank<r>.pt. A case runs
a forward-only pass and an update on the fixed batch, see `proof.batch`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from moe_rl.megatron import hf_map, model, world
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.witness import DispatchWitness, LayerWaits, OrderWitness
from moe_rl.models.hf import read_model
from moe_rl.proof.cases import Case
from moe_rl.proof.trial import Trial, whole_gradients


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
    """Run one case, and return what this rank saw."""
    with begun(case, checkpoint) as trial:
        return _seen(trial)


@contextmanager
def begun(case: Case, checkpoint: Path) -> Iterator[Trial]:
    """Create a new policy in the layout of the case, with its batch; release the policy at the end."""
    facts = read_model(checkpoint)
    with computing_as_asked(case):
        policy = Policy(facts, case.train_config, case.parallel_config, checkpoint, temperature=1.0)
    try:
        yield Trial(facts, case, policy)
    finally:
        policy.release()


def _seen(trial: Trial) -> dict:
    case, policy = trial.case, trial.policy
    witness, waits = DispatchWitness().attach(policy.chunks), LayerWaits().attach(policy.chunks)
    order = OrderWitness().attach(policy.chunks)
    plans = SchedulePlans(policy.chunks)
    scored, tables = trial.first_pass()
    done = len(witness.seen)
    if case.after_failure:
        trial.break_off(tables)
        del witness.seen[done:]
    plans.asked = 0
    order.events.clear()
    result, second = trial.update(tables)
    weights = hf_map.export(map(unwrap, policy.chunks), trial.facts, dense=True, experts=True)
    return {
        "precision": model.product_precision(case.train_config.dtype),
        "logprobs": trial.by_sequence(scored.logprobs),
        "grad_norm": result.grad_norm,
        "weights": {name: tensor.cpu().clone() for name, tensor in weights},
        "grads": whole_gradients(policy, trial.facts),
        "tallies": [asdict(seen.tally) for seen in (scored.seen, second) if case.mode != "native"],
        "dispatch": trial.judge(witness) if case.mode in ("r3", "observe") else None,
        "chosen": trial.chosen(tables) if case.mode == "r2" else None,
        "microbatches": len(trial.microbatches),
        "layers": list(policy.layers),
        "recomputed_layers": sorted(policy.recomputed_layers),
        "forwards": witness.forwards(since=done),
        "fillers": sum(not microbatch.indices for microbatch in trial.microbatches),
        "schedule_plans": plans.asked,
        "delayed": plans.delayed,
        "overlapped": order.overlapped(),
        "waits": asdict(waits),
    }


class SchedulePlans:
    """Counts what only combined 1F1B does.

    Attributes:
        asked: How often a schedule asked for the parts of a forward.
        delayed: How often it asked an MoE layer for weight gradients that a backward had left out.
    """

    def __init__(self, chunks: list[torch.nn.Module]):
        self.asked = self.delayed = 0
        for chunk in map(unwrap, chunks):
            chunk.build_schedule_plan = self._counting("asked", chunk.build_schedule_plan)
            for layer in chunk.decoder.layers:
                layer.mlp.backward_dw = self._counting("delayed", layer.mlp.backward_dw)

    def _counting(self, what, method):
        def counted(*args, **kwargs):
            setattr(self, what, getattr(self, what) + 1)
            return method(*args, **kwargs)

        return counted


@contextmanager
def computing_as_asked(case: Case) -> Iterator[None]:
    """Let a float32 case use Megatron's overlap, which Megatron allows in bfloat16 only.

    Megatron checks this when its config is created. So the config is created as bfloat16 and then changed back; the
    case computes in float32.
    """

    def as_if_bfloat16(build, **settings):
        config = build(**settings | {"bf16": True})
        config.bf16 = False
        return config

    builds = {}
    if case.train.get("overlap_expert_parallel_comm") and case.train_config.dtype == "float32":
        builds = {name: getattr(model, name) for name in ("TransformerConfig", "MLATransformerConfig")}
    for name, build in builds.items():
        setattr(model, name, functools.partial(as_if_bfloat16, build))
    try:
        yield
    finally:
        for name, build in builds.items():
            setattr(model, name, build)


if __name__ == "__main__":
    main()
