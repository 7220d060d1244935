"""Connects to TensorBoard, Weights & Biases and MLflow, each through its own library.

A library is imported when its tracker is opened. Addresses, accounts and keys come from the library's documented
environment variables, never from a run's config.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_rl.config.schema import TrackerName
from moe_rl.report import run_config
from moe_rl.report.sample_lines import SampleLine

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
    """

    path: Path
    folder: Path
    config: dict[str, Any]
    id: str
    again_from: int | None

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
        found = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(step, summary=self._summary(value=found))
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
            values = [Param(key, str(value)) for key, value in run_config.flat(run.config).items()]
            for begin in range(0, len(values), _PARAMETERS):
                self._client.log_batch(self.id, params=values[begin : begin + _PARAMETERS])
        self.place = self._client.get_run(self.id).info.artifact_uri or ""
        self._client.log_artifact(self.id, str(run.path / run_config.FILE))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        # MLflow allows only these characters, but the name of a level may have others.
        found = [self._metric(re.sub(r"[^\w\-. :/]", "_", key), value, now, step) for key, value in values.items()]
        self._client.log_batch(self.id, metrics=found)

    def samples(self, step: int, lines: list[SampleLine]) -> None:
        text = "".join(json.dumps(_shown(line)) + "\n" for line in lines)
        self._client.log_text(self.id, text, f"samples/step-{step:06d}.jsonl")

    def report(self, summary: dict[str, Any]) -> None:
        for name in ("summary.json", "report.html"):
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
    found = {name: getattr(line, name) for name in _SHOWN}
    return found | {"advantages": line.shown_advantages, "mismatch": line.mismatch if line.mismatch >= 0 else None}


def _as_code(text: str) -> str:
    """Return Markdown that shows a text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
