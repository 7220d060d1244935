"""A run that is ended by fault after fault is, in the end, the run that nobody touched."""

import json

import pytest

from tests.chaos import faults
from tests.chaos.chain import ends_soon_and_is_named, run_through
from tools.dev.runs import rows

STATE = "checkpoints/step-000003/state.json"
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """(the run's folder, {fault: what came of it}, what came of a second --resume)"""
    names = [fault.name for fault in faults.of("chain")]
    run, met = run_through(tmp_path_factory.mktemp("chain"), names)
    return run, dict(zip(names, met, strict=False)), met[-1]


@pytest.mark.parametrize("fault", faults.of("chain"), ids=lambda fault: fault.name)
def test_it_ends_the_run_soon_and_is_named(chain, fault):
    run, met, _ = chain
    ends_soon_and_is_named(fault, met[fault.name], run)


def test_a_second_resume_of_a_living_run_is_refused(chain):
    run, _, second = chain
    (fault,) = faults.of("second")
    assert all(part.format(run=run) in second.said for part in fault.says)
    assert second.statuses and 1 not in second.statuses


def test_nothing_was_lost_or_doubled(chain, untouched):
    run, _, _ = chain
    assert rows(run) == rows(untouched)
    assert (run / "prompts.jsonl").read_bytes() == (untouched / "prompts.jsonl").read_bytes()
    ours, theirs = (json.loads((one / "checkpoints/step-000003/state.json").read_text()) for one in (run, untouched))
    assert ours["files"].keys() == theirs["files"].keys() and ours["pieces"] == theirs["pieces"]
    tensors = [name for name in ours["files"] if name.endswith(".safetensors")]
    assert len(tensors) + len(ours["pieces"]) > 3
    assert all(ours["files"][name] == theirs["files"][name] for name in tensors)
    left = [*run.glob("checkpoints/.*"), *run.glob("trace/.step*"), *run.glob("rollouts/*.tmp")]
    assert left == []
