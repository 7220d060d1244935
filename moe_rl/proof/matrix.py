"""Run cases on local ranks and hold what they saw against the reference."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.config.check_layout import layout_problems
from moe_rl.errors import ConfigError, ReplayError, describe
from moe_rl.models.hf import read_model
from moe_rl.proof.batch import batch
from moe_rl.proof.cases import Case
from moe_rl.proof.reference import Reference, reference

Tensors = Mapping[Any, torch.Tensor]
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case showed. Differences are the largest absolute ones over all tensors.

    gradients, logprobs: against the reference with the routes that were to be taken. free_gradients: against the
    reference that routes natively. maps: routing maps and counts of received rows seen at the dispatchers, with those
    that were not the forced ones, over the passes of all ranks; maps_with_grad of them with gradients enabled.
    """

    case: Case
    gradients: float
    logprobs: float
    free_gradients: float
    maps: int
    maps_with_grad: int
    wrong_maps: int
    wrong_received: int
    consumed: int
    expected: int


@dataclass(frozen=True, slots=True)
class Proved:
    """An outcome under replay and, for r3, its control with replay off."""

    outcome: Outcome
    control: Outcome | None

    @property
    def exact(self) -> bool:
        """Gradients equal the reference to 1e-6, no map and no received count is wrong, each route was taken once; and
        with replay off none of that holds."""
        o, c = self.outcome, self.control
        shown = o.gradients < TOLERANCE and not o.wrong_maps and not o.wrong_received and o.consumed == o.expected > 0
        fails = o.free_gradients > 1e-2 if c is None else c.gradients > 1e-2 and c.wrong_maps == c.maps > 0
        return shown and fails


class Proof:
    """The reference of one checkpoint, and the cases that were run on it."""

    def __init__(self, checkpoint: Path, folder: Path, worker: Seq[str] = ("-m", "moe_rl.proof.rank")):
        """folder: for what the ranks write. worker: what torchrun is to start on each rank, see `proof.rank`."""
        self.checkpoint, self.folder, self.worker = checkpoint, folder, worker
        self._references: dict[bool, Reference] = {}

    def run(self, cases: list[Case], *, timeout: float = 600) -> list[list[dict]]:
        """What each rank saw of each case. Cases of equal size share one process group; order is kept.

        Raises ReplayError with the end of the ranks' output when they fail.
        """
        seen: dict[int, list[dict]] = {}
        for ranks in sorted({case.ranks for case in cases}):
            numbers = [n for n, case in enumerate(cases) if case.ranks == ranks]
            out = self.folder / f"{len(list(self.folder.iterdir())):03d}-ranks{ranks}"
            out.mkdir()
            (out / "cases.json").write_text(json.dumps([dataclasses.asdict(cases[n]) for n in numbers]))
            process = _torchrun(ranks, *self.worker, self.checkpoint, out, out / "cases.json", timeout=timeout)
            if process.returncode:
                raise ReplayError(
                    describe(
                        "the ranks of a proof failed",
                        where=", ".join(cases[n].name for n in numbers),
                        got=f"status {process.returncode}: {process.stderr[-3000:]}",
                    )
                )
            for at, n in enumerate(numbers):
                files = [out / f"{at}-rank{rank}.pt" for rank in range(ranks)]
                seen[n] = [torch.load(file, weights_only=True) for file in files]
        return [seen[n] for n in range(len(cases))]

    def reference(self, *, forced: bool) -> Reference:
        """Under the batch's routes, or under the model's own."""
        if forced not in self._references:
            _, routes = batch(read_model(self.checkpoint))
            self._references[forced] = reference(self.checkpoint, routes if forced else None)
        return self._references[forced]

    def judge(self, case: Case, ranks: list[dict]) -> Outcome:
        """Hold what the ranks saw of an r3, r2, native or observe case against the reference."""
        free = self.reference(forced=False)
        if case.mode == "r2":
            wanted = reference(self.checkpoint, self._recorded(ranks))
        else:
            wanted = free if case.mode == "native" else self.reference(forced=True)
        dispatch = [rank["dispatch"] for rank in ranks if rank["dispatch"] is not None]
        gradients = merged(ranks, "grads")
        updates = [rank["tallies"][1] for rank in ranks if rank["tallies"]]
        # The r2 pass that records runs on other routers than the update: its log-probabilities prove nothing here.
        logprobs = float("nan") if case.mode == "r2" else largest(merged(ranks, "logprobs"), wanted.logprobs)
        return Outcome(
            case=case,
            gradients=largest(gradients, wanted.gradients),
            logprobs=logprobs,
            free_gradients=largest(gradients, free.gradients),
            maps=sum(d["maps"] for d in dispatch),
            maps_with_grad=sum(d["with_grad"] for d in dispatch),
            wrong_maps=sum(d["wrong_maps"] for d in dispatch),
            wrong_received=sum(d["wrong_received"] for d in dispatch),
            consumed=sum(tally["consumed"] for tally in updates),
            expected=sum(tally["expected"] for tally in updates),
        )

    def _recorded(self, ranks: list[dict]) -> list[np.ndarray]:
        """The routes that an r2 case recorded, put together from all ranks."""
        facts = read_model(self.checkpoint)
        _, routes = batch(facts)
        recorded = [np.full_like(table, 255) for table in routes]
        for rank in ranks:
            for sequence, position, layer, experts in rank["chosen"]:
                recorded[sequence][position, facts.moe_layers.index(layer)] = experts
        if any((table == 255).any() for table in recorded):
            raise ReplayError(describe("the ranks together did not record every row", expected="each row once"))
        return recorded


