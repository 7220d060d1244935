"""Writes and reads `history.jsonl`: one line for each start or resume of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.disk import write_whole
from moe_rl.report.json_lines import encode, read_lines

FILE = "history.jsonl"


@dataclass(frozen=True, slots=True)
class RunStart:
    """Describes one start of a run.

    Attributes:
        time: local time with its offset from UTC, in ISO 8601.
        after: number of steps done before.
        ranks: number of training ranks.
        device: name of the device that rank 0 trains on, such as "NVIDIA H100 80GB HBM3"; "CPU" for none.
        changed: old and new value of each config key that this start changed, and old and new digest of each input
            of the run that had changed. None stands for a missing value.
        config: the resolved config of this start; empty in lines from an older version.
    """

    time: str
    after: int
    ranks: int
    device: str
    changed: dict[str, tuple[Any, Any]]
    config: dict[str, Any] = field(default_factory=dict)


def record(
    run_dir: Path,
    *,
    after: int,
    ranks: int,
    device: str,
    changed: Mapping[str, tuple[Any, Any]],
    config: Mapping[str, Any],
) -> None:
    """Append a line for the current start. The line is durable on return.

    Raises:
        DiskError: it cannot be written.
        MoeRLError: an earlier line is damaged.
    """
    begun = RunStart(time.strftime("%Y-%m-%dT%H:%M:%S%z"), after, ranks, device, dict(changed), dict(config))
    write_whole(run_dir / FILE, encode([*read_history(run_dir), begun]), "the history of the run")


def read_history(run_dir: Path) -> list[RunStart]:
    """Read the history of a run, oldest start first. Raises MoeRLError naming the line that cannot be read."""
    return read_lines(run_dir / FILE, RunStart)
