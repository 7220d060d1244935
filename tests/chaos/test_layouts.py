"""A wrong route in every layout of two ranks, and in R2."""

import json

import pytest

from tests.chaos import faults
from tests.chaos.chain import Control

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def seen(untouched, tmp_path_factory):
    """[what each rank saw: {name of the fault: what came of it}]"""
    folder = tmp_path_factory.mktemp("layouts")
    names = json.dumps([fault.name for fault in faults.of("layouts")])
    run = Control(folder).launch(untouched, folder, names, script="tests/chaos/layouts.py")
    assert run.wait() == 0, run.text()[-4000:]
    return [json.loads((folder / f"layouts-rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("fault", faults.of("layouts"), ids=lambda fault: fault.name)
def test_it_is_refused_on_both_ranks(seen, fault):
    for one in (rank[fault.name] for rank in seen):
        assert one["harmed"], "the fault did not happen"
        assert one["said"] is not None, "nobody said anything"
        error, message = one["said"]
        assert not fault.error or error == fault.error, message
        assert all(part in message for part in fault.says), message
        if fault.names_harmed:
            got = message.partition(": got ")[2]
            assert any(key in got for harmed in one["harmed"] for key in harmed.split()), one
        assert not one["moved"], "weights had moved"
        assert one["sound"] is None, one["sound"]
