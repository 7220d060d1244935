"""Trains once on the kept rollouts of a run with each of many rows, in one process a rank.

    torchrun --nproc-per-node 2 benchmarks/pair_parts/on_kept.py RUN_DIR ROWS OUT

ROWS is a file with the config and the overrides of each row: [[FILE, [OVERRIDE, ...]], ...]. The model of the rank is
made once, so the rows must not differ in it. OUT gets a line for each row that has ended: its loss and gradient norm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.megatron import world
from moe_rl.megatron.frozen_policy import ReferencePolicy
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step import TrainStep


def main(run: Path, rows: Path, out: Path) -> None:
    configs = [load_config(file, overrides) for file, overrides in json.loads(rows.read_text())]
    first, folder = configs[0], RunFolder(run)
    world.start(first.parallel, seed=first.run.seed, timeout_seconds=300)
    facts, store = read_model(first.model.path), TraceStore(folder.trace)
    build = (facts, first.train, first.parallel, first.model.path)
    policy = Policy(*build, temperature=first.rollout.temperature)
    reference = None
    if any(config.objective.kl_coef for config in configs):
        reference = ReferencePolicy(*build, temperature=first.rollout.temperature)
    kept = KeptRollouts(folder.rollouts, store)
    step = kept.steps()[-1]
    batch = kept.load(step)
    for number, config in enumerate(configs):
        needed = reference if config.objective.kl_coef else None
        every = config.replay.native_every
        metrics = TrainStep(config, policy, needed, store, TraceSpec.of(facts)).run(
            batch.sequences,
            batch.group_ids,
            step=step,
            weight_version=step - 1,
            measure_native=every > 0 and number % every == 0,
            clock=Clock(),
            samples=[sample.key for sample in batch.samples],
        )
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({key: metrics[key] for key in sorted(metrics)}) + "\n")
    dist.barrier()
    world.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
