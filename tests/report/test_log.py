from __future__ import annotations

import json
import os
import re

import pytest

from moe_rl.errors import DiskError, MoeRLError
from moe_rl.report.lines import encode, read_run
from moe_rl.report.log import RunLog
from tests.support.refusals import refused


def rows(path):
    """The lines as they are, without their checksums."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row.pop("checksum") for row in found)
    return found


@pytest.fixture
def log_of(tmp_path):
    opened = []

    def make(**options):
        log = RunLog(tmp_path, **({"total_steps": 40, "mode": "r3"} | options))
        opened.append(log)
        return log

    yield make
    for log in opened:
        log.close()


def test_lines_hold_exactly_what_was_logged(log_of, tmp_path, step_metrics, eval_metrics):
    log = log_of()
    log.eval_row(0, eval_metrics(0))
    log.step(1, step_metrics(1))
    first, second = rows(tmp_path / "metrics.jsonl")  # before close: each line is flushed
    assert first == {"step": 0, "kind": "eval", **eval_metrics(0)}
    assert second == {"step": 1, "kind": "train", **step_metrics(1)}
    assert type(second["routing/consumed"]) is int


def test_nonfinite_values_are_null_and_named(log_of, tmp_path, step_metrics):
    log_of().step(1, step_metrics(1) | {"reward/mean": float("nan"), "optim/grad_norm": float("inf")})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["reward/mean"] is None and row["optim/grad_norm"] is None
    assert sorted(row["nonfinite"]) == ["optim/grad_norm", "reward/mean"]
    assert row["reward/pass_rate"] == step_metrics(1)["reward/pass_rate"]


def test_a_metric_that_is_no_number_is_refused(step_metrics):
    with refused(ValueError, metric="objective/loss"):
        encode(1, "train", step_metrics(1) | {"objective/loss": "low"})


def test_numpy_scalars_are_numbers(step_metrics):
    import numpy as np

    row = json.loads(encode(1, "train", {"reward/mean": np.float32(0.5), "routing/consumed": np.int64(7)}))
    assert row.pop("checksum") and row == {"step": 1, "kind": "train", "reward/mean": 0.5, "routing/consumed": 7}


def test_console_line(log_of, capsys, step_metrics):
    row = step_metrics(3) | {
        "reward/mean": 0.4125,
        "reward/pass_rate": 0.375,
        "rollout/completion_tokens_mean": 20.0,
        "policy_kl/k3": 1.24e-3,
        "routing/shadow_mismatch": 0.0312,
        "routing/consumed": 1536,
        "routing/expected": 1536,
        "objective/clip_fraction": 0.125,
        "optim/grad_norm": 0.4321,
        "time/step": 8.0,
    }
    log_of().step(3, row)
    header, line = capsys.readouterr().out.splitlines()
    cells = dict(zip(re.split(r"\s{2,}", header.strip()), line.split(), strict=True))
    assert cells == {
        "step": "3/40",
        "reward": "0.412",
        "pass": "37.5%",
        "len": "20.0",
        "kl k3": "1.2e-03",
        "shadow%": "3.12",
        "applied": "0",
        "routes taken": "1536/1536",
        "clip%": "12.50",
        "grad": "0.432",
        "sec": "8.00",
        "tok/s": "640",  # 256 sequences x 20 tokens / 8 s
        "eta": "4m56s",  # 37 steps x 8 s
    }


def test_console_is_aligned_and_the_header_returns(log_of, capsys, step_metrics):
    log = log_of()
    for step in range(1, 23):
        log.step(step, step_metrics(step))
    lines = capsys.readouterr().out.splitlines()
    assert [index for index, line in enumerate(lines) if "kl k3" in line] == [0, 21]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 130


def test_console_without_replay_has_no_replay_columns(log_of, capsys, step_metrics):
    log = log_of(mode="off")
    log.step(1, step_metrics(1, replay=False, native=True) | {"routing/native_mismatch": 0.0625})
    log.step(2, step_metrics(2, replay=False))
    header, measured, unmeasured = capsys.readouterr().out.splitlines()
    assert "native%" in header and "applied" not in header and "shadow" not in header
    column = header.split().index("native%") - 1  # "kl k3" are two words
    assert (measured.split()[column], unmeasured.split()[column]) == ("6.25", "-")


def test_a_failed_step_still_prints(log_of, capsys, step_metrics):
    log_of().step(
        1,
        step_metrics(1) | {"reward/mean": float("nan"), "optim/grad_norm": float("nan"), "policy_kl/k3": float("inf")},
    )
    assert {"nan", "inf"} <= set(capsys.readouterr().out.splitlines()[1].split())


def test_eval_and_notes_print_one_line(log_of, capsys):
    log = log_of()
    log.note("starting the sampler")
    with log.phase("sample"):
        rates = {"eval/pass_rate_greedy": 0.625, "eval/level/carry": 0.25, "eval/pass_at/sums/4": 0.75}
        log.eval_row(10, {"eval/pass_rate": 0.5, "eval/low/pass_rate": 0.4} | rates)
    assert capsys.readouterr().out.splitlines() == [
        "starting the sampler",
        "held-out after step 10: pass 50.0%, greedy 62.5%, sums pass@4 75.0% (carry 25%)",
    ]


@pytest.mark.parametrize("step", [0, 2, 41])
def test_steps_out_of_order_are_refused_and_not_written(log_of, tmp_path, step_metrics, step):
    log = log_of()
    log.step(2, step_metrics(2))
    with refused(ValueError, fault="order"):
        log.step(step, step_metrics(1))
    assert len(rows(tmp_path / "metrics.jsonl")) == 1


def test_a_refused_step_is_not_written(log_of, tmp_path, step_metrics):
    with refused(ValueError, got=("made/up",)):
        log_of().step(1, step_metrics(1) | {"made/up": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rewind_drops_later_lines_and_continues(log_of, tmp_path, step_metrics, eval_metrics):
    log = log_of()
    log.eval_row(0, eval_metrics(0))
    for step in range(1, 6):
        log.step(step, step_metrics(step))
    log.eval_row(5, eval_metrics(5))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert log.evaluation(5) == eval_metrics(5)
    log.rewind(4)
    assert log.evaluation(5) is None and log.evaluation(0) == eval_metrics(0)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:4]  # bitwise: floats survive
    log.step(4, step_metrics(4))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:5]


def test_a_log_is_continued_by_a_new_process(log_of, tmp_path, step_metrics):
    log_of().step(1, step_metrics(1))
    again = log_of()
    with refused(ValueError, fault="order"):
        again.step(1, step_metrics(1))
    again.step(2, step_metrics(2))
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_is_dropped_and_told(log_of, tmp_path, capsys, step_metrics, cut):
    path = tmp_path / "metrics.jsonl"
    whole = encode(1, "train", step_metrics(1))
    torn = encode(2, "train", step_metrics(2))[:cut]
    path.write_text(whole + torn)
    assert read_run(tmp_path).torn  # the witness: a reader sees the tear
    log = log_of()
    assert "dropped an incomplete last line" in capsys.readouterr().out
    assert path.read_text() == whole
    log.step(2, step_metrics(2))
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_whole_last_line_without_newline_is_kept(log_of, tmp_path, step_metrics):
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode(1, "train", step_metrics(1)).rstrip("\n"))
    log_of().step(2, step_metrics(2))
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_damage_before_the_last_line_is_an_error_that_names_it(log_of, tmp_path, step_metrics):
    lines = [encode(step, "train", step_metrics(step)) for step in (1, 2, 3)]
    lines[1] = lines[1][:50] + "\n"
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with refused(MoeRLError, file=tmp_path / "metrics.jsonl", line=2):
        log_of()


def test_a_digit_that_is_changed_is_an_error_that_names_the_line(log_of, tmp_path, step_metrics, eval_metrics):
    path = tmp_path / "metrics.jsonl"
    lines = [encode(0, "eval", eval_metrics(0)), *(encode(step, "train", step_metrics(step)) for step in (1, 2, 3))]
    digits = [at for at, one in enumerate(lines[2]) if one.isdigit()]
    assert len(digits) > 100
    for at in digits[:: len(digits) // 40]:
        changed = lines[2][:at] + str((int(lines[2][at]) + 1) % 10) + lines[2][at + 1 :]
        path.write_text("".join([*lines[:2], changed, lines[3]]))
        with refused(MoeRLError, file=path, line=3):
            read_run(tmp_path)
    with refused(MoeRLError, file=path, line=3):
        log_of()


def test_a_line_without_a_checksum_is_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "train", "reward/mean": 0.5}) + "\n")
    assert read_run(tmp_path).train == [{"step": 1, "kind": "train", "reward/mean": 0.5}]


def test_a_line_that_lost_its_checksum_is_refused(tmp_path, step_metrics):
    lines = [encode(step, "train", step_metrics(step)) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join([lines[0], lines[1].replace('"checksum"', '"chccksum"')]))
    with refused(MoeRLError, line=2):
        read_run(tmp_path)


def test_lost_lines_are_told_at_a_resume(log_of, tmp_path, capsys, step_metrics):
    lines = [encode(step, "train", step_metrics(step)) for step in (1, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    log_of().rewind(5)
    assert "the lines of 1 steps are lost; the report will lack them: 2" in capsys.readouterr().out
    log_of().rewind(2)
    assert "are lost" not in capsys.readouterr().out


def test_a_crash_during_rewind_leaves_the_old_log(log_of, tmp_path, monkeypatch, step_metrics):
    log = log_of()
    for step in (1, 2, 3):
        log.step(step, step_metrics(step))
    before = (tmp_path / "metrics.jsonl").read_text()
    fired = []

    def die(*paths):
        fired.append(paths)
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", die)
    with refused(DiskError, file=tmp_path / "metrics.jsonl", got=("killed",)):
        log.rewind(2)
    assert fired and (tmp_path / "metrics.jsonl").read_text() == before


def test_a_rate_of_no_verified_completion_is_no_number(log_of, capsys, eval_metrics):
    log_of().eval_row(0, eval_metrics(0) | {"eval/pass_rate": float("nan")})
    said = capsys.readouterr().out
    assert "pass -" in said and "nan" not in said
