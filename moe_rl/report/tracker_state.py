"""Keeps a tracker's progress through a run in `trackers/<name>.json` of the run folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

import msgspec

from moe_rl.disk import write_whole

FOLDER = "trackers"


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
    write_whole(state_file(run_dir, name), dumps(asdict(state), indent=1) + "\n")


def complete_lines(path: Path) -> int:
    """Count the lines of a file that end in a newline. A missing file has none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
