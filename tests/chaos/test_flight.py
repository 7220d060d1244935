"""An asynchronous run whose processes are struck at each state of a group: every prompt ends exactly once."""

import json

import pytest

from tests.chaos import faults
from tests.chaos.chain import ends_soon_and_is_named, run_asynchronously_through
from tests.end_to_end.test_pipeline import proven

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def flight(tmp_path_factory):
    """(the run's folder, {fault: what came of it})"""
    names = [fault.name for fault in faults.of("flight")]
    run, met = run_asynchronously_through(tmp_path_factory.mktemp("flight"), names)
    return run, dict(zip(names, met, strict=True))


@pytest.mark.parametrize("fault", faults.of("flight"), ids=lambda fault: fault.name)
def test_whoever_is_struck_is_named_or_replaced(flight, fault):
    run, met = flight
    if fault.says:
        ends_soon_and_is_named(fault, met[fault.name], run)
    else:
        assert met[fault.name].harmed, "the fault did not happen"


def test_every_prompt_ends_once_and_no_group_is_too_old(flight):
    run, _ = flight
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, len(proven(run)) + 1))
    assert max(line["pipeline/staleness_max"] for line in trained) in (1, 2)
    assert all(line["routing/applied_mismatch"] == 0 and line["routing/coverage"] == 1 for line in trained)
    assert not list((run / "groups").iterdir())
