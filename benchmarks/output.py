"""Sums up the rounds of a benchmark, prints its result, and writes it to a file on request.

Importing this module begins to measure the load of the machine: how busy processes that do not belong to the benchmark
keep the processors that it may use, until its result is written. Above a twentieth its figures do not hold. Import it
before anything is started: from then on processes whose parent was killed become children of this one, and count.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

# Share of the processors. Two runs of a benchmark on an idle machine differ by as much.
_OTHERS = 0.05
_PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _busy() -> float:
    """Return the seconds for which the processors that this process may use have been busy, for whomever."""
    mine = os.sched_getaffinity(0)
    times = [one for at, one in enumerate(psutil.cpu_times(percpu=True)) if at in mine]
    return sum(one.user + one.nice + one.system + one.irq + one.softirq + one.steal for one in times)


def _own() -> float:
    """Return the processor time of this process and of all that it started, even if ended, in seconds."""
    seconds = 0.0
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            seconds += sum(one.cpu_times()[:4])
    return seconds


_BEGAN = time.monotonic(), _busy(), _own()


def beside() -> dict[str, object]:
    """Return `machine_load`, the share of the processors that others have used since the beginning, and `figures_hold`.
    Say so where they do not hold."""
    began, busy, own = _BEGAN
    seconds = (time.monotonic() - began) * len(os.sched_getaffinity(0))
    load = max(0.0, (_busy() - busy) - (_own() - own)) / max(seconds, 1e-9)
    if load > _OTHERS:
        print(
            f"THE FIGURES DO NOT HOLD: other processes used {load:.0%} of the processors meanwhile. Run it again on a "
            "machine without other work.",
            flush=True,
        )
    return {"machine_load": load, "figures_hold": load <= _OTHERS}


def write(result: dict[str, object], file: Path | None) -> None:
    """Write a result as JSON to `file`, with the load of the machine beside it."""
    result = result | beside()
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def show(result: dict[str, object]) -> None:
    """Print one line for each number, floats with four digits."""
    for name, value in result.items():
        print(f"{name:42} {value:.4g}" if isinstance(value, float) else f"{name:42} {value}")


def tell(result: dict[str, object], file: Path | None) -> None:
    """Show a result and write it."""
    show(result)
    write(result, file)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile. All three are the value if there is only one."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(low), float(middle), float(high)
