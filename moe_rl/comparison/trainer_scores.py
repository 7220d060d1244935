"""Scores a run's rollouts with the trainer, in this process or in ranks that have the run's layout.

python -m moe_rl.comparison.trainer_scores RUN STEP VERSION CHECKPOINT FILE    a rank of the layout
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl.comparison import sources
from moe_rl.comparison.passes import Scorer
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import DataError
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.trace import TraceSpec
from moe_rl.train import run_folder
from moe_rl.train.run_folder import RunFolder

# More sequences are not compared: `ThirdEngine` computes one at a time.
_SEQUENCES = 256


class TrainerScores:
    """Holds the trainer's model and the first complete sequences of a step. All ranks make it together.

    Args:
        config: In the layout of these ranks.
        step: Of the rollouts. version: Of the weights that sampled them.
        trained: The checkpoint that scores them; None: the initial model.
    """

    def __init__(self, config: Config, run: RunFolder, step: int, version: int, trained: Path | None):
        facts = read_model(config.model.path)
        source = sources.stored(config, run, step)
        self.source = replace(source, sequences=source.sequences[:_SEQUENCES])
        self._config, self._version, self._spec = config, version, TraceSpec.of(facts)
        self._policy = Policy(
            facts, config.train, config.parallel, config.model.path, temperature=config.rollout.temperature
        )
        if (path := trained or sources.initial(config).path) is not None:
            checkpoint.load_weights(path, self._policy)

    def of(self, microbatch_tokens: int) -> list[np.ndarray]:
        """Return the log-probabilities [N] of each completion, with the run's use of routes, packed in this size."""
        sequences = self.source.sequences
        scorer = Scorer(
            self._config, self._policy, self.source.store, self._spec, sequences, self._version, microbatch_tokens
        )
        replays = self._config.replay.mode != "off"
        forward, _ = scorer.run("replay" if replays else "observe", "bisection")
        return np.split(forward.logprobs, np.cumsum(scorer.owners.lengths)[:-1])


def in_layout(
    config: Config, run: RunFolder, step: int, version: int, trained: Path | None, ranks: int, out: Path
) -> list[np.ndarray]:
    """Return `TrainerScores.of` as computed by as many ranks as the run's layout needs.

    Raises:
        DataError: A rank failed.
    """
    file, log = out / "layout.npz", out / "layout.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += [__name__, *map(str, (run.path, step, version, trained or "-", file))]
    with log.open("wb") as stream:
        status = subprocess.run(command, stdout=stream, stderr=stream, check=False).returncode
    if status:
        raise DataError(
            "the ranks of the run's layout could not score its rollouts", where={"log": log}, got=f"status {status}"
        )
    with np.load(file) as arrays:
        return [arrays[f"arr_{index}"] for index in range(len(arrays))]


def _main(run: str, step: str, version: str, trained: str, file: str) -> None:
    folder = run_folder.existing(Path(run), "RUN")
    config = load_config(folder.config)
    world.start(config.parallel, seed=config.run.seed, timeout_seconds=3600)
    try:
        scores = TrainerScores(config, folder, int(step), int(version), None if trained == "-" else Path(trained))
        logprobs = scores.of(config.train.microbatch_tokens)
        if dist.get_rank() == 0:
            np.savez(file, *logprobs)
    finally:
        world.stop()


if __name__ == "__main__":
    _main(*sys.argv[1:])
