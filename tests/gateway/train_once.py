"""Trains one step on a batch that a folder keeps, as the only rank, and writes what it measured.

    python train_once.py FOLDER

FOLDER has config.yaml, trace, and rollouts with the batch of step 1. FOLDER/seen.json gets the step's metrics, its
number of microbatches, and the trainer's log-probabilities and the advantages of each sequence.
"""

import json
import sys
from pathlib import Path

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.step import TrainStep


def main(folder: Path) -> None:
    config, store = load_config(folder / "config.yaml"), TraceStore(folder / "trace")
    facts = read_model(config.model.path)
    batch = KeptRollouts(folder / "rollouts", store).load(1)
    world.start(config.parallel, seed=1, timeout_seconds=120)
    policy = Policy(facts, config.train, config.parallel, config.model.path, temperature=config.rollout.temperature)
    step = TrainStep(config, policy, None, store, TraceSpec.of(facts))
    keys, microbatches = [sequence.key for sequence in batch.sequences], []
    divide = step.shares.divide

    def divided(*given):
        shares, metrics = divide(*given)
        microbatches.extend(work for share in shares for work in share.work)
        return shares, metrics

    step.shares.divide = divided
    metrics = step.run(
        batch.sequences,
        batch.group_ids,
        step=1,
        weight_version=0,
        measure_native=False,
        clock=Clock(),
        samples=keys,
    )
    logprobs = {key: next(view.logprobs for view in views if view.logprobs) for key, views in step.views.items()}
    advantages = {key: next(view.advantages for view in views if view.advantages) for key, views in step.views.items()}
    seen = {"metrics": metrics, "logprobs": logprobs, "advantages": advantages, "microbatches": len(microbatches)}
    (folder / "seen.json").write_text(json.dumps(seen))
    world.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
