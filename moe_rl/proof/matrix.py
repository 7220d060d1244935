"""Runs cases on local ranks, and compares what the ranks saw with the reference."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.config.layout import layout_problems
from moe_rl.config.passed_on import setting_problems
from moe_rl.config.passed_together import combination_problems
from moe_rl.errors import ConfigError, Problem, ReplayError
from moe_rl.models.hf import read_model
from moe_rl.parent import kill_marked, mark_children, torchrun
from moe_rl.proof.batch import batch
from moe_rl.proof.cases import Case
from moe_rl.proof.precision import Precision, Tf32
from moe_rl.proof.reference import Reference, reference

Tensors = Mapping[Any, torch.Tensor]
# Ranks of float32 add up in other orders than the reference. The largest difference of a layout is 2.8e-7.
_FLOAT32 = 1e-6
# Other precisions: how many times the difference may be that which their rounding makes in the reference itself.
_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the results of one case. Differences are the largest absolute differences over all tensors.

    Attributes:
        gradients, logprobs: Difference from the reference that takes the same routes.
        free_gradients: Difference from the reference that routes natively.
        tolerance: Difference of gradients that rounding explains, see `Proof.tolerance`.
        maps: Routing maps seen at the dispatchers, over the passes of all ranks.
        maps_with_grad: Number of these maps seen with gradients enabled.
        wrong_maps: Number of these maps that differ from the forced routes.
        wrong_received: Counts of received rows that differ from the forced routes.
        consumed, expected: How often routes were taken in the update, and should be.
    """

    case: Case
    gradients: float
    logprobs: float
    free_gradients: float
    tolerance: float
    maps: int
    maps_with_grad: int
    wrong_maps: int
    wrong_received: int
    consumed: int
    expected: int


@dataclass(frozen=True, slots=True)
class Proved:
    """Holds an outcome under replay, with its control without replay (for r3)."""

    outcome: Outcome
    control: Outcome | None

    @property
    def exact(self) -> bool:
        """Return whether replay is exact and the control is not.

        Exact means: gradients equal the reference within the tolerance, no map and no received count is wrong, and each
        route was taken once. Without replay, gradients must differ by more than 1e-2 and twice the tolerance, and all
        maps must be wrong.
        """
        o, c, apart = self.outcome, self.control, max(1e-2, 2 * self.outcome.tolerance)
        shown = o.gradients < o.tolerance and not o.wrong_maps and not o.wrong_received and o.consumed == o.expected > 0
        fails = o.free_gradients > apart if c is None else c.gradients > apart and c.wrong_maps == c.maps > 0
        return shown and fails


class Proof:
    """Runs cases on one checkpoint and compares them with its reference."""

    def __init__(self, checkpoint: Path, folder: Path):
        """Args: `folder` receives the ranks' files, see `proof.rank`."""
        self.checkpoint, self.folder = checkpoint, folder
        self._references: dict[bool, Reference] = {}
        self._tolerances: dict[Precision, float] = {"float32": _FLOAT32}

    def run(self, cases: list[Case], *, timeout: float = 600) -> list[list[dict]]:
        """Return what each rank saw of each case, in the order of the cases. Cases with equal rank counts share a
        process group.

        Raises:
            ReplayError: The ranks failed, or did not end in `timeout` seconds. The message has the end of their output.
        """
        by_case: dict[int, list[dict]] = {}
        for ranks in sorted({case.ranks for case in cases}):
            numbers = [n for n, case in enumerate(cases) if case.ranks == ranks]
            out = self.folder / f"{len(list(self.folder.iterdir())):03d}-ranks{ranks}"
            out.mkdir()
            (out / "cases.json").write_text(json.dumps([dataclasses.asdict(cases[n]) for n in numbers]))
            process = _torchrun(ranks, self.checkpoint, out, out / "cases.json", timeout=timeout)
            if process.returncode:
                raise ReplayError(
                    "the ranks of a proof failed",
                    where={"case": ", ".join(cases[n].name for n in numbers)},
                    got=f"status {process.returncode}: {process.stderr[-3000:]}",
                )
            for index, n in enumerate(numbers):
                files = [out / f"{index}-rank{rank}.pt" for rank in range(ranks)]
                by_case[n] = [torch.load(file, weights_only=True) for file in files]
        return [by_case[n] for n in range(len(cases))]

    def reference(self, *, forced: bool) -> Reference:
        """Return the reference under the batch's routes, or under the model's own."""
        if forced not in self._references:
            _, routes = batch(read_model(self.checkpoint))
            self._references[forced] = reference(self.checkpoint, routes if forced else None)
        return self._references[forced]

    def tolerance(self, precision: Precision) -> float:
        """Return how far a correct gradient may be from that of the reference, which is float32 on a CPU.

        For less exact products it is derived: the reference is computed once more with their rounding.
        """
        if precision not in self._tolerances:
            exact = self.reference(forced=True)
            _, routes = batch(read_model(self.checkpoint))
            if precision == "tf32":
                with Tf32():
                    rounded = reference(self.checkpoint, routes)
            else:
                rounded = reference(self.checkpoint, routes, dtype=torch.bfloat16)
            self._tolerances[precision] = _MARGIN * largest(rounded.gradients, exact.gradients)
        return self._tolerances[precision]

    def judge(self, case: Case, ranks: list[dict]) -> Outcome:
        """Compare what the ranks saw of a case with the reference."""
        free = self.reference(forced=False)
        if case.mode == "r2":
            wanted = reference(self.checkpoint, self._recorded(ranks))
        else:
            wanted = free if case.mode == "native" else self.reference(forced=True)
        dispatch = [rank["dispatch"] for rank in ranks if rank["dispatch"] is not None]
        gradients = merged(ranks, "grads")
        updates = [rank["tallies"][1] for rank in ranks if rank["tallies"]]
        # In r2, the recording pass runs with other routers than the update, so its logprobs prove nothing here.
        logprobs = float("nan") if case.mode == "r2" else largest(merged(ranks, "logprobs"), wanted.logprobs)
        return Outcome(
            case=case,
            gradients=largest(gradients, wanted.gradients),
            logprobs=logprobs,
            free_gradients=largest(gradients, free.gradients),
            tolerance=self.tolerance(ranks[0]["precision"]),
            maps=sum(d["maps"] for d in dispatch),
            maps_with_grad=sum(d["with_grad"] for d in dispatch),
            wrong_maps=sum(d["wrong_maps"] for d in dispatch),
            wrong_received=sum(d["wrong_received"] for d in dispatch),
            consumed=sum(tally["consumed"] for tally in updates),
            expected=sum(tally["expected"] for tally in updates),
        )

    def _recorded(self, ranks: list[dict]) -> list[np.ndarray]:
        """Combine the routes that all ranks of an r2 case recorded."""
        facts = read_model(self.checkpoint)
        _, routes = batch(facts)
        recorded = [np.full_like(table, 255) for table in routes]
        for rank in ranks:
            for sequence, position, layer, experts in rank["chosen"]:
                recorded[sequence][position, facts.moe_layers.index(layer)] = experts
        if any((table == 255).any() for table in recorded):
            raise ReplayError("the ranks together did not record every row", expected="each row once")
        return recorded


