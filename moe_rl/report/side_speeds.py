"""Reads the speed of each side of a run, to plan the next one."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from statistics import median

from moe_rl.errors import About, ConfigError
from moe_rl.planning.side_balance import Speeds, sampling_gpus
from moe_rl.report.history import read_history
from moe_rl.report.lines import Row, read_run
from moe_rl.report.run_config import read_config

_TRAINING = ("time/placement", "time/routes", "time/logprobs", "time/train")


def read_speeds(given: str) -> Speeds:
    """Parse the option --speeds: two numbers separated by a comma, or the folder of a run.

    Raises:
        ConfigError: it is neither.
    """
    numbers = []
    with suppress(ValueError):
        numbers = [float(part) for part in given.split(",")]
    if len(numbers) == 2 and all(math.isfinite(number) and number > 0 for number in numbers):
        sampled, trained = numbers
        return Speeds(sampled, trained, "as given")
    if (speeds := measured_speeds(Path(given))) is None:
        expected = "SAMPLED,TRAINED: two numbers above 0; or the folder of a run that has made a step"
        where: About = {"option": "--speeds"}
        raise ConfigError("nothing says how fast the sides are", where=where, got=given, expected=expected)
    return speeds


def measured_speeds(run_dir: Path) -> Speeds | None:
    """Return the speeds of a run: medians over the steps since its last start. None if there are no such steps."""
    starts = read_history(run_dir)
    if not starts:
        return None
    config, last = read_config(run_dir), starts[-1]
    cluster = config.get("cluster") or {}
    rollout = config.get("rollout", {})
    started = max(rollout.get("engines", 1), len(rollout.get("servers") or ()))
    samplers, _ = sampling_gpus(cluster.get("engines"), cluster.get("gpus_per_engine"), started)
    rows = [row for row in read_run(run_dir).train if row["step"] > last.after and _busy(row) > 0]
    rows = [row for row in rows if row["throughput/sampled_tokens_per_second"]]  # in others no request ended
    if not rows:
        return None
    tokens = [row["rollout/sequences"] * row["rollout/completion_tokens_mean"] for row in rows]
    trained = [sum(row[part] for part in _TRAINING) for row in rows]
    return Speeds(
        sampled=median(row["throughput/sampled_tokens_per_second"] / _busy(row) for row in rows) / samplers,
        trained=median(count / seconds for count, seconds in zip(tokens, trained, strict=True)) / last.ranks,
        source=f"measured, medians of {len(rows)} steps of {run_dir}",
    )


def _busy(row: Row) -> float:
    """Return the share of the time and of the samplers' slots that a step's `throughput/sampled_tokens_per_second`
    used. It is 1 if sampling is timed alone.
    """
    return 1.0 - row.get("pipeline/sampler_idle_fraction", 0.0)
