"""Sends a run to one tracker, from its own process: `python -m moe_rl.report.tracker_worker ...`.

The process follows metrics.jsonl and samples.jsonl of the run folder. It ends when its standard input is closed, after
sending the remaining lines. A line on standard input means that the run is finished and that its report must be sent
too. A call that exceeds the time limit ends the process, as does any error. `trackers.py` starts it
again.

Exit status: 0 done; 1 a call took too long; 2 an error, which is in the tracker's state.

Connects to TensorBoard, Weights & Biases and MLflow, each through its own library.

A library is imported when its tracker is opened. Addresses, accounts and keys come from the library's documented
environment variables, never from a run's config.
"""

from __future__ import annotations

import faulthandler
import fcntl
import itertools
import json
import math
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from moe_rl.config.schema import TrackerName
from moe_rl.disk import write_whole
from moe_rl.report import lines, run_config, sample_lines, summary
from moe_rl.report.run_config import read_config
from moe_rl.report.sample_lines import SampleLine

FOLDER = "trackers"
"""Folder of a run with the state of each tracker, in <name>.json."""


@dataclass(slots=True)
class TrackerState:
    """Describes a tracker's progress and failures.

    Attributes:
        id: the tracker's own name for the run, which a resumed run reuses. "" before it has one.
        place: where to look at the run: an address or a folder.
        metrics, samples: number of lines of metrics.jsonl and samples.jsonl that the tracker has received.
        reported: whether it has received the report of the finished run.
        failures: how often it failed.
        error: the last failure, "" if there was none.
    """

    id: str = ""
    place: str = ""
    metrics: int = 0
    samples: int = 0
    reported: bool = False
    failures: int = 0
    error: str = ""


def state_file(run_dir: Path, name: str) -> Path:
    return Path(run_dir) / FOLDER / f"{name}.json"


def read_state(run_dir: Path, name: str) -> TrackerState:
    """Read the state of a tracker. Without a file it has received nothing.

    A damaged file counts as a failure, and everything is sent again.
    """
    path = state_file(run_dir, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrackerState) if path.exists() else TrackerState()
    except msgspec.MsgspecError as error:
        return TrackerState(failures=1, error=f"{path.name} was damaged: {error}")


def write_state(run_dir: Path, name: str, state: TrackerState) -> None:
    """Replace the state of a tracker. Raises DiskError if it cannot be written."""
    write_whole(state_file(run_dir, name), json.dumps(asdict(state), indent=1) + "\n")


def complete_lines(path: Path) -> int:
    """Count the lines of a file that end in a newline. A missing file has none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


_SHOWN = ("key", "prompt", "completion", "reward", "advantages", "finish_reason", "mismatch")
# The most parameters that MLflow accepts at once.
_PARAMETERS = 100


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Describes a run to a tracker.

    Attributes:
        path: the run folder.
        folder: where the tracker may keep files.
        config: the resolved config, by section.
        id: the tracker's name for the run from an earlier process; "" for a new run.
        again_from: the first step that is logged again after the run went back to a checkpoint; None if it did not.
        keep: keeps the tracker's name for a new run, should a later call fail.
    """

    path: Path
    folder: Path
    config: dict[str, Any]
    id: str
    again_from: int | None
    keep: Callable[[str], None]

    @property
    def project(self) -> str:
        return str(self.config["report"]["project"])


