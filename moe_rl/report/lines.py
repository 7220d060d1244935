"""Writes and reads `metrics.jsonl`: one JSON object per line, appended during the run.

The last key of a line is `checksum`, the xxh3-64 of the JSON of its other keys, so that a changed digit is detected. A
line without it, from an older version or another program, is accepted unchecked.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from moe_rl.disk import write_whole
from moe_rl.errors import ArgumentError, MoeRLError
from moe_rl.report.metrics import Mode

FILE = "metrics.jsonl"
_CHECKSUM = "checksum"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunLines:
    """Holds the lines of a run.

    Attributes:
        train, eval: ordered by step. A step that was logged twice keeps its last line.
        torn: whether the last line was incomplete, as after a kill during a write. It is left out.
    """

    train: list[Row] = field(default_factory=list)
    eval: list[Row] = field(default_factory=list)
    torn: bool = False

    def series(self, key: str, kind: str = "train") -> tuple[list[int], list[float]]:
        """Return steps and values of the lines where this key was logged and finite."""
        rows = [row for row in getattr(self, kind) if row.get(key) is not None]
        return [row["step"] for row in rows], [row[key] for row in rows]

    def paired(self, key: str, partner: str) -> tuple[list[int], list[float], list[float]]:
        """Return steps and values of two keys, for the steps where both were logged and finite."""
        rows = [row for row in self.train if row.get(key) is not None and row.get(partner) is not None]
        return [row["step"] for row in rows], [row[key] for row in rows], [row[partner] for row in rows]

    @property
    def lags(self) -> list[str]:
        """Return the lags for which the policy KL was logged, such as "0" and "2-3", in their order; none for a
        synchronous run."""
        start = "policy_kl/k3_lag/"
        logged = {key.removeprefix(start) for row in self.train for key in row if key.startswith(start)}
        return sorted(logged, key=lambda lag: int(re.split(r"\D", lag)[0]))

    @property
    def mode(self) -> Mode:
        """Return replay.mode, inferred from the logged keys."""
        if not any("routing/applied_mismatch" in row for row in self.train):
            return "off"
        return "r3" if any("routing/shadow_mismatch" in row for row in self.train) else "r2"

    @property
    def replay(self) -> bool:
        """Return whether the trainer replayed the sampler's routes (r3)."""
        return self.mode == "r3"


def encode(step: int, kind: str, metrics: dict[str, float]) -> str:
    """Format one line, with newline. NaN and infinities, which JSON lacks, become null and are named under
    "nonfinite".
    """
    row: Row = {"step": step, "kind": kind}
    nonfinite = []
    for key, value in metrics.items():
        try:
            number = value if type(value) is int else float(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "a metric is not a number", where={"metric": key}, got=repr(value), do="log a float"
            ) from error
        if math.isfinite(number):
            row[key] = number
        else:
            row[key] = None
            nonfinite.append(key)
    if nonfinite:
        row["nonfinite"] = nonfinite
    return _line(row)


def _line(row: Row) -> str:
    """Return the line of a row, with its checksum and a newline."""
    return json.dumps(row | {_CHECKSUM: _checksum(row)}, allow_nan=False) + "\n"


def _checksum(row: Row) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(row, allow_nan=False).encode())


def values(row: Row) -> dict[str, float | None]:
    """Return the metrics of a line. A value that was not finite is None."""
    return {key: value for key, value in row.items() if key not in ("step", "kind", "nonfinite", _CHECKSUM)}


def pass_rates(row: Row) -> dict[str, list[float | None]]:
    """Return the pass rates of an evaluation by name, without "eval/": lower end of the interval, value, upper end."""
    names = [key.removeprefix("eval/") for key in row if key.startswith("eval/")]
    names = [name for name in names if not name.startswith(("low/", "high/"))]
    return {name: [row.get(f"eval/low/{name}"), row[f"eval/{name}"], row.get(f"eval/high/{name}")] for name in names}


def read_rows(path: Path) -> tuple[list[Row], bool]:
    """Return all lines in the order written, and whether the last one was torn. A missing file has no lines.

    Raises:
        MoeRLError: naming the line, if any line but the last cannot be read.
    """
    if not path.exists():
        return [], False
    lines = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    checked = False  # the first lines of a run from an early version have no checksum
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not (
                isinstance(row, dict) and isinstance(row.get("step"), int) and row.get("kind") in ("train", "eval")
            ):
                raise ValueError("not a metrics line")
            checksum = row.pop(_CHECKSUM, None)
            if (checked or checksum is not None) and checksum != _checksum(row):
                raise ValueError("another checksum, or none")
            checked = checksum is not None
        except ValueError as error:
            if number == len(lines):  # without a newline, the last line was being written
                return rows, True
            raise MoeRLError(
                "the metrics log is damaged",
                where={"file": path, "line": number},
                got=repr(line[:60]),
                expected='an object with "step" and "kind", and with the checksum of its content',
                do="restore the file, or delete this line",
            ) from error
        rows.append(row)
    return rows, False


def read_run(run_dir: Path) -> RunLines:
    """Read metrics.jsonl of a run folder."""
    rows, torn = read_rows(run_dir / FILE)
    by_kind: dict[str, dict[int, Row]] = {"train": {}, "eval": {}}
    for row in rows:
        by_kind[row["kind"]][row["step"]] = row
    train, evaluation = ([by_step[step] for step in sorted(by_step)] for by_step in by_kind.values())
    return RunLines(train, evaluation, torn)


def write_rows(path: Path, rows: list[Row]) -> None:
    write_whole(path, "".join(map(_line, rows)))
