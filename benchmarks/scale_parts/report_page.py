"""Writes the report of a long run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from scale_parts.target import Target, at_full_size, cpu_seconds

from moe_rl.report.lines import FILE, encode
from moe_rl.report.registry import METRICS
from moe_rl.report.run_page import write_report

STEPS = (250, 500, 1000)
FULL = 10_000


def measured(target: Target) -> dict[str, float]:
    """Return seconds and bytes of a report after 10,000 steps with all metrics, and an evaluation every 10 steps."""
    rng, seconds, sizes = np.random.default_rng(0), {}, {}
    plain = [key for key in METRICS if "<" not in key]
    kinds = {"eval": [key for key in plain if key.startswith("eval/")]}
    kinds["train"] = [key for key in plain if key not in kinds["eval"]]
    for steps in STEPS:
        with tempfile.TemporaryDirectory() as root:
            run = Path(root)
            lines = [
                encode(step, kind, dict(zip(keys, rng.random(len(keys)).tolist(), strict=True)))
                for kind, keys in kinds.items()
                for step in range(1, steps + 1, 10 if kind == "eval" else 1)
            ]
            (run / FILE).write_text("".join(lines))
            if not seconds:
                write_report(run)  # fonts are found
            seconds[steps] = cpu_seconds(lambda run=run: write_report(run), 1)
            sizes[steps] = (run / "report.html").stat().st_size
    (cost, exponent), (size, _) = at_full_size(seconds, FULL), at_full_size(sizes, FULL)
    return {
        "report_seconds_at_10000_steps": cost,
        "report_exponent": exponent,
        "report_bytes_at_10000_steps": size,
    }
