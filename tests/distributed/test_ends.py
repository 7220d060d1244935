"""A rank that is refused in the middle of a schedule ends the run, with its reason, while others wait for it."""

import time

import pytest

from tests.distributed.ranks import ROOT, torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_a_stage_that_fails_is_heard_and_its_neighbour_does_not_wait(checkpoint, tmp_path):
    """The neighbour waits in a message of the pipeline, which alone would end half an hour later."""
    config = ROOT / "configs/tiny_moe_cpu.yaml"
    began = time.monotonic()
    done = torchrun(
        *(2, ROOT / "tests/distributed/ends.py", checkpoint, "--config", config),
        *(f"run.runs_dir={tmp_path}", "parallel.pipeline=2", "parallel.expert=1"),
    )
    assert done.returncode and time.monotonic() - began < 240
    assert "planted" in done.stdout, done.stderr[-3000:]
    reason = (
        "moe_rl: rank 1: ReplayError: a layer lost the handle to its routes (update, rank 1, microbatch 0, layer 2)"
    )
    assert reason + ": got no handle" in done.stderr
    # the rank that waited has nothing to add: the one traceback is torchrun's, which names the one that was refused
    assert done.stderr.count("Traceback") == done.stderr.count("ChildFailedError(") == 1
    assert "exitcode  : 2 " in done.stderr and "rank      : 1 " in done.stderr
