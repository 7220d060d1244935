"""Trackers, each with its real library: what arrives, what a resumed run adds, and what a failure does."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from moe_rl.report.lines import encode, read_rows, write_rows
from moe_rl.report.run_page import write_report
from moe_rl.report.sample_lines import SampleFile, SampleLine
from moe_rl.report.summary import summarize
from moe_rl.report.tracker_worker import FOLDER, MLflow, TrackedRun, TrackerState, read_state, state_file
from moe_rl.report.trackers import Trackers
from moe_rl.types import sampled_by

CONFIG = {"run": {"name": "tiny", "steps": 4}, "train": {"optimizer": {"lr": 1e-4}}, "report": {"project": "sums"}}
SECONDS = 60.0
# A long time for processes that import a library on a busy machine.
PATIENCE = 120.0


class Run:
    """A run folder that is written as the trainer writes it."""

    def __init__(self, path: Path):
        self.path, self.notes = path, []
        (path / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def trackers(self, *names: str, seconds: float = SECONDS) -> Trackers:
        return Trackers(self.path, names, seconds=seconds, note=self.notes.append)

    def evaluate(self, step: int, rate: float) -> None:
        self._append(encode(step, "eval", {"eval/pass_rate": rate, "eval/level/1 digit (+)": rate}))

    def step(self, step: int, reward: float) -> None:
        SampleFile(self.path).write([sample(step, "a"), sample(step, "b")])
        self._append(encode(step, "train", {"reward/mean": reward, "optim/grad_norm": math.nan}))

    def _append(self, line: str) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(line)

    def rewind(self, step: int) -> None:
        """Go back to before `step`, as --resume does."""
        rows, _ = read_rows(self.path / "metrics.jsonl")
        write_rows(self.path / "metrics.jsonl", [row for row in rows if row["step"] < step])
        SampleFile(self.path).rewind(step)

    def end(self) -> None:
        summarize(self.path, {"seed": 1})
        write_report(self.path)

    def sent(self, name: str, metrics: int, samples: int) -> None:
        """Wait until the tracker has got this many lines."""
        self.until(name, lambda state: state.metrics >= metrics and state.samples >= samples)

    def until(
        self, name: str, reached: Callable[[TrackerState], bool], each: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the tracker's state is `reached`; call `each` whenever it is not."""
        deadline = time.monotonic() + PATIENCE
        while not reached(found := read_state(self.path, name)):
            each()
            assert time.monotonic() < deadline, (found, self.notes, self.log(name))
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self.path / FOLDER / f"{name}.log").read_text()


def sample(step: int, key: str) -> SampleLine:
    """Make the line of a completion. One called "b" was not trained on."""
    return SampleLine(
        step=step,
        key=f"s{step}/{key}",
        prompt="2+2=",
        completion="<answer>4</answer>\n# not a heading",
        reward=1.2,
        parts={"exact": 1.0},
        advantages=[] if key == "b" else [0.5],
        finish_reason="stop",
        versions=sampled_by(step - 1, 1),
        prompt_tokens=4,
        pieces=["4"],
        sampler_logprobs=[-0.1],
        trainer_logprobs=[],
        differing_layers=[],
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "tiny-1"
    folder.mkdir()
    return Run(folder)


def ended(run: Run, name: str) -> None:
    """Wait until the tracker's process has given the run's lock back."""
    with (run.path / FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def stopped_and_resumed(run: Run, name: str) -> None:
    """Three steps, a stop, then the third again with another reward and a fourth, to the end."""
    first = run.trackers(name)
    run.evaluate(0, 0.25)
    first.look()
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3)):
        run.step(step, reward)
    run.sent(name, 4, 6)
    first.close()
    ended(run, name)
    run.rewind(3)
    second = run.trackers(name)
    second.look()
    run.step(3, 0.35)
    run.step(4, 0.4)
    run.evaluate(4, 0.75)
    run.end()
    second.finish()
    state = read_state(run.path, name)
    assert (state.metrics, state.samples, state.reported, state.failures) == (6, 8, True, 0), run.log(name)
    assert run.notes == []


