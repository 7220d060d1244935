"""A run of one rank and a real engine, with one fault in each step but the first ones, and what was said of each.

    torchrun --nproc-per-node 1 tests/chaos/lab.py OUT FAULT ...

The loop is the shipped one. Step 1 trains on its batch with each fault of FIRST armed, then without any. Step WARM + n
begins with fault n of the others armed. When somebody refuses it, that is noted, the fault is taken away and the step
goes on as it would have: one start of vLLM shows many faults. OUT/lab.json holds for each fault its step, what it
harmed, the error's class, message (None: nobody said anything) and notes, where it was refused, the seconds until then,
and whether weights had moved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from moe_rl.config.load import load_config
from moe_rl.errors import MoeRLError
from moe_rl.megatron import world
from moe_rl.rollout import rollouts
from moe_rl.rollout.kept import shard_step
from moe_rl.rollout.sampler import Blocking
from moe_rl.train import loop
from moe_rl.train.keep_evidence import Concerned
from moe_rl.train.run_inputs import read_inputs
from moe_rl.train.trainer import Trainer
from moe_rl.weights.sender import WeightSender
from tests.chaos.plants import BY_DISK, FIRST, FORGET, arm, witnesses
from tests.support.task import task_of

WARM = 2
"""Steps without a fault, in which nobody may say anything."""


class Lab(Trainer):
    """A trainer that takes a fault away once it was refused, and goes on."""

    control: Path
    first: list[str]
    faults: list[str]
    results: list[dict[str, object]]

    def __init__(self, *args):
        super().__init__(*args)
        self._step, self._began, self._noted, self._at_first = 0, 0.0, True, ""
        self._learn, self.train_step.run = self.train_step.run, self._run

    def sample(self, step, clock):
        self._step, self._began, self._noted = step, time.monotonic(), False
        arm(self.control, self.fault)
        self._before = self._weights()
        try:
            return super().sample(step, clock)
        except MoeRLError as error:
            self._note(error, "sampling")
            return self._again(clock)

    def _run(self, sequences, group_ids, **how):
        if self._step == 1:
            self._before_first_update(sequences, group_ids, **how)
        try:
            return self._judged(sequences, group_ids, **how)
        except MoeRLError as error:
            self._note(error, "training")
            batch = self._again(how["clock"])
            return self._learn(batch.sequences, batch.group_ids, **how)

    def _before_first_update(self, sequences, group_ids, **how):
        for fault in self.first:
            self._at_first, self._noted, refusal = fault, False, None
            arm(self.control, fault)
            try:
                self._judged(sequences, group_ids, **how)
            except MoeRLError as error:
                refusal = error
            self._note(refusal, "training")
        self._at_first, self._noted = "", False

    def _judged(self, sequences, group_ids, **how):
        concerned = [Concerned.of(one) for one in sequences]
        with self.evidence.of(self._step, self._step - 1, lambda: concerned, lambda: self.train_step.work):
            return self._learn(sequences, group_ids, **how)

    def sync(self, version):
        sender = self.sender
        try:
            if self.fault == BY_DISK:
                self.sender = WeightSender(self.policy, self.config.rollout, self.folder.sync, world, way="disk")
                self.sender._held = sender._held
            return super().sync(version)
        except MoeRLError as error:
            self.sender = sender
            self._note(error, "sync")
            if not self.main.rollouts.engine.sampler.alive():
                self._restart()
            return self._sent_anew(version)

    def finish(self, *args):
        if not self._noted:
            self._note(None, "")
        return super().finish(*args)

    @property
    def fault(self) -> str:
        if self._at_first:
            return self._at_first
        at = self._step - WARM - 1
        return self.faults[at] if 0 <= at < len(self.faults) else ""

    def _note(self, error: MoeRLError | None, stage: str) -> None:
        if self._noted and error is not None:
            raise error  # of the step without its fault
        fault, self._noted = self.fault, True
        arm(self.control, "")
        self.results.append(
            {
                "fault": fault,
                "step": self._step,
                "harmed": [one.harmed for one in witnesses(self.control, fault)],
                "error": error and type(error).__name__,
                "message": error and str(error),
                "evidence": "; ".join(getattr(error, "__notes__", [])),
                "stage": stage,
                "seconds": time.monotonic() - self._began,
                "moved": stage != "sync" and self._weights() != self._before,
            }
        )
        print(f"lab: {json.dumps(self.results[-1])}", flush=True)

    def _again(self, clock):
        """Sample the step once more, as if it had not been."""
        step, main = self._step, self.main
        if not main.rollouts.engine.sampler.alive():
            self._restart()
            self._sent_anew(step - 1)
        main.rollouts.ledger.rewind(step - 1)
        for shard in self.store.shards():
            if shard_step(shard) == step:
                self.store.remove(shard)
        return super().sample(step, clock)

    def _sent_anew(self, version: int):
        """To an engine that has forgotten what it held."""
        self.sender._held = 0
        arm(self.control, FORGET)
        try:
            return super().sync(version)
        finally:
            arm(self.control, "")

    def _restart(self) -> None:
        own = self.main.rollouts
        own.engine.close()
        sampler = rollouts.start_sampler(self.config, self.facts, self.folder.path)
        own.rollouts.sampler, own.engine = sampler, Blocking(sampler)

    def _weights(self) -> int:
        total = 0.0
        for chunk in self.policy.chunks:
            for parameter in chunk.parameters():
                total += parameter.detach().double().abs().sum().item()
        return total


def main(out: Path, faults: list[str], overrides: list[str]) -> None:
    Lab.control, Lab.results = Path(os.environ["CHAOS"]), []
    Lab.first, Lab.faults = ([one for one in faults if (one in FIRST) is first] for first in (True, False))
    loop.Trainer = Lab
    torch.set_num_threads(1)
    config = load_config(
        Path("configs/tiny_moe_cpu.yaml"),
        [
            f"run.runs_dir={out}", f"run.steps={WARM + len(Lab.faults)}", "parallel.expert=1",
            "rollout.kv_cache_mib=64", "rollout.prompts_per_step=16", "rollout.group_size=4", "eval.prompts=16",
            "eval.every_steps=1000", "checkpoint.every_steps=1000", "replay.native_every=1",
            "guards.collapse_steps=0", "run.seed=5", "train.microbatch_tokens=256",
            *overrides,
        ],
    )  # fmt: skip
    try:
        loop.train(config, None, task := task_of(config), read_inputs(config, task))
    finally:
        (out / "lab.json").write_text(json.dumps(Lab.results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
