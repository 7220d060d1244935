"""Draws each plot of a run with a sentence that interprets it. If nothing was measured, the sentence says so."""

from __future__ import annotations

from statistics import fmean, median

import matplotlib
import numpy as np
from matplotlib.figure import Figure

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
    panel,
    stacked_bars,
    thinned,
)
from moe_rl.report.format import binary, percent, points, scientific, short
from moe_rl.report.lines import RunLines

_CYCLE = (GREEN, PURPLE, CYAN, ORANGE, RED, GREY)

FEWEST_PAIRS = 3
"""With fewer steps that measured both passes, the pages do not say that replay lowers the KL."""

Drawn = str | tuple[str, Figure]


def panels(run: RunLines) -> list[Panel]:
    """Return every plot of the report, in reading order."""
    drawing = (_pass_rate, _rewards, _spread, _length, _policy_kl, _routing, _extreme, _entropy, _update, _canary)
    with matplotlib.rc_context(STYLE):
        return [draw(run) for draw in (*drawing, _throughput, _memory, _time)]


@panel("pass-rate", "Pass rate", "fraction of completions, higher is better")
def _pass_rate(run: RunLines) -> Drawn:
    steps, held = run.series("eval/pass_rate", "eval")
    train, greedy = run.series("reward/pass_rate"), run.series("eval/pass_rate_greedy", "eval")
    if not train[0] and not steps:
        return "No training step and no evaluation was logged."
    figure, axes = figure_of()
    line(axes, *train, BLUE, "training prompts", alpha=0.55, linewidth=1.3)
    dashed = (0, (2, 2))
    line(axes, *greedy, PURPLE, "held-out, greedy", marker="D", markersize=4, linestyle=dashed, linewidth=1.2)
    if steps:
        low, high = run.series("eval/low/pass_rate", "eval"), run.series("eval/high/pass_rate", "eval")
        band(axes, *low, high[1], GREEN, 0.12)
    line(axes, steps, held, GREEN, "held-out, sampled", marker="o", markersize=5.5, linewidth=2.2)
    axes.set_ylim(0, 1)
    in_percent(axes)
    if len(held) >= 2:
        return (
            f"On prompts never trained on, the pass rate went from {percent(held[0])} (step {steps[0]}) to "
            f"{percent(held[-1])} (step {steps[-1]}): {points(held[-1] - held[0])}."
        ), figure
    if held:
        return f"One evaluation so far, after step {steps[0]}: {percent(held[0])}.", figure
    return "No evaluation was logged: training prompts alone do not show what was learned.", figure