def test_tensorboard_shows_the_run_and_forgets_the_steps_that_were_done_again(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stopped_and_resumed(run, "tensorboard")
    found = EventAccumulator(read_state(run.path, "tensorboard").place, size_guidance={"tensors": 0}).Reload()

    def numbers(tag):
        return [(one.step, pytest.approx(one.value)) for one in found.Scalars(tag)]

    def texts(tag):
        return [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(tag)]

    assert numbers("reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.35), (4, 0.4)]
    assert numbers("eval/pass_rate") == [(0, 0.25), (4, 0.75)]
    assert {step for step, _ in texts("samples")} == {1, 2, 3, 4}
    assert "s4/b" in texts("samples")[-1][1] and "\n    # not a heading" in texts("samples")[-1][1]
    (config,), (summary,) = texts("config"), texts("summary")
    assert '"lr": 0.0001' in config[1] and summary[0] == 4 and '"heldout_pass_rate_last": 0.75' in summary[1]


def wandb_records(path: Path):
    """Read a .wandb file: a log of records in blocks of 32 KiB, as LevelDB writes it, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_weights_and_biases_gets_one_run(run):
    stopped_and_resumed(run, "wandb")
    files = sorted((run.path / FOLDER).glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    parts = [list(wandb_records(file)) for file in files]
    ids = [{record.run.run_id for record in part if record.run.run_id} for part in parts]
    assert ids == [{read_state(run.path, "wandb").id}] * 2
    logged = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for part in parts
        for record in part
        if record.history.item
    ]
    assert [(row["step"], row["reward/mean"]) for row in logged if "reward/mean" in row] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (3, 0.35),
        (4, 0.4),
    ]
    assert [row["eval/pass_rate"] for row in logged if "eval/pass_rate" in row] == [0.25, 0.75]
    config = {item.key: json.loads(item.value_json) for item in parts[0][_run_record(parts[0])].run.config.update}
    assert config["train"] == CONFIG["train"] and parts[0][_run_record(parts[0])].run.project == "sums"
    tables = [json.loads(path.read_text()) for path in files[1].parent.glob("files/media/table/*.json")]
    lines = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
    assert {(line["key"], line["advantages"]) for line in lines} >= {("s3/a", "advantage +0.500"), ("s4/b", "")}
    (page,) = files[1].parent.glob("files/media/html/*.html")
    assert "moe_rl run report" in page.read_text()
    assert [record.exit.exit_code for part in parts for record in part if record.HasField("exit")] == [1, 0]


def _run_record(part) -> int:
    return next(number for number, record in enumerate(part) if record.run.run_id)


def test_mlflow_gets_one_run(run):
    from mlflow import MlflowClient

    stopped_and_resumed(run, "mlflow")
    client = MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert found.info.run_id == read_state(run.path, "mlflow").id
    assert (found.info.run_name, found.info.status) == ("tiny-1", "FINISHED")
    assert found.data.params["train.optimizer.lr"] == "0.0001"
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.35), (4, 0.4)]
    assert found.data.metrics["eval/level/1 digit ___"] == 0.75 and math.isnan(found.data.metrics["optim/grad_norm"])
    kept = Path(found.info.artifact_uri.removeprefix("file://"))
    assert "moe_rl run report" in (kept / "report.html").read_text()
    assert yaml.safe_load((kept / "config.yaml").read_text()) == CONFIG
    lines = [json.loads(line) for line in (kept / "samples/step-000004.jsonl").read_text().splitlines()]
    assert [(line["key"], line["advantages"]) for line in lines] == [("s4/a", "advantage +0.500"), ("s4/b", "")]


def test_mlflow_gets_metrics_though_its_store_of_files_cannot_be_reached(tmp_path, monkeypatch):
    """The server is reached, and the client lacks the rights to the bucket that keeps the files."""
    from mlflow import MlflowClient

    def refused(*_, **__):
        raise PermissionError("no credentials")

    kept: list[str] = []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(MlflowClient, "log_artifact", refused)
    facts = TrackedRun(tmp_path / "tiny-1", tmp_path, CONFIG, "", None, kept.append)
    tracker = MLflow(facts)
    tracker.metrics(1, {"reward/mean": 0.5})
    with pytest.raises(PermissionError):
        tracker.report({})
    with monkeypatch.context() as fails, pytest.raises(PermissionError):
        fails.setattr(MlflowClient, "log_batch", refused)
        MLflow(facts)
    assert len(kept) == 2 and kept[0] == tracker.id, "a run that was begun is gone on with"
    assert [one.value for one in MlflowClient().get_metric_history(tracker.id, "reward/mean")] == [0.5]


@pytest.mark.long
def test_a_failure_is_counted_and_told_once_and_nothing_is_lost(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at-all")
    run.step(1, 0.1)
    trackers = run.trackers("mlflow", seconds=0.1)  # the pause after a failure is as long
    run.until("mlflow", lambda state: state.failures >= 2, trackers.look)
    trackers.close()
    (note,) = run.notes
    assert "mlflow" in note and str(run.path / FOLDER / "mlflow.log") in note
    run.end()
    assert f'<td class="n">{read_state(run.path, "mlflow").failures}</td>' in (run.path / "report.html").read_text()

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{run.path}/store")
    before = read_state(run.path, "mlflow").failures
    again = run.trackers("mlflow")
    again.look()
    run.sent("mlflow", 1, 2)
    run.step(2, 0.2)
    run.end()
    again.finish()
    state = read_state(run.path, "mlflow")
    assert (state.metrics, state.samples, state.reported) == (2, 4, True) and state.failures == before


@pytest.fixture
def silent(monkeypatch):
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


@pytest.mark.long
def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(run, silent):
    trackers = run.trackers("mlflow", seconds=8.0)
    begun = time.monotonic()
    trackers.look()
    run.step(1, 0.1)
    trackers.look()
    assert time.monotonic() - begun < 4.0  # a process is started, and nothing is waited for
    silent.settimeout(PATIENCE)
    silent.accept()  # it does ask
    run.end()
    begun = time.monotonic()
    trackers.finish()
    assert time.monotonic() - begun < 16.0
    state = read_state(run.path, "mlflow")
    assert (state.metrics, state.failures, state.reported) == (0, 1, False) and "8 s" in state.error
    assert len(run.notes) == 1


@pytest.mark.long
def test_a_process_that_hangs_is_ended_and_started_again(run, silent):
    trackers = run.trackers("mlflow", seconds=3.0)
    run.step(1, 0.1)
    run.until("mlflow", lambda state: state.failures >= 2, trackers.look)
    assert "Timeout (0:00:03)!" in run.log("mlflow") and len(run.notes) == 1
    trackers.close()


def test_a_library_that_ends_the_process_is_a_failure_like_any_other(run, tmp_path, monkeypatch):
    """The process of a tracker may also be killed from outside. The run goes on."""
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "mlflow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", f"{planted}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run.step(1, 0.1)
    run.end()
    trackers = run.trackers("mlflow")
    trackers.look()
    trackers.finish()
    assert read_state(run.path, "mlflow").failures == 1 and "-9" in read_state(run.path, "mlflow").error


def test_a_damaged_state_is_told_and_everything_is_sent_again(run):
    run.step(1, 0.1)
    run.end()
    state_file(run.path, "tensorboard").parent.mkdir()
    state_file(run.path, "tensorboard").write_text('{"id": "tiny-1", "metrics": 7')
    trackers = run.trackers("tensorboard")
    trackers.look()
    trackers.finish()
    state = read_state(run.path, "tensorboard")
    assert (state.metrics, state.failures, state.reported) == (1, 1, True) and "tensorboard.json" in state.error
