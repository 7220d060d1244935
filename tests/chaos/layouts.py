"""The training step of two ranks in several layouts, on rollouts that a run has kept, with a fault and without.

    torchrun --nproc-per-node 2 tests/chaos/layouts.py RUN OUT FAULT ...

FAULT: its name, and in brackets the layout, of LAYOUTS. Each is planted on a policy that has just been built from the
run's model. Then the same step is made without it. Rank r writes OUT/layouts-rank<r>.json: of each fault what it
harmed, what was said (None: nothing), whether weights had moved, and what was said of the step without it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import torch.distributed as dist

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.errors import MoeRLError
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.step import TrainStep
from tests.chaos.plants import arm, witnesses

LAYOUTS = {
    "TP 2": ["parallel.tensor=2"],
    "CP 2": ["parallel.context=2"],
    "PP 2": ["parallel.pipeline=2", "parallel.expert=1"],
    "EP 2": [],
    "R2": ["replay.mode=r2"],
    "async": ["pipeline.mode=async", "objective.old_logprobs=sampler"],
}


def main(run: Path, out: Path, faults: list[str]) -> None:
    control, rank = Path(os.environ["CHAOS"]), int(os.environ["RANK"])
    world.join(timeout_seconds=120)
    seen = {}
    for whole in faults:
        fault, layout = re.fullmatch(r"(.*) \((.*)\)", whole).groups()
        config = load_config(run / "config.yaml", LAYOUTS[layout])
        world.lay_out(config.parallel, seed=1)
        facts = read_model(config.model.path)
        store = TraceStore(run / "trace")
        batch = KeptRollouts(run / "rollouts", store).load(1)
        policy = Policy(facts, config.train, config.parallel, config.model.path, temperature=1.0)
        step = TrainStep(config, policy, None, store, TraceSpec.of(facts))
        said = []
        for armed in (fault, ""):
            before = len(witnesses(control, fault))
            dist.barrier()
            if rank == 0:
                arm(control, armed)
            dist.barrier()
            said.append(attempt(step, batch, weight_version=config.pipeline.lag))
            if armed:
                moved, harmed = policy.updates > 0, [one.harmed for one in witnesses(control, fault)[before:]]
        seen[whole] = {"harmed": harmed, "said": said[0], "moved": moved, "sound": said[1]}
        print(f"layouts, rank {rank}: {json.dumps(seen[whole])}", flush=True)
        policy.release()
        dist.barrier()
    (out / f"layouts-rank{rank}.json").write_text(json.dumps(seen))
    world.stop()


def attempt(step: TrainStep, batch, **how) -> list[str] | None:
    """Class and message of what refused the step."""
    try:
        step.run(batch.sequences, batch.group_ids, step=1, measure_native=True, clock=Clock(), **how)
    except MoeRLError as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
