"""Writes report.html, one file that shows the results of a run and the evidence for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_rl.config.schema import Config
from moe_rl.disk import write_whole
from moe_rl.report import summary as summary_module
from moe_rl.report import timeline_plots
from moe_rl.report.format import count, duration, percent, points, scientific, seconds
from moe_rl.report.history import read_history
from moe_rl.report.lines import Row, RunLines, pass_rates, read_run, values
from moe_rl.report.metrics import Metric
from moe_rl.report.page import Tile, render
from moe_rl.report.registry import METRICS, find
from moe_rl.report.run_config import flat, read_config
from moe_rl.report.run_plots import FEWEST_PAIRS, panels
from moe_rl.report.sample_lines import SampleLine, read_samples
from moe_rl.report.timeline import read_timeline
from moe_rl.report.tracker_worker import FOLDER, TrackerState, read_state

FILE = "report.html"
_SAMPLES = 4  # per kind on the page
_FULL_COLOUR = 0.2  # difference in nats at which a token has the full colour


LEFT_OUT = "(left out)"
# Texts of summary.json that name no file, machine or prompt.
_SHARED = ("vllm_version", "megatron_core_version", "torch_version", "objective", "replay_mode", "heldout_best_metric")


def write_report(run_dir: Path, share: Path | None = None) -> Path:
    """Write report.html from metrics.jsonl, summary.json and config.yaml of a run folder; return its path.

    The last two may be missing if the run was stopped. The report then says so and computes its numbers from the lines.

    share: write a page for other people there instead. It has no samples, no starts and no trackers, and of the texts
        in config and summary only choices that this version of moe_rl knows, so no prompt, path, host or key. Names
        of rewards, levels and held-out sets stay.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir)
    summary = summary_module.measure(run)
    stored = run_dir / summary_module.FILE
    if stored.exists():
        summary = {**json.loads(stored.read_text(encoding="utf-8")), **summary}
    config = read_config(run_dir)
    path, name = run_dir / FILE, run_dir.name
    if share is not None:
        path, name = share, "One run"
        choices = _choices(Config.model_json_schema())
        config = {section: _shared(keys, choices) for section, keys in config.items()}
        summary = {key: value if key in _SHARED else _shared(value, choices) for key, value in summary.items()}
    text = render(
        "run.html",
        title=f"{name} - moe_rl",
        kicker="moe_rl run report",
        heading=name,
        facts=_facts(run, summary, config),
        warnings=_warnings(run, summary, finished=stored.exists()),
        tiles=_tiles(run, summary),
        panels=[*panels(run), *timeline_plots.panels(read_timeline(run_dir))],
        summary=summary,
        config=[(section, flat(keys).items()) for section, keys in config.items()],
        samples=_samples(read_samples(run_dir)) if share is None else [],
        history=read_history(run_dir) if share is None else [],
        trackers=_trackers(run_dir, run) if share is None else [],
        **_proof(run, summary),
        **_heldout(run),
        **_levels(run),
        **_metrics(run),
    )
    write_whole(path, text)
    return path


def _choices(schema: Any) -> set[str]:
    """Return every text that is one of the choices of a config key."""
    choices = {choice for choice in (*schema.get("enum", ()), schema.get("const")) if isinstance(choice, str)}
    for part in schema.values():
        for inner in part if isinstance(part, list) else [part]:
            if isinstance(inner, dict):
                choices |= _choices(inner)
    return choices


def _shared(value: Any, choices: set[str]) -> Any:
    """Leave out every text that is not one of the choices."""
    if isinstance(value, dict):
        return {key: _shared(inner, choices) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner, choices) for inner in value]
    return LEFT_OUT if isinstance(value, str) and value not in choices else value


def _facts(run: RunLines, summary: dict[str, Any], config: dict[str, Any]) -> list[str]:
    planned = config.get("run", {}).get("steps")
    steps = summary["steps"]
    facts = [f"{steps} steps" if not planned or planned == steps else f"{steps} of {planned} steps"]
    if summary.get("ended_early"):
        facts.append(f"ended early: {summary['ended_early']}")
    elif summary.get("heldout_best_step") is not None:
        rate, step = percent(summary["heldout_best"]), summary["heldout_best_step"]
        facts.append(f"best {summary['heldout_best_metric']} {rate} after step {step}")
    facts.append(f"routing replay {run.mode}" if run.train else "no training step logged")
    if config.get("run", {}).get("replays"):
        facts.append("trained again on the rollouts of another run (--replay)")
    for key, label in (
        ("objective", "{}"),
        ("seed", "seed {}"),
        ("vllm_version", "vLLM {}"),
        ("megatron_core_version", "Megatron-core {}"),
        ("torch_version", "torch {}"),
    ):
        if summary.get(key) is not None:
            facts.append(label.format(summary[key]))
    return facts


