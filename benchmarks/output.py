"""Sums up the rounds of a benchmark, prints its result, and writes it to a file on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def tell(result: dict[str, object], file: Path | None) -> None:
    """Print one line for each number, floats with four digits. Write everything as JSON to `file`."""
    for name, value in result.items():
        print(f"{name:42} {value:.4g}" if isinstance(value, float) else f"{name:42} {value}")
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile. All three are the value if there is only one."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(low), float(middle), float(high)
