"""Prints the result of a benchmark, and writes it to a file on request."""

from __future__ import annotations

import json
from pathlib import Path


def tell(result: dict[str, object], file: Path | None) -> None:
    """Print one line for each number, floats with four digits. Write everything as JSON to `file`."""
    for name, value in result.items():
        print(f"{name:42} {value:.4g}" if isinstance(value, float) else f"{name:42} {value}")
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n")
