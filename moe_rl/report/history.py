"""Writes and reads `history.jsonl`: one line for each time that processes began or resumed the run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from moe_rl.disk import sync, write_all, writing
from moe_rl.errors import MoeRLError, describe

FILE = "history.jsonl"


@dataclass(frozen=True, slots=True)
class RunStart:
    """Describes one start of a run.

    Attributes:
        time: local time with its offset from UTC, in ISO 8601.
        after: number of steps that were done before.
        ranks: number of training ranks.
        device: name of the device that rank 0 trains on, such as "NVIDIA H100 80GB HBM3"; "CPU" for none.
        changed: old and new value of each config key that this start changed. A value that was not there is None.
    """

    time: str
    after: int
    ranks: int
    device: str
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)


def record(
    run_dir: Path, *, after: int, ranks: int, device: str, changed: Mapping[str, tuple[Any, Any]] | None = None
) -> None:
    """Append a line for a start that happens now. The line is durable on return. Raises DiskError."""
    line = RunStart(time.strftime("%Y-%m-%dT%H:%M:%S%z"), after, ranks, device, dict(changed or {}))
    path, data = run_dir / FILE, json.dumps(asdict(line)).encode() + b"\n"
    with writing("a line of the run's history could not be written", path, size=len(data)), path.open("ab", 0) as file:
        write_all(file.fileno(), data)
        sync(path)


def read_history(run_dir: Path) -> list[RunStart]:
    """Read the history of a run, oldest start first. A missing file has none, and a torn last line is left out.

    Raises:
        MoeRLError: naming the line, if any other line cannot be read.
    """
    path = run_dir / FILE
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=RunStart))
        except msgspec.MsgspecError as error:
            raise MoeRLError(
                describe(
                    "the history of the run is damaged",
                    where={"file": path, "line": number},
                    got=error,
                    expected="one start as a JSON object",
                    do="delete that line",
                )
            ) from error
    return found