def prove(proof: Proof, cases: list[Case]) -> list[Proved]:
    """Run `cases`, and a control for each r3 case; return one row for each of `cases`.

    Raises:
        ConfigError: A case is not a valid layout of the proof's model.
    """
    facts = read_model(proof.checkpoint)
    problems: list[Problem] = []
    for case in cases:
        # Check with the dtype that Megatron needs for the schedule; the proof always computes in float32.
        train = case.train_config.model_copy(update={"dtype": "bfloat16"})
        problems += layout_problems(case.parallel_config, train, facts, case.ranks)
        for mapping, settings in (("megatron", train.megatron), ("megatron_optimizer", train.megatron_optimizer)):
            for name, value in settings.items():
                problems += setting_problems(f"train.{mapping}", name, value, recompute=train.recompute)
        problems += combination_problems(case.train_config, case.parallel_config, facts)
    if problems:
        raise ConfigError(problems)
    controls = [dataclasses.replace(case, mode="observe") for case in cases if case.mode == "r3"]
    results = proof.run(cases + controls)
    outcomes = [proof.judge(case, ranks) for case, ranks in zip(cases + controls, results, strict=True)]
    off = iter(outcomes[len(cases) :])
    return [Proved(o, next(off) if o.case.mode == "r3" else None) for o in outcomes[: len(cases)]]


def merged(ranks: list[dict], key: str) -> dict[Any, torch.Tensor]:
    """Combine what all ranks saw. Raises ReplayError if two ranks saw the same thing with different bits."""
    out: dict[Any, torch.Tensor] = {}
    for rank in ranks:
        for name, value in rank[key].items():
            if not torch.equal(value, out.setdefault(name, value)):
                raise ReplayError(f"two ranks have different values of {key}", where={"case": name})
    return out


def largest(got: Tensors, expected: Tensors) -> float:
    """Return the largest absolute difference over all tensors; NaN if any is NaN. Raises ReplayError if the names
    differ."""
    if got.keys() != expected.keys():
        raise ReplayError(
            "the ranks and the reference do not have the same tensors",
            got=sorted(map(str, got.keys() - expected.keys()))[:5],
            expected=sorted(map(str, expected.keys() - got.keys()))[:5],
        )
    differences = [(got[name].float() - expected[name].float()).abs().max() for name in expected]
    return torch.stack(differences).max().item()  # Python's max would ignore a NaN


def _torchrun(ranks: int, *arguments, timeout: float) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    mark = mark_children(environment)
    command = [*torchrun(ranks), "-m", "moe_rl.proof.rank", *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        raise ReplayError(
            "the ranks of a proof did not end",
            got=f"{ranks} ranks after {timeout:g} s",
            do="prove fewer cases at once, with --ranks or a layout of your own, or use a machine that does less else",
        ) from None
    finally:
        kill_marked(mark)  # torchrun is killed at once, and leaves its ranks
