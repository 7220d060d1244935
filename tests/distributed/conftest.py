"""A tiny random model, its independent reference, and the cases of the proof, each world size in one torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.proof.batch import make_checkpoint
from moe_rl.proof.cases import Case
from moe_rl.proof.matrix import Proof
from tests.support.planted import ENDING, Planted

ROOT = Path(__file__).parents[2]

EP2, CP2, TP2_EP2 = {"expert": 2}, {"context": 2}, {"tensor": 2, "expert": 2}
# The cases that `make test` runs, one or two of each kind. Every other case is `long`.
USUAL = [
    Case(2, EP2),
    Case(2, TP2_EP2, {"recompute": "uniform"}),
    Case(2, {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": "uniform"}),
    Case(2, {"context": 2, "expert": 2}, {"overlap_expert_parallel_comm": True}),
    Case(2, EP2, {"recompute": "block", "recompute_layers": 3}),
    Case(2, EP2, {"dtype": "bfloat16"}),
    Case(2, EP2, {"dtype": "bfloat16", "recompute": "moe"}),
    Case(2, TP2_EP2, {"dtype": "bfloat16"}),
    Case(2, EP2, mode="observe"),
    Case(2, TP2_EP2, mode="native"),
    Case(2, TP2_EP2, {"recompute": "uniform"}, mode="r2"),
    Case(2, TP2_EP2, plan=False),
    Case(2, TP2_EP2, {"recompute": "moe"}, overlap_chunks=1),
    Case(2, TP2_EP2, {"recompute": "moe"}, overlap_chunks=3),
    Case(2, CP2, after_failure=True),
    Planted(2, EP2, fault="swapped"),
    Planted(2, CP2, fault="swapped"),
    Planted(2, TP2_EP2, plan=False, fault="other rows read"),
    Planted(2, TP2_EP2, fault="repeated"),
    Planted(2, TP2_EP2, fault="lost key"),
    Planted(2, EP2, {"overlap_expert_parallel_comm": True}, fault="previous key"),
]


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items):
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, Case) and value not in USUAL for value in given):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def torchrun(ranks, script, *arguments, timeout=600):
    """Run a worker script under torchrun on a free port; the finished process, output captured."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--",  # what follows is not torchrun's own, also where it looks like that
        str(script),
    ]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


class Proven:
    """What the ranks saw of a case. The first case asked for runs all that this test session needs, in one go; but for
    cases that end their processes, of which each comes last in a launch."""

    def __init__(self, proof: Proof, needed: list[Case]):
        self.proof, self.needed = proof, needed
        self.seen: dict[str, list[dict]] = {}

    def ranks(self, case: Case) -> list[dict]:
        if _key(case) not in self.seen:
            together = {_key(c): c for c in (case, *self.needed) if c.ranks == case.ranks}
            together = {key: c for key, c in together.items() if key not in self.seen}
            ending = [key for key, c in together.items() if getattr(c, "fault", "") in ENDING]
            launch = [key for key in together if key not in ending] + ending[:1]
            self.seen |= dict(zip(launch, self.proof.run([together[key] for key in launch]), strict=True))
        return self.seen[_key(case)]

    def outcome(self, case: Case):
        return self.proof.judge(case, self.ranks(case))


def _key(case: Case) -> str:
    return f"{case.ranks} {case.name}"


@pytest.fixture(scope="session")
def proven(checkpoint, tmp_path_factory, request):
    proof = Proof(checkpoint, tmp_path_factory.mktemp("proof"), (str(ROOT / "tests/support/planted.py"),))
    given = (value for item in request.session.items if hasattr(item, "callspec")
             for value in item.callspec.params.values())  # fmt: skip
    return Proven(proof, [case for case in given if isinstance(case, Case)])


@pytest.fixture(scope="session")
def reference(proven):
    """reference(forced) -> what transformers computes in one process, see `proof.reference`."""
    return lambda forced: proven.proof.reference(forced=forced)
