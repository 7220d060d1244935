"""Draws each plot of a run with a sentence that interprets it. If nothing was measured, the sentence says so."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import matplotlib
import numpy as np

from moe_rl.report.figures import (
    BLUE,
    CYAN,
    GREEN,
    GREY,
    INK,
    MOST_MARKS,
    ORANGE,
    PHASES,
    PURPLE,
    RED,
    STYLE,
    Panel,
    band,
    figure_of,
    from_zero,
    in_percent,
    line,
    missing,
    panel_of,
    stacked_bars,
    thinned,
)
from moe_rl.report.format import binary, percent, points, scientific, short
from moe_rl.report.lines import RunLines

_CYCLE = (GREEN, PURPLE, CYAN, ORANGE, RED, GREY)

FEWEST_PAIRS = 3
"""With fewer steps that measured both passes, the pages do not say that replay lowers the KL."""


def panels(run: RunLines) -> list[Panel]:
    """Return every plot of the report, in reading order."""
    with matplotlib.rc_context(STYLE):
        return [draw(run) for draw in _PANELS]


def _pass_rate(run: RunLines) -> Panel:
    name, title, direction = "pass-rate", "Pass rate", "fraction of completions, higher is better"
    steps, train = run.series("reward/pass_rate")
    held_steps, held = run.series("eval/pass_rate", "eval")
    greedy_steps, greedy = run.series("eval/pass_rate_greedy", "eval")
    if not steps and not held_steps:
        return missing(name, title, direction, "No training step and no evaluation was logged.")
    figure, axes = figure_of()
    if steps:
        line(axes, steps, train, BLUE, "training prompts", alpha=0.55, linewidth=1.3)
    if greedy_steps:
        line(
            axes,
            greedy_steps,
            greedy,
            PURPLE,
            "held-out, greedy",
            marker="D",
            markersize=4,
            linestyle=(0, (2, 2)),
            linewidth=1.2,
        )
    if held_steps:
        low_steps, low = run.series("eval/low/pass_rate", "eval")
        band(axes, low_steps, low, run.series("eval/high/pass_rate", "eval")[1], GREEN, 0.12)
        line(axes, held_steps, held, GREEN, "held-out, sampled", marker="o", markersize=5.5, linewidth=2.2)
    axes.set_ylim(0, 1)
    in_percent(axes)
    if len(held) >= 2:
        reading = (
            f"On prompts never trained on, the pass rate went from {percent(held[0])} (step {held_steps[0]}) to "
            f"{percent(held[-1])} (step {held_steps[-1]}): {points(held[-1] - held[0])}."
        )
    elif held:
        reading = f"One evaluation so far, after step {held_steps[0]}: {percent(held[0])}."
    else:
        reading = "No evaluation was logged: training prompts alone do not show what was learned."
    return panel_of(name, title, direction, reading, figure)


def _rewards(run: RunLines) -> Panel:
    name, title, direction = "reward", "Reward and its parts", "mean per completion, higher is better"
    steps, mean = run.series("reward/mean")
    parts = sorted({key for row in run.train for key in row if key.startswith("reward/part/")})
    if not steps:
        return missing(name, title, direction, "No reward was logged.")
    figure, axes = figure_of()
    for color, key in zip(_CYCLE * (1 + len(parts) // len(_CYCLE)), parts, strict=False):
        line(axes, *run.series(key), color, f"{key.removeprefix('reward/part/')} (unweighted)", linewidth=1.3)
    line(axes, steps, mean, BLUE, "weighted sum", linewidth=2.2)
    failed = sum(run.series("reward/failed_verdicts")[1])
    reading = f"Mean reward went from {short(round(mean[0], 3))} to {short(round(mean[-1], 3))}. " + (
        f"{failed:.0f} verifications failed and are left out." if failed else "No verification failed."
    )
    return panel_of(name, title, direction, reading, figure)


def _spread(run: RunLines) -> Panel:
    name, title = "spread", "Distribution of reward and length"
    direction = "quantiles over the completions of a step; bands hold 50% and 90% of them; higher rewards are better"
    families = (("reward", "reward/quantile"), ("tokens", "rollout/completion_tokens_quantile"))
    if not run.series(f"{families[0][1]}/p50")[0]:
        return missing(name, title, direction, "No quantiles were logged.")
    figure, both = figure_of(rows=2)
    reading = []
    for axes, colour, (label, family) in zip(both, (BLUE, GREEN), families, strict=True):
        steps, middle = run.series(f"{family}/p50")
        for low, high, alpha in (("p05", "p95", 0.15), ("p25", "p75", 0.3)):
            band(axes, steps, run.series(f"{family}/{low}")[1], run.series(f"{family}/{high}")[1], colour, alpha)
        line(axes, steps, middle, colour, None)
        axes.set_ylabel(label)
        least, most = (run.series(f"{family}/{end}")[1][-1] for end in ("p05", "p95"))
        reading.append(f"{label} {short(round(least, 3))} to {short(round(most, 3))}, median {short(middle[-1])}")
    return panel_of(name, title, direction, f"In the last step: {'; '.join(reading)}.", figure)


def _memory(run: RunLines) -> Panel:
    name, title = "memory", "Memory of a training rank"
    direction = "largest so far on the fullest rank, GiB, lower is better"
    steps, host = run.series("memory/host_peak_bytes")
    gpu_steps, gpu = run.series("memory/device_peak_bytes")
    if not steps:
        return missing(name, title, direction, "No memory was logged.")
    figure, axes = figure_of()
    line(axes, steps, [one / 2**30 for one in host], GREY, "host")
    reading = f"Host: {binary(host[-1])}"
    if gpu_steps:
        line(axes, gpu_steps, [one / 2**30 for one in gpu], PURPLE, "GPU, reserved by PyTorch")
        reading += f"; GPU: {binary(gpu[-1])}"
    from_zero(axes)
    return panel_of(name, title, direction, reading + ("." if gpu_steps else "; no GPU trains."), figure)


def _policy_kl(run: RunLines) -> Panel:
    name, title = "policy-kl", "Policy KL between sampler and trainer"
    direction = "k3 estimate of KL(rollout || trainer), nats/token, log axis, lower is better"
    steps, trained = run.series("policy_kl/k3")
    if not steps:
        return missing(name, title, direction, "No policy KL was logged.")
    pair_steps, native, partner = run.paired("policy_kl/k3_native", "policy_kl/k3")
    figure, axes = figure_of()
    label, color = ("with replay (as trained)", BLUE) if run.replay else ("native routing (as trained)", ORANGE)
    positive = [(s, v) for s, v in zip(steps, trained, strict=True) if v > 0]
    if positive:
        axes.set_yscale("log")
    line(axes, [s for s, _ in positive], [v for _, v in positive], color, label)
    if run.replay and pair_steps:
        kept = thinned(native, partner, most=MOST_MARKS)
        at, high, low = (np.asarray(values)[kept] for values in (pair_steps, native, partner))
        axes.vlines(at, low, high, color=INK, alpha=0.25, linewidth=1)
        axes.plot(at, low, "o", color=BLUE, markersize=5)
        axes.plot(at, high, "o", color=ORANGE, markersize=5.5, label="native routing, same step")
    if not run.replay:
        average = scientific(statistics.fmean(trained))
        reading = f"Replay is {run.mode}: this pass of the trainer routes natively, at {average} on average."
    elif not pair_steps:
        reading = "The native pass was not measured (replay.native_every), so what replay removes is not known."
    else:
        before, after = statistics.fmean(native), statistics.fmean(partner)
        lower = sum(b > a for b, a in zip(native, partner, strict=True))
        ratio = f", {before / after:.1f} times lower" if 0 < after < before else ""
        found = f"{ratio}; lower under replay on {lower} of {len(pair_steps)}"
        reading = (
            f"In steps with both passes ({len(pair_steps)}): {scientific(before)} native, {scientific(after)} with "
            f"replay{found if len(pair_steps) >= FEWEST_PAIRS else ': too few to tell'}."
        )
    if run.lags:
        means = ((lag, run.series(f"policy_kl/k3_lag/{lag}")[1]) for lag in run.lags)
        said = ", ".join(f"lag {lag}: {scientific(statistics.fmean(values))}" for lag, values in means if values)
        reading += f" Tokens of older weights add to it; means by lag in versions: {said}."
    if len(positive) < len(steps):
        reading += f" {len(steps) - len(positive)} values that are not above 0 are not shown on the log axis."
    return panel_of(name, title, direction, reading, figure)


def _routing(run: RunLines) -> Panel:
    name, title = "routing", "Routing mismatch"
    direction = "(token, MoE layer) positions whose expert set differs from the recorded one, lower is better"
    steps, shadow = run.series("routing/shadow_mismatch")
    native_steps, native = run.series("routing/native_mismatch")
    token_steps, token = run.series("routing/native_token_mismatch")
    if not steps and not native_steps:
        why = "replay is off and no native pass compared its routes" if not run.replay else "no mismatch was logged"
        return missing(name, title, direction, f"Not measured: {why}.")
    figure, axes = figure_of()
    if native_steps:
        marker = "o" if run.replay else None
        line(axes, native_steps, native, ORANGE, "native forward", marker=marker, markersize=5, linewidth=1.4)
    if steps:
        line(axes, steps, shadow, BLUE, "shadow choice inside replay")
    from_zero(axes)
    in_percent(axes)
    parts = []
    if native_steps:
        parts.append(
            "Routing natively, the trainer picks another expert set at "
            f"{percent(statistics.fmean(native), 2)} of positions"
        )
        if token_steps:
            parts[-1] += f" ({percent(statistics.fmean(token))} of tokens in at least one layer)"
    _, _, paired = run.paired("routing/native_mismatch", "routing/shadow_mismatch")
    if paired:
        parts.append(
            f"inside the replayed forward it would at {percent(statistics.fmean(paired), 2)}. The "
            "difference is the effect of earlier layers; the rest is the disagreement of each router"
        )
    elif steps:
        parts.append(
            "Inside the replayed forward the trainer would pick another set at "
            f"{percent(statistics.fmean(shadow), 2)} of positions; "
            "the native pass was not measured (replay.native_every)"
        )
    elif not run.replay:
        parts.append(
            "replay is off, so nothing corrects it"
            if run.mode == "off"
            else "R2 makes the updates of a step agree with this pass, not with the sampler"
        )
    return panel_of(name, title, direction, "; ".join(parts) + ".", figure)


def _extreme(run: RunLines) -> Panel:
    name, title = "extreme", "Extreme tokens"
    direction = (
        "fraction of tokens whose probability differs between the engines by more than a factor of 2, lower is better"
    )
    steps, trained = run.series("policy/extreme_fraction")
    if not steps:
        return missing(name, title, direction, "No extreme fraction was logged.")
    native_steps, native, partner = run.paired("policy/extreme_fraction_native", "policy/extreme_fraction")
    if not any(trained) and not any(native):
        return missing(
            name,
            title,
            direction,
            f"Zero on all {len(steps)} steps: no token differed by that much, so there is nothing to plot.",
        )
    figure, axes = figure_of()
    if run.replay and native_steps:
        line(axes, native_steps, native, ORANGE, "native routing, same step", marker="o", markersize=5, linewidth=1.2)
    line(
        axes,
        steps,
        trained,
        BLUE if run.replay else ORANGE,
        "with replay (as trained)" if run.replay else "native routing (as trained)",
    )
    from_zero(axes)
    in_percent(axes)
    reading = (
        f"{percent(statistics.fmean(trained), 3)} of tokens on average as trained, {percent(max(trained), 3)} at worst"
    )
    if run.replay and native_steps:
        reading += (
            f"; on the steps with both passes {percent(statistics.fmean(native), 3)} native against "
            f"{percent(statistics.fmean(partner), 3)} with replay"
        )
    return panel_of(name, title, direction, reading + ".", figure)


def _entropy(run: RunLines) -> Panel:
    name, title = "entropy", "Entropy and perplexity"
    direction = (
        "nats per token (above), perplexity of the sampled tokens in both engines (below): neither is good or bad"
    )
    steps, entropy = run.series("policy/entropy")
    if not steps:
        return missing(name, title, direction, "No entropy was logged.")
    figure, (upper, lower) = figure_of(rows=2)
    line(upper, steps, entropy, PURPLE, None)
    upper.set_ylabel("entropy")
    from_zero(upper)
    line(lower, *run.series("policy/perplexity_rollout"), GREEN, "sampler", linewidth=2.6, alpha=0.5)
    line(lower, *run.series("policy/perplexity_train"), BLUE, "trainer", linewidth=1.2)
    lower.set_ylabel("perplexity")
    apart = run.series("policy/log_perplexity_abs_diff")[1]
    reading = f"Entropy went from {entropy[0]:.3f} to {entropy[-1]:.3f} nats per token."
    if apart:
        reading += f" The engines' log-perplexities of a sequence differ by {scientific(statistics.fmean(apart))} nats."
    return panel_of(name, title, direction, reading, figure)


def _length(run: RunLines) -> Panel:
    name, title = "length", "Completion length and truncation"
    direction = "mean tokens (above), truncated fraction (below): lower truncation is better"
    steps, length = run.series("rollout/completion_tokens_mean")
    if not steps:
        return missing(name, title, direction, "No completion was logged.")
    cut_steps, cut = run.series("rollout/truncated_fraction")
    figure, (upper, lower) = figure_of(rows=2)
    line(upper, steps, length, BLUE, None)
    upper.set_ylabel("tokens")
    from_zero(upper)
    line(lower, cut_steps, cut, ORANGE, None)
    lower.set_ylabel("truncated")
    from_zero(lower, least=0.05)
    in_percent(lower)
    last = (
        f" {percent(cut[0])} of completions were truncated in the first step, {percent(cut[-1])} in the last."
        if cut
        else ""
    )
    return panel_of(
        name, title, direction, f"From {length[0]:.1f} to {length[-1]:.1f} tokens per completion.{last}", figure
    )


def _update(run: RunLines) -> Panel:
    name, title, direction = (
        "update",
        "Gradient norm and clip fraction",
        "no direction is good in itself; spikes are bad",
    )
    steps, norm = run.series("optim/grad_norm")
    clip_steps, clip = run.series("objective/clip_fraction")
    if not steps and not clip_steps:
        return missing(name, title, direction, "No update was logged.")
    figure, (upper, lower) = figure_of(rows=2)
    if steps:
        line(upper, steps, norm, BLUE, None)
        from_zero(upper)
    upper.set_ylabel("gradient norm")
    if clip_steps:
        line(lower, clip_steps, clip, PURPLE, None)
        from_zero(lower, least=0.05)
    lower.set_ylabel("clipped")
    in_percent(lower)
    skipped = sum(run.series("optim/skipped")[1])
    reading = (
        f"Median norm {short(round(statistics.median(norm), 3))}, largest {short(round(max(norm), 3))}. "
        if norm
        else ""
    )
    reading += f"{percent(statistics.fmean(clip))} of ratios clipped on average. " if clip else ""
    reading += f"{skipped:.0f} updates were skipped." if skipped else "No update was skipped."
    return panel_of(name, title, direction, reading, figure)


def _time(run: RunLines) -> Panel:
    name, title, direction = "time", "Time per phase", "seconds per step, lower is better"
    if not run.train:
        return missing(name, title, direction, "No step was logged.", wide=True)
    timed = [(phase, color, [row.get(f"time/{phase}") or 0.0 for row in run.train]) for phase, color in PHASES]
    timed = [part for part in timed if any(part[2])]
    if not timed:
        return missing(name, title, direction, "No phase took any time.", wide=True)
    figure, axes = figure_of(wide=True)
    bars = stacked_bars(axes, [row["step"] for row in run.train], timed)
    axes.set_ylabel("seconds")
    axes.grid(axis="x", visible=False)
    totals = {phase: sum(seconds) for phase, _, seconds in timed}
    whole = sum(totals.values())
    shares = ", ".join(
        f"{phase} {percent(seconds / whole, 0)}"
        for phase, seconds in sorted(totals.items(), key=lambda item: -item[1])[:3]
    )
    sync = run.series("time/sync")[1]
    reading = f"Median step {statistics.median(run.series('time/step')[1]):.2f} s. Longest phases: {shares}."
    if sync:
        reading += f" A weight sync takes {statistics.median(sync):.2f} s."
    if bars < len(run.train):
        reading += f" {bars} of {len(run.train)} steps are drawn: the fastest and the slowest among their neighbours."
    return panel_of(name, title, direction, reading, figure, wide=True)


def _throughput(run: RunLines) -> Panel:
    name, title, direction = "throughput", "Throughput", "tokens per second of each phase, higher is better"
    steps, sampled = run.series("throughput/sampled_tokens_per_second")
    train_steps, trained = run.series("throughput/trained_tokens_per_second")
    if not steps and not train_steps:
        return missing(name, title, direction, "No throughput was logged.")
    mfu_steps, mfu = run.series("throughput/mfu")
    figure, axes = figure_of(rows=2 if mfu else 1)
    readings = []
    if mfu:
        axes, lower = axes
        line(lower, mfu_steps, mfu, PURPLE, "model FLOPs utilization of training")
        in_percent(lower)
        from_zero(lower)
    if steps:
        line(axes, steps, sampled, BLUE, "sampled, per second of sampling")
        readings.append(f"{statistics.median(sampled):,.0f} tokens/s sampled")
    if train_steps:
        line(axes, train_steps, trained, GREEN, "trained, per second of training")
        readings.append(f"{statistics.median(trained):,.0f} tokens/s trained")
    from_zero(axes)
    reading = "Medians: " + ", ".join(readings) + ". "
    if mfu:
        reading += f"Training uses {percent(statistics.median(mfu))} of what its devices can do (MFU)."
    else:
        reading += "No MFU: the peak of this device in this precision is not known."
    return panel_of(name, title, direction, reading, figure)


def _canary(run: RunLines) -> Panel:
    name, title = "canary", "Canary after each weight sync"
    direction = "mean |logprob difference| of some fixed tokens between both engines, nats, lower is better"
    steps, difference = run.series("sync/canary_abs_diff")
    if not steps:
        return missing(name, title, direction, "No canary was scored.")
    figure, axes = figure_of()
    line(axes, steps, difference, CYAN, None)
    from_zero(axes)
    reading = (
        f"Median {scientific(statistics.median(difference))}, largest {scientific(max(difference))} nats. "
        "Stale or damaged weights in the sampler would show as a jump that stays."
    )
    return panel_of(name, title, direction, reading, figure)


_PANELS: tuple[Callable[[RunLines], Panel], ...] = (
    _pass_rate,
    _rewards,
    _spread,
    _length,
    _policy_kl,
    _routing,
    _extreme,
    _entropy,
    _update,
    _canary,
    _throughput,
    _memory,
    _time,
)
