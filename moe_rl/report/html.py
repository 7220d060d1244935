"""report.html: one file that says what a run came to and shows why to believe it. No network, no script."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import yaml

from moe_rl.report import summary as summary_module
from moe_rl.report.format import binary, count, duration, percent, scientific, seconds, short
from moe_rl.report.lines import Run, read_run, write_atomic
from moe_rl.report.page import figure, moved, render, tile
from moe_rl.report.plots import panels
from moe_rl.report.registry import METRICS, find

FILE = "report.html"
CONFIG_FILE = "config.yaml"


def write_report(run_dir: Path) -> Path:
    """Write report.html from metrics.jsonl, summary.json and config.yaml of a run folder; returns its path.

    The last two may be missing (a run that was stopped): the report then says so and measures the lines itself.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir)
    summary = summary_module.measure(run)
    stored = run_dir / summary_module.FILE
    if stored.exists():
        summary = {**json.loads(stored.read_text(encoding="utf-8")), **summary}
    config_file = run_dir / CONFIG_FILE
    config = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.exists() else None
    body = "\n".join(
        [
            _header(run_dir, run, summary, config, finished=stored.exists()),
            _tiles(run, summary),
            _proof(run, summary),
            "<h2>What happened</h2>",
            _plots(run),
            _metric_table(run),
            _config_table(config),
            _fact_table(summary),
        ]
    )
    path = run_dir / FILE
    write_atomic(path, render(f"{run_dir.name} - moe_rl", body))
    return path


def _header(run_dir: Path, run: Run, summary: dict[str, Any], config: dict | None, *, finished: bool) -> str:
    planned = ((config or {}).get("run") or {}).get("steps")
    steps = summary["steps"]
    facts = [f"{steps} steps" if not planned or planned == steps else f"{steps} of {planned} steps"]
    facts.append(f"routing replay {run.mode}" if run.train else "no training step logged")
    for key, label in (
        ("objective", "{}"),
        ("seed", "seed {}"),
        ("vllm_version", "vLLM {}"),
        ("megatron_core_version", "Megatron-core {}"),
        ("torch_version", "torch {}"),
    ):
        if summary.get(key) is not None:
            facts.append(label.format(summary[key]))
    warnings = []
    if not finished:
        warnings.append("The run did not write its summary: it is still going on, or it was stopped.")
    if summary.get("collapse"):
        warnings.append(f"The run was ended before its last step: {summary['collapse']}.")
    if run.torn:
        warnings.append("The last line of metrics.jsonl was cut short and is left out.")
    if summary["nonfinite_values"]:
        listed = ", ".join(f"{key} ({times})" for key, times in summary["nonfinite_values"].items())
        warnings.append(f"Values that were not finite, left out of plots and means: {listed}.")
    notes = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings)
    return (
        f'<header><p class="kicker">moe_rl run report</p><h1>{escape(run_dir.name)}</h1>'
        f'<p class="facts">{" &middot; ".join(escape(fact) for fact in facts)}</p>{notes}</header>'
    )


def _tiles(run: Run, s: dict[str, Any]) -> str:
    tiles = [_pass_rate_tile(s), _policy_kl_tile(run, s)]
    native, shadow = s["routing_native_mismatch"], s["routing_shadow_mismatch_paired"]
    if native is not None and shadow is not None:
        under = "of positions; shadow: what the trainer would choose inside the replayed forward"
        tiles.append(tile("Routing mismatch, native to shadow", moved(percent(native, 2), percent(shadow, 2)), under))
    elif native is not None:
        tiles.append(tile("Routing mismatch", percent(native, 2), "of positions, in a native forward"))
    sync, whole = seconds(s["weight_sync_seconds_median"]), duration(s["train_seconds_total"])
    under = f"median; weight sync {sync}; {whole} in all"
    tiles.append(tile("Time of a step", seconds(s["step_seconds_median"]), under))
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _pass_rate_tile(s: dict[str, Any]) -> str:
    name = "Held-out pass rate"
    first, last = s["heldout_pass_rate_first"], s["heldout_pass_rate_last"]
    begin, end = s["heldout_step_first"], s["heldout_step_last"]
    if first is None or last is None:
        return tile(name, "-", "no evaluation was logged", lead=True)
    if begin == end:
        return tile(name, percent(first), f"one evaluation, after step {begin}", lead=True)
    under = f"{100 * (last - first):+.1f} points, after step {begin} and after step {end}"
    greedy = s["heldout_pass_rate_greedy_first"], s["heldout_pass_rate_greedy_last"]
    if None not in greedy:
        under += f"; greedy {percent(greedy[0])} to {percent(greedy[1])}"
    return tile(name, moved(percent(first), percent(last)), under, lead=True)