class Tracker(Protocol):
    """Receives a run's logs. Any call may raise any error, and may take long.

    Attributes:
        id: the tracker's name for the run.
        place: where a user finds the run.
    """

    id: str
    place: str

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Receive the metrics of a step or an evaluation. Values that were not finite are NaN."""

    def samples(self, step: int, lines: list[SampleLine]) -> None:
        """Receive the samples of one step."""

    def report(self, summary: dict[str, Any]) -> None:
        """Receive the report of the finished run: summary.json, and report.html if the tracker can show it."""

    def close(self, *, finished: bool) -> None:
        """Deliver everything and end. finished: whether the run has finished."""


class TensorBoard:
    """Writes TensorBoard event files into the run folder."""

    def __init__(self, run: TrackedRun):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self.id, self.place = run.path.name, str(run.folder / "tensorboard")
        self._writer = EventFileWriter(self.place)
        if run.again_from is not None:
            # TensorBoard then drops the metrics of these steps in earlier files.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(run.again_from, session_log=start)
        if not run.id:
            self._add(0, summary=self._text("config", _as_code(json.dumps(run.config, indent=2))))
        self._writer.flush()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        scalars = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(step, summary=self._summary(value=scalars))
        self._writer.flush()

    def samples(self, step: int, lines: list[SampleLine]) -> None:
        text = "\n\n".join(
            f"**{line.key}**: reward {line.reward:g}\n\n{_as_code(line.prompt)}\n\n{_as_code(line.completion)}"
            for line in lines
        )
        self._add(step, summary=self._text("samples", text))
        self._writer.flush()

    def report(self, summary: dict[str, Any]) -> None:
        text = _as_code(json.dumps(summary, indent=2))
        self._add(summary["steps"], summary=self._text("summary", text))

    def close(self, *, finished: bool) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases:
    """Sends a run to Weights & Biases, or to its local files with WANDB_MODE=offline."""

    def __init__(self, run: TrackedRun):
        import wandb

        self._library, self._page = wandb, run.path / "report.html"
        self._run = wandb.init(
            project=run.project,
            name=run.path.name,
            id=run.id or None,
            resume="allow",
            dir=run.folder,
            config=run.config,
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self.id, self.place = self._run.id, self._run.url or str(Path(self._run.dir).parent)
        # W&B's own step may never decrease, but the step of a resumed run does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, lines: list[SampleLine]) -> None:
        table = self._library.Table(columns=list(_SHOWN), data=[list(_shown(line).values()) for line in lines])
        self._run.log({"step": step, "samples": table})

    def report(self, summary: dict[str, Any]) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.log({"step": summary["steps"], "report": self._library.Html(self._page.read_text(encoding="utf-8"))})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """Sends a run to the MLflow server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric, self._path = MlflowClient(), Metric, run.path
        if run.id:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(run.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            self.id = self._client.create_run(number, run_name=run.path.name).info.run_id
            run.keep(self.id)
            values = [Param(key, str(value)) for key, value in run_config.flat(run.config).items()]
            for begin in range(0, len(values), _PARAMETERS):
                self._client.log_batch(self.id, params=values[begin : begin + _PARAMETERS])
        self.place = self._client.get_run(self.id).info.artifact_uri or ""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        # MLflow allows only these characters, but the name of a level may have others.
        metrics = [self._metric(re.sub(r"[^\w\-. :/]", "_", key), value, now, step) for key, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def samples(self, step: int, lines: list[SampleLine]) -> None:
        text = "".join(json.dumps(_shown(line)) + "\n" for line in lines)
        self._client.log_text(self.id, text, f"samples/step-{step:06d}.jsonl")

    def report(self, summary: dict[str, Any]) -> None:
        for name in (run_config.FILE, "summary.json", "report.html"):
            self._client.log_artifact(self.id, str(self._path / name))

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


OPEN: dict[TrackerName, type[TensorBoard] | type[WeightsAndBiases] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def _shown(line: SampleLine) -> dict[str, Any]:
    """Return the columns of a sample. A mismatch that was not measured is None, because JSON has no NaN. Advantages are
    text, because a table cannot hold lists of different lengths."""
    columns = {name: getattr(line, name) for name in _SHOWN}
    return columns | {"advantages": line.shown_advantages, "mismatch": line.mismatch if line.mismatch >= 0 else None}


def _as_code(text: str) -> str:
    """Return Markdown that shows a text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


TOO_LONG, FAILED = 1, 2
_LOOK_SECONDS = 0.5
_ERROR_CHARACTERS = 500


class _Tail:
    """Reads the complete lines added to a file since the last read."""

    def __init__(self, path: Path, begin: int):
        self._path, self._skip, self._offset = path, begin, 0

    def lines(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            *added, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        added, self._skip = added[self._skip :], max(0, self._skip - len(added))
        return added


class _Worker:
    """Follows one run for one tracker."""

    def __init__(self, run_dir: Path, name: str, seconds: float, state: TrackerState):
        self._run, self._name, self._seconds, self._state = run_dir, name, seconds, state
        self._ended = self._finished = False

    def follow(self, metrics: int, samples: int) -> None:
        """Send the run until it has ended. metrics, samples: number of lines in the files at the start."""
        state = self._state
        back = metrics < state.metrics or samples < state.samples
        state.metrics, state.samples = min(state.metrics, metrics), min(state.samples, samples)
        path = self._run / lines.FILE
        known = path.read_bytes().splitlines()[:metrics] if path.exists() else []
        again = 1 + (json.loads(known[-1])["step"] if known else -1)
        config = read_config(self._run)

        def keep(name: str) -> None:
            state.id = name
            self._save()

        facts = TrackedRun(self._run, self._run / FOLDER, config, state.id, again if back else None, keep)
        with self._limited():
            tracker: Tracker = OPEN[self._name](facts)  # type: ignore[index]
        state.id, state.place, state.reported = tracker.id, tracker.place, False
        self._save()
        self._send(tracker, _Tail(path, state.metrics), _Tail(self._run / sample_lines.FILE, state.samples))

    def _send(self, tracker: Tracker, metrics: _Tail, samples: _Tail) -> None:
        while True:
            last = self._ended
            rows = [json.loads(line) for line in metrics.lines()]
            for row in rows:
                values = {key: math.nan if value is None else value for key, value in lines.values(row).items()}
                with self._limited():
                    tracker.metrics(row["step"], values)
                self._state.metrics += 1
            kept = [msgspec.json.decode(line, type=SampleLine) for line in samples.lines()]
            for step, group in itertools.groupby(kept, key=lambda line: line.step):
                of_step = list(group)
                with self._limited():
                    tracker.samples(step, of_step)
                self._state.samples += len(of_step)
            if rows or kept:
                self._save()
            if last:
                break
            self._wait()
        if self._finished:
            tracker.report(json.loads((self._run / summary.FILE).read_text(encoding="utf-8")))
        tracker.close(finished=self._finished)
        self._state.reported = self._finished
        self._save()

    def _wait(self) -> None:
        """Wait until the next poll or a signal from the run. One time limit covers the whole end."""
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
        if readable:
            message = os.read(sys.stdin.fileno(), 4096)
            self._finished = self._finished or bool(message)
            if not message:
                self._ended = True
                faulthandler.dump_traceback_later(self._seconds, exit=True)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """End the process if a call takes too long, even one that never releases the interpreter."""
        if self._ended:
            yield
            return
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _save(self) -> None:
        write_state(self._run, self._name, self._state)


def main(arguments: list[str]) -> int:
    """Send a run. arguments: run folder, tracker, time limit in seconds, lines of metrics.jsonl and samples.jsonl."""
    run_dir, name, seconds, metrics, samples = arguments
    folder = Path(run_dir)
    with (folder / FOLDER / f"{name}.lock").open("w") as lock:
        faulthandler.dump_traceback_later(float(seconds), exit=True)
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier process of this run may still be sending its last lines
        faulthandler.cancel_dump_traceback_later()
        state = read_state(folder, name)
        try:
            _Worker(folder, name, float(seconds), state).follow(int(metrics), int(samples))
        except BaseException as error:  # a library may also call sys.exit
            traceback.print_exc()
            state.failures += 1
            state.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            write_state(folder, name, state)
            return FAILED
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a library's exit handlers could wait for its server forever
