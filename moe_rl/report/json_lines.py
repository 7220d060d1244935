"""Encodes and reads files that hold one dataclass a line, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from moe_rl.errors import MoeRLError, describe


def encode(values: Iterable[Any]) -> bytes:
    return "".join(json.dumps(asdict(value), allow_nan=False) + "\n" for value in values).encode()


def read_lines[T](path: Path, kind: type[T]) -> list[T]:
    """Read all lines, in the order written. A missing file has none, and a torn last line is left out.

    Raises:
        MoeRLError: naming the line, if any other line cannot be read.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as error:
            raise MoeRLError(
                describe(
                    "a line of the run is damaged",
                    where={"file": path, "line": number},
                    got=error,
                    expected=f"one {kind.__name__} as a JSON object",
                    do="delete that line",
                )
            ) from error
    return found
