"""Wrong routes and wrong weights that are well formed, one in each step of a run with a real engine."""

import json
import re

import pytest

from moe_rl.cli import main
from tests.chaos import faults
from tests.chaos.chain import Control
from tests.chaos.lab import WARM
from tests.chaos.plants import TAKEN_TWICE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


# The demo's batch: single experts and rows need many rows to be seen.
LARGE = ("rollout.prompts_per_step=64", "rollout.group_size=8", "train.microbatch_tokens=2048")


# The first update then has a reference policy, and a temperature that changes the logits.
FIRST = ("objective.kl_coef=0.01", "rollout.temperature=1.1")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """{name of the fault: what came of it}"""
    return run_through(tmp_path_factory.mktemp("lab"), faults.of("lab"), *FIRST)


@pytest.fixture(scope="module")
def seen_large(tmp_path_factory):
    """The same with the batch of the demo."""
    return run_through(tmp_path_factory.mktemp("large_lab"), faults.of("large lab"), *LARGE)


def run_through(folder, planted, *overrides):
    names = [fault.name for fault in planted]
    run = Control(folder).launch(folder, json.dumps(names), *overrides, ranks=1, script="tests/chaos/lab.py")
    assert run.wait() == 0, run.text()[-4000:]
    results = json.loads((folder / "lab.json").read_text())
    return {one["fault"] or f"none {one['step']}": one for one in results}


def test_sound_steps_are_not_refused(seen):
    assert all(seen[f"none {step + 1}"]["error"] is None for step in range(WARM))


@pytest.mark.parametrize("fault", faults.of("lab"), ids=lambda fault: fault.name)
def test_it_is_refused_in_its_step(seen, fault):
    refused_in_its_step(seen, fault)


def test_sound_steps_of_a_large_batch_are_not_refused(seen_large):
    test_sound_steps_are_not_refused(seen_large)


@pytest.mark.parametrize("fault", faults.of("large lab"), ids=lambda fault: fault.name)
def test_in_a_large_batch_it_is_refused_in_its_step(seen_large, fault):
    refused_in_its_step(seen_large, fault)


def refused_in_its_step(seen, fault):
    one = seen[fault.name]
    assert one["harmed"], "the fault did not happen"
    assert one["error"] is not None, "nobody said anything"
    assert not fault.error or one["error"] == fault.error, one["message"]
    assert all(part in one["message"] for part in fault.says), one["message"]
    if fault.names_harmed:
        got = one["message"].partition(": got ")[2]
        assert any(key in got for harmed in one["harmed"] for key in harmed.split()), one
    assert (one["stage"] == "sync") == (fault.soon == faults.BEFORE_SAMPLING), one["stage"]
    assert not one["moved"], "weights had moved"
    if one["stage"] == "training":
        assert "evidence is in" in one["evidence"], one["evidence"]


def test_who_was_right_is_settled_by_what_the_run_kept(seen, capsys, tmp_path):
    """Both engines are right: the trainer took the routes of a layer twice."""
    told = seen[TAKEN_TWICE]["evidence"]
    run, name = re.fullmatch(r"evidence is in (\S+)/evidence/(\S+); .*", told).groups()
    assert name.endswith("not-taken-once")
    assert main(["explain", run, "--evidence", name, "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["verdict"] == "trainer"
    assert main(["show", run]) == 0 and name in capsys.readouterr().out


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
def test_at_every_learning_rate_the_weights_that_an_engine_computes_with_are_named(tmp_path, lr):
    """The smallest updates change few bfloat16 numbers, and the largest leave no two versions alike."""
    seen = run_through(tmp_path, faults.ENGINE_WEIGHTS, f"train.optimizer.lr={lr}")
    test_sound_steps_are_not_refused(seen)
    for fault in faults.ENGINE_WEIGHTS:
        refused_in_its_step(seen, fault)