def prove(proof: Proof, cases: list[Case]) -> list[Proved]:
    """Run r3 cases with their controls, and r2 cases; one row for each of `cases`.

    Raises ConfigError when one of them is no layout of the proof's model.
    """
    facts = read_model(proof.checkpoint)
    problems: list[str] = []
    for case in cases:
        # The dtype in which megatron would run the schedule; the proof computes in float32 in any.
        train = case.train_config.model_copy(update={"dtype": "bfloat16"})
        problems += layout_problems(case.parallel_config, train, facts, case.ranks)
    if problems:
        raise ConfigError(problems)
    controls = [dataclasses.replace(case, mode="observe") for case in cases if case.mode == "r3"]
    seen = proof.run(cases + controls)
    outcomes = [proof.judge(case, ranks) for case, ranks in zip(cases + controls, seen, strict=True)]
    off = iter(outcomes[len(cases) :])
    return [Proved(o, next(off) if o.case.mode == "r3" else None) for o in outcomes[: len(cases)]]


def merged(ranks: list[dict], key: str) -> dict[Any, torch.Tensor]:
    """What all ranks saw together. Raises ReplayError when two that saw the same thing do not agree bit for bit."""
    out: dict[Any, torch.Tensor] = {}
    for rank in ranks:
        for name, value in rank[key].items():
            if not torch.equal(value, out.setdefault(name, value)):
                raise ReplayError(describe(f"ranks do not agree on {key}", where=str(name)))
    return out


def largest(got: Tensors, expected: Tensors) -> float:
    """Largest absolute difference over all tensors, NaN when one is. Raises ReplayError when the names differ."""
    if got.keys() != expected.keys():
        raise ReplayError(
            describe(
                "the ranks and the reference do not have the same tensors",
                got=sorted(map(str, got.keys() - expected.keys()))[:5],
                expected=sorted(map(str, expected.keys() - got.keys()))[:5],
            )
        )
    differences = [(got[name].float() - expected[name].float()).abs().max() for name in expected]
    return torch.stack(differences).max().item()  # Python's max would pass over a NaN


def _torchrun(ranks: int, *arguments, timeout: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