@panel("reward", "Reward and its parts", "mean per completion, higher is better")
def _rewards(run: RunLines) -> Drawn:
    steps, mean = run.series("reward/mean")
    parts = sorted({key for row in run.train for key in row if key.startswith("reward/part/")})
    if not steps:
        return "No reward was logged."
    figure, axes = figure_of()
    for color, key in zip(_CYCLE * (1 + len(parts) // len(_CYCLE)), parts, strict=False):
        line(axes, *run.series(key), color, f"{key.removeprefix('reward/part/')} (unweighted)", linewidth=1.3)
    line(axes, steps, mean, BLUE, "weighted sum", linewidth=2.2)
    failed = sum(run.series("reward/failed_verdicts")[1])
    lost = f"{failed:.0f} verifications failed and are left out." if failed else "No verification failed."
    return f"Mean reward went from {short(round(mean[0], 3))} to {short(round(mean[-1], 3))}. {lost}", figure


@panel(
    "spread",
    "Distribution of reward and length",
    "quantiles over the completions of a step; bands hold 50% and 90% of them; higher rewards are better",
)
def _spread(run: RunLines) -> Drawn:
    families = (("reward", "reward/quantile", BLUE), ("tokens", "rollout/completion_tokens_quantile", GREEN))
    if not run.series(f"{families[0][1]}/p50")[0]:
        return "No quantiles were logged."
    figure, plots = figure_of(rows=2)
    reading = []
    for axes, (label, family, colour) in zip(plots, families, strict=True):
        steps, middle = run.series(f"{family}/p50")
        ends = {end: run.series(f"{family}/{end}")[1] for end in ("p05", "p25", "p75", "p95")}
        band(axes, steps, ends["p05"], ends["p95"], colour, 0.15)
        band(axes, steps, ends["p25"], ends["p75"], colour, 0.3)
        line(axes, steps, middle, colour, None)
        axes.set_ylabel(label)
        least, most = (short(round(ends[end][-1], 3)) for end in ("p05", "p95"))
        reading.append(f"{label} {least} to {most}, median {short(middle[-1])}")
    return f"In the last step: {'; '.join(reading)}.", figure


@panel(
    "length",
    "Completion length and truncation",
    "mean tokens (above), truncated fraction (below): lower truncation is better",
)
def _length(run: RunLines) -> Drawn:
    steps, length = run.series("rollout/completion_tokens_mean")
    if not steps:
        return "No completion was logged."
    cut = run.series("rollout/truncated_fraction")
    figure, (upper, lower) = figure_of(rows=2)
    line(upper, steps, length, BLUE, None)
    upper.set_ylabel("tokens")
    from_zero(upper)
    line(lower, *cut, ORANGE, None)
    lower.set_ylabel("truncated")
    from_zero(lower, least=0.05, percent=True)
    reading = f"From {length[0]:.1f} to {length[-1]:.1f} tokens per completion."
    if cut[1]:
        first, last = percent(cut[1][0]), percent(cut[1][-1])
        reading += f" {first} of completions were truncated in the first step, {last} in the last."
    return reading, figure


@panel(
    "policy-kl",
    "Policy KL between sampler and trainer",
    "k3 estimate of KL(rollout || trainer), nats/token, log axis, lower is better",
)
def _policy_kl(run: RunLines) -> Drawn:
    steps, trained = run.series("policy_kl/k3")
    if not steps:
        return "No policy KL was logged."
    pair_steps, native, partner = run.paired("policy_kl/k3_native", "policy_kl/k3")
    figure, axes = figure_of()
    label, color = ("with replay (as trained)", BLUE) if run.replay else ("native routing (as trained)", ORANGE)
    positive = [(s, v) for s, v in zip(steps, trained, strict=True) if v > 0]
    if positive:
        axes.set_yscale("log")
    line(axes, [s for s, _ in positive], [v for _, v in positive], color, label)
    if run.replay and pair_steps:
        kept = thinned(native, partner, most=MOST_MARKS)
        marked_steps, high, low = (np.asarray(values)[kept] for values in (pair_steps, native, partner))
        axes.vlines(marked_steps, low, high, color=INK, alpha=0.25, linewidth=1)
        axes.plot(marked_steps, low, "o", color=BLUE, markersize=5)
        axes.plot(marked_steps, high, "o", color=ORANGE, markersize=5.5, label="native routing, same step")
    if not run.replay:
        average = scientific(fmean(trained))
        reading = f"Replay is {run.mode}: this pass of the trainer routes natively, at {average} on average."
    elif not pair_steps:
        reading = "The native pass was not measured (replay.native_every), so what replay removes is not known."
    else:
        before, after = fmean(native), fmean(partner)
        lower = sum(b > a for b, a in zip(native, partner, strict=True))
        ratio = f", {before / after:.1f} times lower" if 0 < after < before else ""
        comparison = f"{ratio}; lower under replay on {lower} of {len(pair_steps)}"
        reading = (
            f"In steps with both passes ({len(pair_steps)}): {scientific(before)} native, {scientific(after)} with "
            f"replay{comparison if len(pair_steps) >= FEWEST_PAIRS else ': too few to tell'}."
        )
    if run.lags:
        means = ((lag, run.series(f"policy_kl/k3_lag/{lag}")[1]) for lag in run.lags)
        by_lag = ", ".join(f"lag {lag}: {scientific(fmean(values))}" for lag, values in means if values)
        reading += f" Tokens of older weights add to it; means by lag in versions: {by_lag}."
    if len(positive) < len(steps):
        reading += f" {len(steps) - len(positive)} values that are not above 0 are not shown on the log axis."
    return reading, figure


@panel(
    "routing",
    "Routing mismatch",
    "(token, MoE layer) positions whose expert set differs from the recorded one, lower is better",
)
def _routing(run: RunLines) -> Drawn:
    shadow, native = run.series("routing/shadow_mismatch"), run.series("routing/native_mismatch")
    token = run.series("routing/native_token_mismatch")[1]
    if not shadow[0] and not native[0]:
        why = "replay is off and no native pass compared its routes" if not run.replay else "no mismatch was logged"
        return f"Not measured: {why}."
    figure, axes = figure_of()
    line(axes, *native, ORANGE, "native forward", marker="o" if run.replay else None, markersize=5, linewidth=1.4)
    line(axes, *shadow, BLUE, "shadow choice inside replay")
    from_zero(axes, percent=True)
    parts = []
    if native[0]:
        whole = f" ({percent(fmean(token))} of tokens in at least one layer)" if token else ""
        share = f"{percent(fmean(native[1]), 2)} of positions{whole}"
        parts.append(f"Routing natively, the trainer picks another expert set at {share}")
    _, _, paired = run.paired("routing/native_mismatch", "routing/shadow_mismatch")
    if paired:
        parts.append(
            f"inside the replayed forward it would at {percent(fmean(paired), 2)}. The "
            "difference is the effect of earlier layers; the rest is the disagreement of each router"
        )
    elif shadow[0]:
        share = f"{percent(fmean(shadow[1]), 2)} of positions"
        parts.append(f"Inside the replayed forward the trainer would pick another set at {share}")
        parts.append("the native pass was not measured (replay.native_every)")
    elif run.mode == "off":
        parts.append("replay is off, so nothing corrects it")
    elif run.mode == "r2":
        parts.append("R2 makes the updates of a step agree with this pass, not with the sampler")
    return "; ".join(parts) + ".", figure


@panel(
    "extreme",
    "Extreme tokens",
    "fraction of tokens whose probability differs between the engines by more than a factor of 2, lower is better",
)
def _extreme(run: RunLines) -> Drawn:
    steps, trained = run.series("policy/extreme_fraction")
    if not steps:
        return "No extreme fraction was logged."
    native_steps, native, partner = run.paired("policy/extreme_fraction_native", "policy/extreme_fraction")
    if not any(trained) and not any(native):
        return f"Zero on all {len(steps)} steps: no token differed by that much, so there is nothing to plot."
    figure, axes = figure_of()
    reading = f"{percent(fmean(trained), 3)} of tokens on average as trained, {percent(max(trained), 3)} at worst"
    if run.replay and native_steps:
        line(axes, native_steps, native, ORANGE, "native routing, same step", marker="o", markersize=5, linewidth=1.2)
        comparison = f"{percent(fmean(native), 3)} native against {percent(fmean(partner), 3)} with replay"
        reading += f"; on the steps with both passes {comparison}"
    label, color = ("with replay (as trained)", BLUE) if run.replay else ("native routing (as trained)", ORANGE)
    line(axes, steps, trained, color, label)
    from_zero(axes, percent=True)
    return reading + ".", figure


@panel(
    "entropy",
    "Entropy and perplexity",
    "nats per token (above), perplexity of the sampled tokens in both engines (below): neither is good or bad",
)
def _entropy(run: RunLines) -> Drawn:
    steps, entropy = run.series("policy/entropy")
    if not steps:
        return "No entropy was logged."
    figure, (upper, lower) = figure_of(rows=2)
    line(upper, steps, entropy, PURPLE, None)
    upper.set_ylabel("entropy")
    from_zero(upper)
    line(lower, *run.series("policy/perplexity_rollout"), GREEN, "sampler", linewidth=2.6, alpha=0.5)
    line(lower, *run.series("policy/perplexity_train"), BLUE, "trainer", linewidth=1.2)
    lower.set_ylabel("perplexity")
    reading = f"Entropy went from {entropy[0]:.3f} to {entropy[-1]:.3f} nats per token."
    if apart := run.series("policy/log_perplexity_abs_diff")[1]:
        reading += f" The engines' log-perplexities of a sequence differ by {scientific(fmean(apart))} nats."
    return reading, figure


@panel("update", "Gradient norm and clip fraction", "no direction is good in itself; spikes are bad")
def _update(run: RunLines) -> Drawn:
    norm, clip = run.series("optim/grad_norm"), run.series("objective/clip_fraction")
    if not norm[0] and not clip[0]:
        return "No update was logged."
    figure, (upper, lower) = figure_of(rows=2)
    line(upper, *norm, BLUE, None)
    from_zero(upper)
    upper.set_ylabel("gradient norm")
    line(lower, *clip, PURPLE, None)
    from_zero(lower, least=0.05, percent=True)
    lower.set_ylabel("clipped")
    skipped, reading = sum(run.series("optim/skipped")[1]), ""
    if norm[1]:
        reading = f"Median norm {short(round(median(norm[1]), 3))}, largest {short(round(max(norm[1]), 3))}. "
    reading += f"{percent(fmean(clip[1]))} of ratios clipped on average. " if clip[1] else ""
    return reading + (f"{skipped:.0f} updates were skipped." if skipped else "No update was skipped."), figure


@panel(
    "canary",
    "Canary after each weight sync",
    "mean |logprob difference| of some fixed tokens between both engines, nats, lower is better",
)
def _canary(run: RunLines) -> Drawn:
    steps, difference = run.series("sync/canary_abs_diff")
    if not steps:
        return "No canary was scored."
    figure, axes = figure_of()
    line(axes, steps, difference, CYAN, None)
    from_zero(axes)
    return (
        f"Median {scientific(median(difference))}, largest {scientific(max(difference))} nats. "
        "Stale or damaged weights in the sampler would show as a jump that stays."
    ), figure


@panel("throughput", "Throughput", "tokens per second of each phase, higher is better")
def _throughput(run: RunLines) -> Drawn:
    sampled = run.series("throughput/sampled_tokens_per_second")
    trained = run.series("throughput/trained_tokens_per_second")
    if not sampled[0] and not trained[0]:
        return "No throughput was logged."
    steps, mfu = run.series("throughput/mfu")
    figure, axes = figure_of(rows=2 if mfu else 1)
    reading = "No MFU: the peak of this device in this precision is not known."
    if mfu:
        axes, lower = axes
        line(lower, steps, mfu, PURPLE, "model FLOPs utilization of training")
        from_zero(lower, percent=True)
        reading = f"Training uses {percent(median(mfu))} of what its devices can do (MFU)."
    line(axes, *sampled, BLUE, "sampled, per second of sampling")
    line(axes, *trained, GREEN, "trained, per second of training")
    from_zero(axes)
    sides = (("sampled", sampled[1]), ("trained", trained[1]))
    speeds = ", ".join(f"{median(values):,.0f} tokens/s {side}" for side, values in sides if values)
    return f"Medians: {speeds}. {reading}", figure


@panel("memory", "Memory of a training rank", "largest so far on the fullest rank, GiB, lower is better")
def _memory(run: RunLines) -> Drawn:
    steps, host = run.series("memory/host_peak_bytes")
    gpu_steps, gpu = run.series("memory/device_peak_bytes")
    if not steps:
        return "No memory was logged."
    figure, axes = figure_of()
    line(axes, steps, np.divide(host, 2**30), GREY, "host")
    line(axes, gpu_steps, np.divide(gpu, 2**30), PURPLE, "GPU, reserved by PyTorch")
    from_zero(axes)
    return f"Host: {binary(host[-1])}; " + (f"GPU: {binary(gpu[-1])}." if gpu else "no GPU trains."), figure


@panel("time", "Time per phase", "seconds per step, lower is better", wide=True)
def _time(run: RunLines) -> Drawn:
    if not run.train:
        return "No step was logged."
    timed = [(phase, color, [row.get(f"time/{phase}") or 0.0 for row in run.train]) for phase, color in PHASES]
    timed = [part for part in timed if any(part[2])]
    if not timed:
        return "No phase took any time."
    figure, axes = figure_of(wide=True)
    bars = stacked_bars(axes, [row["step"] for row in run.train], timed)
    axes.set_ylabel("seconds")
    axes.grid(axis="x", visible=False)
    totals = {phase: sum(seconds) for phase, _, seconds in timed}
    whole, longest = sum(totals.values()), sorted(totals.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{phase} {percent(seconds / whole, 0)}" for phase, seconds in longest)
    reading = f"Median step {median(run.series('time/step')[1]):.2f} s. Longest phases: {shares}."
    if sync := run.series("time/sync")[1]:
        reading += f" A weight sync takes {median(sync):.2f} s."
    if bars < len(run.train):
        reading += f" {bars} of {len(run.train)} steps are drawn: the fastest and the slowest among their neighbours."
    return reading, figure
