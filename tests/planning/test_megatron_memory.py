"""Compares planned groups, and bytes of parameters, gradients and optimizer, with megatron's, rank by rank, exactly."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from moe_rl.config.layout import chunk_layers, make_layout
from moe_rl.planning.memory import main_grad_bytes, optimizer_bytes, parameter_bytes
from moe_rl.planning.parameters import chunk_buffers
from tests.planning.meta_cases import ROOT, cases

pytestmark = pytest.mark.timeout(300)
USUAL = ("glm, stages in runs", "deepseek", "tied, float32")


@pytest.fixture(scope="module")
def built(request):
    """(case, rank) -> what megatron built there, for all cases that are tested, in one process."""
    tested = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    run = subprocess.run(
        [sys.executable, "-m", "tests.planning.meta_worker", *(case.name for case in tested)],
        cwd=ROOT, text=True, timeout=280, check=False, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = iter(json.loads(run.stdout))
    return {(case.name, rank): next(found) for case in tested for rank in case.ranks}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in USUAL else pytest.mark.long) for case in cases()],
)
def test_bytes_are_megatrons(built, case):
    layout = make_layout(case.parallel, case.facts, case.world_size)
    stage_ranks = case.world_size // layout.pipeline
    for rank in case.ranks:
        theirs = built[case.name, rank]
        assert theirs["groups"].items() <= asdict(layout).items()
        runs = chunk_layers(case.facts, case.parallel)[rank // stage_ranks]
        buffers = [buffer for run in runs for buffer in chunk_buffers(case.facts, layout, run)]
        assert sum(buffer.elements for buffer in buffers) == theirs["elements"]
        assert parameter_bytes(buffers, case.train) == theirs["parameters"]
        assert main_grad_bytes(buffers, case.train) == theirs["gradients"]
        # Adam makes its two moments in float32, of what it steps on, in its first step.
        state = optimizer_bytes(buffers, case.train, stage_ranks)[rank % stage_ranks]
        assert state == 8 * theirs["stepped_on"] + theirs["masters"]
        assert (theirs["masters"] > 0) == (case.train.dtype == "bfloat16")