def _policy_kl_tile(run: Run, s: dict[str, Any]) -> str:
    native, replay = s["policy_kl_k3_native"], s["policy_kl_k3_replay"]
    if native is not None and replay is not None:
        steps = s["policy_kl_k3_native_steps"]
        under = f"nats/token, both against the same sampler logprobs, on {steps} paired steps"
        return tile("Policy KL k3, native to replay", moved(scientific(native), scientific(replay)), under)
    why = {"r3": "native pass not measured", "r2": "routed natively", "off": "replay is off"}[run.mode]
    why = why if run.train else "not measured"
    return tile("Policy KL k3", scientific(s["policy_kl_k3"]), f"nats/token; {why}")


def _proof(run: Run, s: dict[str, Any]) -> str:
    """The integrity of replay, each check with its number."""
    if not run.train:
        return ""
    if run.mode == "off":
        return (
            '<section class="proof off"><b>Replay is off.</b> The trainer chose its own experts; there are '
            "no replayed routes to account for.</section>"
        )
    consumed, expected = s["routes_consumed"], s["routes_expected"]
    checks = [
        (
            consumed is not None and consumed == expected,
            f"routes consumed exactly once: {count(consumed)} of {count(expected)}",
        ),
        (s["routes_applied_mismatch"] == 0, f"applied mismatch {count(s['routes_applied_mismatch'])}"),
    ]
    fallback, dropped = s["routes_fallback_positions"], s["routes_dropped_sequences"]
    whole = s["routes_coverage"] == 1 and not fallback and not dropped
    note = f"coverage {_exact_percent(s['routes_coverage'])}"
    if not whole:
        note += (
            f" at worst: {count(fallback)} (token, layer) positions routed natively and {count(dropped)} sequences "
            "dropped, as the config allows"
        )
    kind = "Replay (R3) of the sampler's routes" if run.mode == "r3" else "Replay (R2) of the trainer's own routes"
    good = bool(s["routes_exact_every_step"]) and all(ok for ok, _ in checks)
    items = "".join(
        f'<li class="{"ok" if ok else "bad"}">{"&#10003;" if ok else "&#10007;"} {escape(text)}</li>'
        for ok, text in (*checks, (whole, note))
    )
    verdict = (
        f"{kind} was exact on every step" if good else f"{kind} was NOT exact on every step: do not trust this run"
    )
    return (
        f'<section class="proof {"ok" if good else "bad"}"><p><b>{verdict}</b></p><ul>{items}</ul>'
        '<p class="under">These check that replay did what it should. That it helps is shown by the policy KL, '
        "not by them.</p></section>"
    )


def _exact_percent(value: float | None) -> str:
    """100% only for exactly 1, so that 0.99999 does not pass for it."""
    if value is None:
        return "not known"
    return "100%" if value == 1 else f"{100 * value:.6g}%"


def _plots(run: Run) -> str:
    first, *rest = [figure(panel) for panel in panels(run)]
    return f'<div class="plots">{"".join([first, _levels(run), *rest])}</div>'


