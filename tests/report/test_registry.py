from __future__ import annotations

from pathlib import Path

import pytest

from moe_rl.report.registry import METRICS, check_eval, check_step, find, metrics_markdown
from tests.support.refusals import refused

DOC = Path(__file__).parents[2] / "docs/generated/metrics.md"


def test_docs_are_current():
    assert DOC.read_text(encoding="utf-8") == metrics_markdown(), "run: make generated"


def test_docs_name_every_metric():
    text = metrics_markdown()
    assert [key for key in METRICS if f"| `{key}` |" not in text] == []


def test_every_metric_explains_itself():
    assert [m.key for m in METRICS.values() if not (m.unit and m.meaning.endswith(".") and m.bad.endswith("."))] == []


@pytest.mark.parametrize("replay", [True, False])
def test_a_complete_step_passes(step_metrics, replay):
    check_step(step_metrics(1, replay, native=True), mode="r3" if replay else "off")
    check_step(step_metrics(2, replay, native=False), mode="r3" if replay else "off")


@pytest.mark.parametrize("key", ["policy_kl/k3", "routing/applied_mismatch", "routing/coverage", "time/sync"])
def test_a_missing_promised_key_is_named(step_metrics, key):
    row = step_metrics(1)
    del row[key]
    with refused(ValueError, got=(key,)):
        check_step(row, mode="r3")


def test_unknown_key_is_refused_with_the_nearest_known_one(step_metrics):
    with refused(ValueError, got=("policy_kl/k33", "policy_kl/k3")):
        check_step(step_metrics(1) | {"policy_kl/k33": 0.0}, mode="r3")


def test_replay_keys_are_refused_when_replay_is_off(step_metrics):
    with refused(ValueError, got=("routing/coverage", "replay.mode r3 or r2")):
        check_step(step_metrics(1, replay=False) | {"routing/coverage": 1.0}, mode="off")


def test_every_problem_is_told_at_once(step_metrics):
    row = step_metrics(1) | {"nonsense": 1.0, "eval/pass_rate": 0.5}
    del row["optim/lr"], row["time/train"]
    with pytest.raises(ValueError) as error:
        check_step(row, mode="r3")
    for part in (
        "nonsense",
        "eval/pass_rate belongs to an evaluation line",
        "optim/lr is missing",
        "time/train is missing",
    ):
        assert part in str(error.value)


def test_families():
    assert find("reward/part/exact") is METRICS["reward/part/<name>"]
    assert find("eval/level/carry") is METRICS["eval/level/<name>"]
    assert find("reward/part/") is None  # no name
    assert find("reward/part/<name>") is None  # the family itself is no metric
    assert find("reward/mean").unit == "reward"


def test_eval_keys(eval_metrics):
    check_eval(eval_metrics(0) | {"time/eval": 1.0})
    with refused(ValueError, got=("reward/mean",)):
        check_eval(eval_metrics(0) | {"reward/mean": 1.0})
    with refused(ValueError, got=("eval/pass_rate",)):
        check_eval({"eval/pass_rate_greedy": 0.5})