def _warnings(run: RunLines, summary: dict[str, Any], *, finished: bool) -> list[str]:
    lost = ", ".join(f"{key} ({times})" for key, times in summary["nonfinite_values"].items())
    due = {
        "The run has not written its summary: it is still running, or it was stopped.": not finished,
        f"The run was ended before its last step: {summary.get('collapse')}.": summary.get("collapse"),
        "The last line of metrics.jsonl is incomplete and was left out.": run.torn,
        f"Values that are not finite were left out of plots and means: {lost}.": lost,
    }
    return [warning for warning, shown in due.items() if shown]


def _tiles(run: RunLines, s: dict[str, Any]) -> list[Tile]:
    tiles = [_pass_rate_tile(s), _policy_kl_tile(run, s)]
    native, shadow = s["routing_native_mismatch"], s["routing_shadow_mismatch_paired"]
    if native is not None and shadow is not None:
        under = "of positions; shadow: what the trainer would choose inside the replayed forward"
        tiles.append(Tile("Routing mismatch, native to shadow", percent(native, 2), under, percent(shadow, 2)))
    elif native is not None:
        tiles.append(Tile("Routing mismatch", percent(native, 2), "of positions, in a native forward"))
    sync, whole = seconds(s["weight_sync_seconds_median"]), duration(s["train_seconds_total"])
    under = f"median; weight sync {sync}; {whole} in total"
    return [*tiles, Tile("Time of a step", seconds(s["step_seconds_median"]), under)]


def _pass_rate_tile(s: dict[str, Any]) -> Tile:
    name = "Held-out pass rate"
    first, last = s["heldout_pass_rate_first"], s["heldout_pass_rate_last"]
    begin, end = s["heldout_step_first"], s["heldout_step_last"]
    if first is None or last is None:
        return Tile(name, "-", "no evaluation was logged")
    if begin == end:
        return Tile(name, percent(first), f"one evaluation, after step {begin}")
    under = f"{points(last - first)}, after step {begin} and after step {end}"
    greedy = s["heldout_pass_rate_greedy_first"], s["heldout_pass_rate_greedy_last"]
    if None not in greedy:
        under += f"; greedy {percent(greedy[0])} to {percent(greedy[1])}"
    return Tile(name, percent(first), under, percent(last))


def _policy_kl_tile(run: RunLines, s: dict[str, Any]) -> Tile:
    native, replay = s["policy_kl_k3_native"], s["policy_kl_k3_replay"]
    if native is not None and replay is not None:
        steps = s["policy_kl_k3_native_steps"]
        under = f"nats/token, both against the same sampler logprobs, paired steps: {steps}"
        under += " (too few to tell)" if steps < FEWEST_PAIRS else ""
        under += f"; tokens of lag {', '.join(run.lags)}" if run.lags else ""
        return Tile("Policy KL k3, native to replay", scientific(native), under, scientific(replay))
    why = {"r3": "native pass not measured", "r2": "routed natively", "off": "replay is off"}[run.mode]
    why = why if run.train else "not measured"
    return Tile("Policy KL k3", scientific(s["policy_kl_k3"]), f"nats/token; {why}")


def _proof(run: RunLines, s: dict[str, Any]) -> dict[str, Any]:
    """Describe the integrity of replay: `checks` with their numbers, and `good` if all passed."""
    if not run.train or run.mode == "off":
        return {"mode": run.mode if run.train else None, "checks": []}
    consumed, expected = s["routes_consumed"], s["routes_expected"]
    once = f"routes consumed exactly once: {count(consumed)} of {count(expected)}"
    checks = [
        (consumed is not None and consumed == expected, once),
        (s["routes_applied_mismatch"] == 0, f"applied mismatch {count(s['routes_applied_mismatch'])}"),
    ]
    good = bool(s["routes_exact_every_step"]) and all(fine for fine, _ in checks)
    fallback, dropped = s["routes_fallback_positions"], s["routes_dropped_sequences"]
    coverage = s["routes_coverage"]
    whole = coverage == 1 and not fallback and not dropped
    # 100% only if exactly 1, so that 0.99999 does not look like 100%
    note = "coverage " + ("not known" if coverage is None else "100%" if coverage == 1 else f"{100 * coverage:.6g}%")
    if not whole:
        note += f" at worst: {count(fallback)} (token, layer) positions routed natively and {count(dropped)} sequences "
        note += "dropped, as the config allows"
    replayed = "Replay (R3) of the sampler's routes" if run.mode == "r3" else "Replay (R2) of the trainer's own routes"
    weak = [f"{claim.replace('_', ' ')} ({steps})" for claim, steps in s["routes_weak_claims"].items()]
    return {"mode": run.mode, "checks": [*checks, (whole, note)], "good": good, "replayed": replayed, "weak": weak}