def _levels(run: Run) -> str:
    """Held-out pass rate by level, first and last evaluation, laid out as one of the plots."""
    head = (
        '<figure id="levels"><h3>Held-out pass rate by level</h3>'
        '<p class="direction">fraction of completions, higher is better</p>'
    )
    levels = sorted({key for row in run.eval for key in row if key.startswith("eval/level/")})
    if not levels:
        return head + '<figcaption class="said">No evaluation told levels apart.</figcaption></figure>'
    shown = run.eval[:1] if len(run.eval) == 1 else [run.eval[0], run.eval[-1]]
    rows, changes = [], []
    for key in levels:
        name, values = key.removeprefix("eval/level/"), [row.get(key) for row in shown]
        cells = "".join(f"<td class=n>{percent(value)}</td>" for value in values)
        if len(values) == 2 and None not in values:
            changes.append((values[1] - values[0], name))
            cells += f"<td class=n>{100 * changes[-1][0]:+.1f} points</td>"
        elif len(values) == 2:
            cells += "<td class=n>-</td>"
        bar = f'<span class="bar"><i style="width:{100 * (values[-1] or 0):.1f}%"></i></span>'
        rows.append(f"<tr><td>{escape(name)}</td>{cells}<td class=bars>{bar}</td></tr>")
    titles = "".join(f"<th class=n>step {row['step']}</th>" for row in shown) + (
        "<th class=n>change</th>" if len(shown) == 2 else ""
    )
    reading = "One evaluation so far."
    if changes:
        (least, worst), (most, best) = min(changes), max(changes)
        reading = f"Largest change: {best}, {100 * most:+.1f} points"
        reading += f"; smallest: {worst}, {100 * least:+.1f} points." if len(changes) > 1 else "."
    return (
        f"{head}<table><thead><tr><th>level</th>{titles}<th class=bars></th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
        f"<figcaption>{escape(reading)}</figcaption></figure>"
    )


def _metric_table(run: Run) -> str:
    """Every metric that was logged, in registry order, with its last value."""
    latest: dict[str, tuple[int, float | None]] = {}
    for row in sorted(run.train + run.eval, key=lambda row: row["step"]):
        latest.update(
            {key: (row["step"], value) for key, value in row.items() if key not in ("step", "kind", "nonfinite")}
        )
    order = list(METRICS.values())
    rows, absent = [], []
    for metric in order:
        keys = sorted(key for key in latest if find(key) is metric)
        if not keys:
            absent.append(metric.key)
        for key in keys:
            step, value = latest[key]
            broken = _broken(metric.better, value, latest)
            shown = "not finite" if value is None else binary(value) if metric.unit == "bytes" else short(value)
            rows.append(
                f"<tr{' class=broken' if broken else ''}><td><code>{escape(key).replace('/', '/<wbr>')}</code></td>"
                f"<td class=n>{shown}</td>"
                f"<td>{escape(metric.unit)}</td><td class=n>{step}</td><td>{escape(metric.better)}</td>"
                f'<td>{escape(metric.meaning)} <span class="under">{escape(metric.bad)}</span></td></tr>'
            )
    missing = (
        (
            '<p class="under">Not logged in this run: '
            + ", ".join(f"<code>{escape(key)}</code>" for key in absent)
            + ".</p>"
        )
        if absent
        else ""
    )
    return (
        "<h2>Every metric, last value</h2><table><thead><tr><th>metric</th><th class=n>last</th><th>unit</th>"
        "<th class=n>step</th><th>better</th><th>meaning, and what a bad value means</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{missing}"
    )


def _broken(better: str, value: float | None, latest: dict[str, tuple[int, float | None]]) -> bool:
    if value is None:
        return True
    if better == "must equal routing/expected":
        return value != latest.get("routing/expected", (0, None))[1]
    return (better == "must be 0" and value != 0) or (better == "must be 1" and value != 1)


def _config_table(config: dict | None) -> str:
    if config is None:
        return f"<h2>Config</h2><p>The run folder holds no {CONFIG_FILE}.</p>"
    sections = []
    for section, values in config.items():
        rows = "".join(
            f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(_plain(value))}</code></td></tr>"
            for key, value in _flat(values if isinstance(values, dict) else {"": values})
        )
        sections.append(f'<div><h3>{escape(str(section))}</h3><table class="small">{rows}</table></div>')
    return f'<h2>Resolved config</h2><div class="config">{"".join(sections)}</div>'


def _flat(values: dict, prefix: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in values.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return flat


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _fact_table(summary: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(_plain(value))}</code></td></tr>"
        for key, value in summary.items()
    )
    return (
        "<h2>Summary</h2><details open><summary>summary.json, as scripts read it; null means not measured</summary>"
        f'<table class="small">{rows}</table></details>'
    )
