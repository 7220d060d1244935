"""Speeds of the sides as a run has measured them, for the next plan."""

import pytest

from moe_rl.errors import ConfigError
from moe_rl.report import history
from moe_rl.report.lines import read_rows, read_run, write_rows
from moe_rl.report.side_speeds import measured_speeds, read_speeds
from tests.report.conftest import metrics
from tests.support.refusals import refused


def test_speeds_are_those_of_the_last_start_for_one_gpu(synthetic_run):
    run_dir = synthetic_run(steps=5)
    assert measured_speeds(run_dir) is None  # nothing says how many ranks there were
    for after, ranks in ((0, 8), (4, 2)):
        history.record(run_dir, after=after, ranks=ranks, device="CPU", changed={}, config={})
    (run_dir / "config.yaml").open("a").write("cluster: {gpus: 2, engines: 3, gpus_per_engine: 4}\n")
    last = read_run(run_dir).train[-1]
    speeds = read_speeds(str(run_dir))
    tokens = 256 * last["rollout/completion_tokens_mean"]
    assert speeds.sampled == pytest.approx(tokens / metrics(5)["time/sample"] / 12)
    assert speeds.trained == pytest.approx(tokens / (0.01 + 0.06 + 0.9 + last["time/train"]) / 2)
    assert "1 steps" in speeds.source and str(run_dir) in speeds.source
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    idle = {"pipeline/sampler_idle_fraction": 0.75}
    write_rows(run_dir / "metrics.jsonl", [row | idle if row["step"] == 5 else row for row in rows])
    assert read_speeds(str(run_dir)).sampled == pytest.approx(4 * speeds.sampled)  # a quarter of the places was used
    nothing = {"throughput/sampled_tokens_per_second": 0.0}  # groups of an earlier process were trained on
    write_rows(run_dir / "metrics.jsonl", [row | nothing if row["step"] == 5 else row for row in rows])
    assert measured_speeds(run_dir) is None
    history.record(run_dir, after=5, ranks=2, device="CPU", changed={}, config={})
    assert measured_speeds(run_dir) is None  # no step since


def test_given_numbers_are_taken_and_others_refused(tmp_path):
    speeds = read_speeds("2900,4.4e3")
    assert (speeds.sampled, speeds.trained) == (2900, 4400)
    for wrong in ("2900", "2900,0", "2900,nan", "1,2,3", "a,b", str(tmp_path)):
        with refused(ConfigError, option="--speeds", got=wrong):
            read_speeds(wrong)
