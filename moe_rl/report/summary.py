"""Writes summary.json: the results of a run, in one flat object that a script can read."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from moe_rl.disk import write_whole
from moe_rl.errors import About, ArgumentError
from moe_rl.report.lines import RunLines, pass_rates, read_run

FILE = "summary.json"
_PROVEN = "routing/proven/"


def summarize(run_dir: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Compute the results from the lines of a run, add the caller's facts (versions, seed, config path, ...), and write
    summary.json.

    Raises:
        ValueError: a fact has the name of a computed key, or states a replay mode that contradicts the lines.
    """
    run = read_run(run_dir)
    measured = measure(run)
    clash = sorted(measured.keys() & facts.keys())
    if clash:
        where: About = {"folder": run_dir / FILE}
        do = "leave these keys out of the facts"
        raise ArgumentError("a fact would overwrite a measured value", where=where, got=", ".join(clash), do=do)
    if run.train and facts.get("replay_mode", run.mode) != run.mode:
        raise ArgumentError(
            "replay_mode contradicts the metrics",
            where={"folder": run_dir},
            got=facts["replay_mode"],
            expected=run.mode,
            do="give the mode that the run really had",
            fault="replay mode",
        )
    summary = {**measured, **facts}
    write_whole(run_dir / FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def measure(run: RunLines) -> dict[str, Any]:
    """Compute the numbers of summary.json from the lines. A number that was not measured is None.

    Means and medians are over the steps where the value is finite; `nonfinite_values` counts the others by key. A sum
    or minimum that proves integrity (applied mismatch, coverage, routes) is None if one of its steps is not finite.
    """
    first, last = (run.eval[0], run.eval[-1]) if run.eval else ({}, {})
    # Pairs are taken from the same step, hence from the same tokens, weights and sampler logprobs. Without replay the
    # trainer routes natively in training, so policy_kl/k3 is the native value where no extra pass measured it.
    native_steps, native_k3, replay_k3 = run.paired("policy_kl/k3_native", "policy_kl/k3")
    if not native_steps and not run.replay:
        native_steps, native_k3 = run.series("policy_kl/k3")
    _, native_routes = run.series("routing/native_mismatch")
    _, _, shadow_paired = run.paired("routing/native_mismatch", "routing/shadow_mismatch")
    _, counts, lengths = run.paired("rollout/sequences", "rollout/completion_tokens_mean")
    sampled = [count * length for count, length in zip(counts, lengths, strict=True)]
    return {
        "steps": len(run.train),
        "heldout_pass_rate_first": first.get("eval/pass_rate"),
        "heldout_pass_rate_last": last.get("eval/pass_rate"),
        "heldout_pass_rate_greedy_first": first.get("eval/pass_rate_greedy"),
        "heldout_pass_rate_greedy_last": last.get("eval/pass_rate_greedy"),
        "heldout_rates_first": pass_rates(first),
        "heldout_rates_last": pass_rates(last),
        "heldout_step_first": first.get("step"),
        "heldout_step_last": last.get("step"),
        "train_pass_rate_first": run.train[0].get("reward/pass_rate") if run.train else None,
        "train_pass_rate_last": run.train[-1].get("reward/pass_rate") if run.train else None,
        "reward_failed_verdicts": _total(run, "reward/failed_verdicts"),
        "policy_kl_k3": _mean(run.series("policy_kl/k3")[1]),
        "policy_kl_k3_native": _mean(native_k3),
        "policy_kl_k3_replay": _mean(replay_k3) if run.replay else None,
        "policy_kl_k3_native_steps": len(native_steps),
        "policy_extreme_fraction": _mean(run.series("policy/extreme_fraction")[1]),
        "policy_extreme_fraction_native": _mean(run.series("policy/extreme_fraction_native")[1]),
        "routing_native_mismatch": _mean(native_routes),
        "routing_shadow_mismatch": _mean(run.series("routing/shadow_mismatch")[1]),
        "routing_shadow_mismatch_paired": _mean(shadow_paired),
        "routes_applied_mismatch": _total(run, "routing/applied_mismatch"),
        "routes_coverage": _all(run, "routing/coverage", min),
        "routes_fallback_positions": _total(run, "routing/fallback_positions"),
        "routes_dropped_sequences": _total(run, "routing/dropped_sequences"),
        "routes_consumed": _total(run, "routing/consumed"),
        "routes_expected": _total(run, "routing/expected"),
        "routes_exact_every_step": _exact(run),
        "routes_weak_claims": _weak(run),
        "trace_bytes": _total(run, "trace/bytes"),
        "trace_bytes_per_token": _bytes_per_token(run),
        "sampled_tokens": round(sum(sampled)) if sampled else None,
        "sampled_tokens_per_second_median": _median(run.series("throughput/sampled_tokens_per_second")[1]),
        "trained_tokens_per_second_median": _median(run.series("throughput/trained_tokens_per_second")[1]),
        "step_seconds_median": _median(run.series("time/step")[1]),
        "weight_sync_seconds_median": _median(run.series("time/sync")[1]),
        "train_seconds_total": sum(run.series("time/step")[1]),
        "sync_canary_abs_diff_max": max(run.series("sync/canary_abs_diff")[1], default=None),
        "skipped_updates": _total(run, "optim/skipped"),
        "nonfinite_values": dict(Counter(key for row in run.train + run.eval for key in row.get("nonfinite", []))),
    }


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _all(run: RunLines, key: str, reduce) -> float | None:
    """Reduce a key over every line that logged it. Return None if no line did, or if a value is not finite."""
    values = [row[key] for row in run.train if key in row]
    return reduce(values) if values and None not in values else None


def _total(run: RunLines, key: str) -> float | None:
    return _all(run, key, sum)


def _exact(run: RunLines) -> bool | None:
    """Return whether every step applied each expected route exactly once, sent no row elsewhere, and counted its
    fallbacks.
    """
    if run.mode == "off":
        return None
    return all(
        row.get("routing/consumed") is not None
        and row["routing/consumed"] == row.get("routing/expected")
        and row.get("routing/applied_mismatch") == 0
        and (row.get("routing/coverage") == 1 or (row.get("routing/fallback_positions") or 0) > 0)
        for row in run.train
    )


def _weak(run: RunLines) -> dict[str, int]:
    """Return, for each claim of the alignment test, the number of steps in which some rank could not prove it."""
    shares = [(key, share) for row in run.train for key, share in row.items() if key.startswith(_PROVEN)]
    return dict(sorted(Counter(key.removeprefix(_PROVEN) for key, share in shares if share != 1).items()))


def _bytes_per_token(run: RunLines) -> float | None:
    """Return bytes of all steps / tokens of all steps, which is not the mean of the steps' ratios."""
    _, totals, ratios = run.paired("trace/bytes", "trace/bytes_per_token")
    pairs = [(total, ratio) for total, ratio in zip(totals, ratios, strict=True) if ratio]
    tokens = sum(total / ratio for total, ratio in pairs)
    return sum(total for total, _ in pairs) / tokens if tokens else None
