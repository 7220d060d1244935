"""Checks logged metrics against the list in `metrics.py`, and writes that list as a document.

Only listed metrics can be logged, and a metric promised for every step must be logged, so the list is always right.
`make generated` writes the document.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_rl.errors import ArgumentError, did_you_mean
from moe_rl.report.metrics import ALL, FAMILY, MODES, Metric, Mode

METRICS: dict[str, Metric] = {metric.key: metric for metric in ALL}

_EVALUATION_REQUIRED = ("eval/pass_rate",)
_EVALUATION_ALLOWED = ("time/eval",)


def find(key: str) -> Metric | None:
    """Return the metric that describes this key; for a member of a family, that is the family's."""
    if key in METRICS:
        return None if METRICS[key].family else METRICS[key]
    for metric in ALL:
        prefix = metric.key.removesuffix(FAMILY)
        if metric.family and key.startswith(prefix) and len(key) > len(prefix):
            return metric
    return None


def check_step(keys: Iterable[str], *, mode: Mode) -> None:
    """Check the keys of one training line against the registry. mode: replay.mode.

    Raises:
        ValueError: listing every unknown, misplaced or missing key.
    """
    keys = set(keys)
    problems = _unknown(keys)
    for key in sorted(keys):
        metric = find(key)
        if metric is not None and metric.when == "evaluation":
            problems.append(f"{key} belongs to an evaluation line: log it with eval_row")
        if metric is not None and mode not in metric.modes:
            problems.append(
                f"{key} exists only under replay.mode {' or '.join(metric.modes)}, and replay.mode is {mode}"
            )
    problems += [
        f"{metric.key} is missing: it is promised for every step"
        for metric in ALL
        if metric.when == "every step" and not metric.family and metric.key not in keys and mode in metric.modes
    ]
    _refuse(problems, "training metrics")


def check_eval(keys: Iterable[str]) -> None:
    """Check the keys of one evaluation line against the registry.

    Raises:
        ValueError: listing every problem.
    """
    keys = set(keys)
    problems = _unknown(keys)
    for key in sorted(keys):
        metric = find(key)
        if metric is not None and metric.when != "evaluation" and key not in _EVALUATION_ALLOWED:
            problems.append(f"{key} belongs to a training line: log it with step")
    problems += [f"{key} is missing: every evaluation line needs it" for key in _EVALUATION_REQUIRED if key not in keys]
    _refuse(problems, "evaluation metrics")


def _unknown(keys: set[str]) -> list[str]:
    unknown = {key: did_you_mean(key, METRICS) for key in sorted(keys) if find(key) is None}
    return [f"{key} is not a known metric" + (f", {meant}" if meant else "") for key, meant in unknown.items()]


def _refuse(problems: list[str], kind: str) -> None:
    if problems:
        raise ArgumentError(
            f"{kind} do not match the registry",
            got="; ".join(problems),
            do="correct the caller, or add the metric to moe_rl/report/metrics.py",
        )


_ROOMS = {
    "reward": "What the policy earns",
    "rollout": "What the sampler produced",
    "group": "Groups",
    "episode": "Episodes of an environment",
    "pipeline": "The pool of an asynchronous run",
    "policy_kl": "Sampler against trainer: the policy",
    "policy": "Sampler against trainer: single tokens",
    "routing": "Sampler against trainer: the routes",
    "placement": "Where experts lie",
    "objective": "Objective",
    "correction": "Sampler-trainer corrections",
    "optim": "Optimizer",
    "time": "Time",
    "throughput": "Throughput",
    "memory": "Memory",
    "trace": "Routing traces",
    "sync": "Weight sync",
    "eval": "Held-out prompts",
}


def metrics_markdown() -> str:
    """Return docs/generated/metrics.md. A test compares the file with this text."""
    lines = [
        "<!-- `make generated` writes this page from moe_rl/report/metrics.py. Change the text there. -->",
        "",
        "# Metrics",
        "",
        'Each training step is one line of `metrics.jsonl` with `"kind": "train"`, each evaluation one with '
        '`"kind": "eval"`. A value that is not finite is written as `null` and its key is listed under '
        '`nonfinite`. A metric is logged every step unless the column "when" says otherwise.',
        "",
        'There is no single "routing KL". There are four numbers: the policy KL (`policy_kl/*`); the set mismatch '
        "(`routing/native_mismatch` before replay, `routing/shadow_mismatch` inside it); the applied mismatch "
        "(`routing/applied_mismatch`, an integrity check that is 0 by construction and proves no improvement); and the "
        "KL between router distributions, which needs the sampler's router logits: only `moe-rl compare` computes it.",
        "",
        "Compare a `_native` value only with its partner of the same step: both use the same tokens, weights and "
        "sampler logprobs.",
    ]
    for room, title in _ROOMS.items():
        lines += ["", f"## {title}", ""]
        lines += ["| metric | unit, better | when | meaning | a bad value |", "|---|---|---|---|---|"]
        for metric in ALL:
            if metric.key.split("/")[0] == room:
                modes = "" if metric.modes == MODES else f"under {' and '.join(metric.modes)}"
                when = ", ".join(filter(None, (metric.when.removeprefix("every step"), modes)))
                unit = metric.unit if metric.better == "neutral" else f"{metric.unit}, {metric.better}"
                cells = (f"`{metric.key}`", unit, when, metric.meaning, metric.bad)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_markdown(), end="")
