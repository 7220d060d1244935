"""Encodes, reads and appends to files that hold one dataclass a line, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from moe_rl.disk import write_all, writing
from moe_rl.errors import About, MoeRLError


def encode(values: Iterable[Any]) -> bytes:
    return "".join(json.dumps(asdict(value), allow_nan=False) + "\n" for value in values).encode()


class StepFile[T]:
    """Appends to a file of a run, on one rank. Each line belongs to a step, which its field `step` names.

    Args:
        kind: the dataclass of a line.
        what: name of the lines in error messages.
    """

    def __init__(self, path: Path, kind: type[T], what: str):
        self._path, self._kind, self._what = path, kind, what

    def write(self, values: Iterable[T]) -> None:
        """Append lines. Raises DiskError if they cannot be written."""
        data = encode(values)
        what = f"{self._what} could not be written"
        with writing(what, self._path, size=len(data)), self._path.open("ab", buffering=0) as file:
            write_all(file.fileno(), data)

    def rewind(self, step: int) -> None:
        """Drop the lines of `step` and later steps, and a last line that was cut short."""
        if not self._path.exists():
            return
        kept = 0
        with writing(f"{self._what} could not be cut", self._path), self._path.open("r+b") as file:
            for number, line in enumerate(file, start=1):
                torn = not line.endswith(b"\n")
                if torn or _decoded(self._path, number, line, self._kind).step >= step:  # type: ignore[attr-defined]
                    file.truncate(kept)
                    return
                kept += len(line)


def read_lines[T](path: Path, kind: type[T]) -> list[T]:
    """Read all lines, in the order written. A missing file has none, and a torn last line is left out.

    Raises:
        MoeRLError: naming the line, if any other line cannot be read.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [_decoded(path, number, line, kind) for number, line in enumerate(lines, start=1)]


def _decoded[T](path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        where: About = {"file": path, "line": number}
        what, expected = "a line of the run is damaged", f"one {kind.__name__} as a JSON object"
        raise MoeRLError(what, where=where, got=error, expected=expected, do="delete that line") from error