def _samples(samples: list[SampleLine]) -> list[tuple[str, list[tuple[SampleLine, list[dict[str, Any]]]]]]:
    """Return titles, and samples with their tokens: some of the first step, some of the last, and the most different
    ones."""
    if not samples:
        return []
    first, last = min(sample.step for sample in samples), max(sample.step for sample in samples)
    parts = [(f"Step {step}", [sample for sample in samples if sample.step == step]) for step in sorted({first, last})]
    compared = sorted((sample for sample in samples if sample.mismatch >= 0), key=lambda sample: -sample.mismatch)
    parts.append(("Largest difference of the engines", compared))
    return [(title, [(sample, _tokens(sample)) for sample in ones[:_SAMPLES]]) for title, ones in parts if ones]


def _trackers(run_dir: Path, run: RunLines) -> list[tuple[str, TrackerState, int]]:
    """Return name and state of each tracker, and the number of metric lines to send."""
    names = sorted(path.stem for path in (run_dir / FOLDER).glob("*.json"))
    return [(name, read_state(run_dir, name), len(run.train) + len(run.eval)) for name in names]


def _tokens(sample: SampleLine) -> list[dict[str, Any]]:
    """Return the sampled tokens with their colours, which show how far the engines differ and in how many layers the
    routers do."""
    differences: list[float] | list[None] = sample.differences or [None] * len(sample.pieces)
    tokens = []
    for index, (piece, difference) in enumerate(zip(sample.pieces, differences, strict=True)):
        layers = sample.layers_at(index)
        size = 0.0 if difference is None else min(1.0, abs(difference) / _FULL_COLOUR)  # NaN gives 1
        tooltip = "not compared" if difference is None else f"trainer - sampler {difference:+.4f} nats"
        if layers is not None:
            tooltip += f", {layers} layer{'' if layers == 1 else 's'} differ"
        tokens.append({"text": piece, "colour": round(100 * size), "layers": layers or 0, "said": tooltip})
    return tokens


def _heldout(run: RunLines) -> dict[str, Any]:
    """Return the pass rates of the held-out sets with their intervals, in the first and the last evaluation."""
    shown = _first_and_last(run)
    evaluations = [pass_rates(row) for row in shown]
    rooms = ("pass_rate", "pass_rate_greedy", "source", "pass_at")
    names = {name for rates in evaluations for name in rates if name.partition("/")[0] in rooms}
    sets = []
    for name in sorted(names, key=lambda name: (rooms.index(name.partition("/")[0]), name)):
        room, _, source = name.partition("/")
        title = {"pass_rate": "all", "pass_rate_greedy": "all, greedy", "source": source}.get(room)
        title = title or ", pass@".join(source.rsplit("/", 1))
        sets.append((title, [rates.get(name, [None] * 3) for rates in evaluations]))
    return {"heldout": sets, "heldout_steps": [row["step"] for row in shown]}


def _first_and_last(run: RunLines) -> list[Row]:
    """Return the lines of the first and the last evaluation, or of the only one."""
    return run.eval[:1] + run.eval[1:][-1:]


def _levels(run: RunLines) -> dict[str, Any]:
    """Return the held-out pass rate by level, in the first and the last evaluation."""
    keys = sorted({key for row in run.eval for key in row if key.startswith("eval/level/")})
    shown = _first_and_last(run)
    levels: list[dict[str, Any]] = []
    for key in keys:
        rates: list[Any] = [row.get(key) for row in shown]
        change = rates[1] - rates[0] if len(rates) == 2 and None not in rates else None
        levels.append({"name": key.removeprefix("eval/level/"), "rates": rates, "change": change})
    changes = [(level["change"], level["name"]) for level in levels if level["change"] is not None]
    reading = "One evaluation so far."
    if changes:
        (least, worst), (most, best) = min(changes), max(changes)
        reading = f"Largest change: level {best}, {points(most)}"
        reading += f"; smallest: level {worst}, {points(least)}." if len(changes) > 1 else "."
    return {"levels": levels, "level_steps": [row["step"] for row in shown], "level_reading": reading}


def _metrics(run: RunLines) -> dict[str, Any]:
    """Return every logged metric with its last value, by the first part of its name, and the metrics that were not
    logged."""
    latest: dict[str, tuple[int, float | None]] = {}
    for row in sorted(run.train + run.eval, key=lambda row: row["step"]):
        latest.update({key: (row["step"], value) for key, value in values(row).items()})
    rooms: dict[str, list[tuple[str, Metric, float | None, int, bool]]] = {}
    absent = []
    for metric in METRICS.values():
        keys = sorted(key for key in latest if find(key) is metric)
        if not keys:
            absent.append(metric.key)
        for key in keys:
            step, value = latest[key]
            entry = (key, metric, value, step, _broken(metric.better, value, latest))
            rooms.setdefault(key.partition("/")[0], []).append(entry)
    return {"metrics": rooms, "absent": absent}


def _broken(better: str, value: float | None, latest: dict[str, tuple[int, float | None]]) -> bool:
    _, expected = latest.get("routing/expected", (0, None))
    musts = {"must be 0": 0, "must be 1": 1, "must equal routing/expected": expected}
    return value is None or value != musts.get(better, value)
