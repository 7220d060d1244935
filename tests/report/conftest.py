"""Makes a synthetic run that looks real: a task that is learned, and a mismatch that replay lowers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_rl.report.lines import FILE, encode
from moe_rl.report.timeline import SIDES, Interval, Timeline
from moe_rl.types import QUANTILES

LEVELS = ("1-digit", "2-digit", "carry")

CONFIG = """\
run: {name: tiny, runs_dir: runs, seed: 1, steps: 40, peer_timeout_seconds: 30.0}
model: {path: checkpoints/tiny-moe}
task:
  train:
    - {name: sums, data: data/train.jsonl}
  heldout:
    - {name: sums, data: data/heldout.jsonl}
  rewards:
    exact: {function: moe_rl.tasks.rewards.exact, weight: 1.0}
    format: {function: moe_rl.tasks.rewards.well_formed, weight: 0.1}
  pass_reward: exact
rollout: {prompts_per_step: 32, group_size: 8, max_completion_tokens: 48, temperature: 1.0, dtype: bfloat16}
replay: {mode: r3, native_every: 5}
parallel: {expert: 2}
train:
  dtype: bfloat16
  updates_per_step: 2
  microbatch_tokens: 2048
  optimizer: {lr: 0.0001, warmup_steps: 2, betas: [0.9, 0.95], clip_grad: 1.0}
objective: {name: gspo, clip_low: 0.0003, clip_high: 0.0004, kl_coef: 0.0}
"""

FACTS = {
    "vllm_version": "0.32.0",
    "megatron_core_version": "0.19.2",
    "torch_version": "2.13.0",
    "replay_mode": "r3",
    "seed": 1,
    "objective": "gspo",
    "config": "configs/tiny_moe_cpu.yaml",
}


def metrics(step: int, replay: bool = True, native: bool = False, total: int = 40) -> dict[str, float]:
    """Return the metrics of one synthetic training step."""
    rng = random.Random(step)
    learned = 1 / (1 + math.exp(-7 * (step / total - 0.4)))
    pass_rate = 0.31 + 0.5 * learned + rng.gauss(0, 0.02)
    length = 22.0 + 3 * rng.random() - 4 * learned
    routes = 8 * 4 * 24 * 2
    native_k3, replay_k3 = 2.1e-3 * math.exp(rng.gauss(0, 0.25)), 5.2e-4 * math.exp(rng.gauss(0, 0.2))
    sample, train = 2.4 + rng.random(), 3.1 + 0.4 * rng.random()
    row: dict[str, float] = {
        "reward/mean": pass_rate + 0.1 * min(1, 0.8 + 0.2 * learned),
        **{f"reward/quantile/p{part:02d}": pass_rate * part / 50 for part in QUANTILES},
        "reward/pass_rate": pass_rate,
        "reward/failed_verdicts": 0,
        "reward/part/exact": pass_rate,
        "reward/part/format": min(1, 0.8 + 0.2 * learned + rng.gauss(0, 0.01)),
        "rollout/sequences": 256,
        "rollout/completion_tokens_mean": length,
        **{f"rollout/completion_tokens_quantile/p{part:02d}": length * part / 50 for part in QUANTILES},
        "memory/host_peak_bytes": 3 * 2**30,
        "memory/device_peak_bytes": 70 * 2**30,
        "rollout/truncated_fraction": max(0.0, 0.08 - 0.07 * learned + rng.gauss(0, 0.006)),
        "rollout/weight_version": step - 1,
        "group/zero_variance": 6,
        "group/zero_variance_fraction": 6 / 32,
        "policy/entropy": rng.uniform(0.5, 2.0),
        "policy_kl/k1": rng.gauss(0, 4e-4),
        "policy_kl/k3": replay_k3 if replay else native_k3,
        "policy/extreme_fraction": abs(rng.gauss(0, 2e-5 if replay else 4e-4)),
        "policy/extreme_fraction_5": 0.0,
        "policy/logratio_abs_p50": 0.004,
        "policy/logratio_abs_p99": 0.09,
        "policy/logratio_abs_max": 0.4 + rng.random(),
        "policy/perplexity_train": 1.4,
        "policy/perplexity_rollout": 1.39,
        "policy/log_perplexity_diff": rng.gauss(0, 4e-4),
        "policy/log_perplexity_abs_diff": 0.003,
        "policy/chi2_token": 0.002,
        "policy/chi2_sequence_product": 0.02,
        "policy/chi2_sequence_geometric": 0.001,
        "policy/effective_sample_fraction": 0.998,
        "objective/loss": rng.gauss(0, 1e-3),
        "objective/clip_fraction": 0.12 + 0.05 * rng.random(),
        "objective/ratio_mean": 1.0001,
        "objective/zero_advantage_fraction": 6 / 32,
        "optim/grad_norm": 0.4 + 0.2 * rng.random() + (0.9 if step == 17 else 0),
        "optim/lr": 1e-4 * min(1, step / 2),
        "optim/updates": 2 * step,
        "optim/skipped": 0,
        "time/sample": sample,
        "time/reward": 0.2,
        "time/placement": 0.01,
        "time/routes": 0.06,
        "time/logprobs": 0.9 + (0.7 if native else 0),
        "time/train": train,
        "time/sync": 0.15 + 0.02 * rng.random(),
        "time/step": sample + train + 1.4 + (0.7 if native else 0),
        "throughput/sampled_tokens_per_second": 256 * length / sample,
        "throughput/trained_tokens_per_second": 256 * (length + 12) / train,
        "trace/bytes_per_token": 33.4,
        "trace/bytes": 33.4 * 256 * (length + 11),
        "rollout/witnessed_rows": 352,
        "rollout/write_waits": 0,
        "sync/canary_abs_diff": 0.006 + 0.002 * rng.random(),
        "sync/canary_recorded": 1.0,
        "sync/bytes": 7_340_032,
    }
    if replay:
        row |= {
            "routing/shadow_mismatch": 0.021 + 0.002 * rng.random(),
            "routing/shadow_overlap": 0.993,
            "routing/shadow_margin": 4e-4,
            "routing/applied_mismatch": 0,
            "routing/coverage": 1.0,
            "routing/fallback_positions": 0,
            "routing/dropped_sequences": 0,
            "routing/stale_tokens": 0,
            "routing/load_excess": 0.05,
            "routing/packed_by_length": 0,
            "routing/consumed": routes,
            "routing/expected": routes,
            "routing/planned_fraction": 1.0,
            "routing/peak_rows": 4_612,
        }
    if native:
        row |= {
            "policy_kl/k1_native": rng.gauss(0, 9e-4),
            "policy_kl/k3_native": native_k3,
            "policy/extreme_fraction_native": abs(rng.gauss(0, 4e-4)),
            "routing/native_mismatch": 0.062 + 0.006 * rng.random(),
            "routing/native_overlap": 0.98,
            "routing/native_margin": 2e-3,
            "routing/native_token_mismatch": 0.31 + 0.02 * rng.random(),
        }
    if step % 10 == 0:
        row |= {"time/checkpoint": 0.35, "time/eval": 2.0}
    return row


def evaluation(step: int, total: int = 40) -> dict[str, float]:
    learned = 1 / (1 + math.exp(-7 * (step / total - 0.4)))
    rate = 0.29 + 0.47 * learned
    return {
        "eval/pass_rate": rate,
        "eval/pass_rate_greedy": rate + 0.05,
        "eval/pass_at/sums/4": rate + 0.1,
        "eval/low/pass_at/sums/4": rate + 0.0625,
        "eval/high/pass_at/sums/4": rate + 0.125,
        **{
            f"eval/level/{level}": max(0.0, rate + 0.2 - (0.2 + 0.04 * learned) * index)
            for index, level in enumerate(LEVELS)
        },
    }


def intervals(steps: int) -> list[Interval]:
    """Return the time line of a synchronous run, half a second of nothing between steps."""
    found, now = [], 1_785_571_200.0
    for step in range(1, steps + 1):
        row = metrics(step)
        for part, sides in SIDES.items():
            if seconds := row.get(f"time/{part}"):
                found += [Interval(side, part, now, now + seconds, step) for side in sides]
                now += seconds
        now += 0.5
    return found


@pytest.fixture
def step_metrics() -> Callable[..., dict[str, float]]:
    return metrics


@pytest.fixture
def eval_metrics() -> Callable[..., dict[str, float]]:
    return evaluation


@pytest.fixture
def facts() -> dict[str, object]:
    return dict(FACTS)


def write_run(run_dir: Path, *, replay: bool = True, native_every: int = 5, steps: int = 40) -> Path:
    """Write metrics.jsonl, timeline.jsonl and config.yaml of a synthetic run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [encode(0, "eval", evaluation(0))]
    for step in range(1, steps + 1):
        native = native_every > 0 and (step - 1) % native_every == 0
        lines.append(encode(step, "train", metrics(step, replay, native)))
        if step % 10 == 0:
            lines.append(encode(step, "eval", evaluation(step)))
    (run_dir / FILE).write_text("".join(lines))
    Timeline(run_dir).write(intervals(steps))
    (run_dir / "config.yaml").write_text(CONFIG if replay else CONFIG.replace("mode: r3", 'mode: "off"'))
    return run_dir


@pytest.fixture
def synthetic_run(tmp_path: Path) -> Callable[..., Path]:
    """synthetic_run(replay=True, native_every=5, steps=40) writes the run and returns its folder."""

    def make(**options) -> Path:
        return write_run(tmp_path / "tiny-20260801-1200", **options)

    return make
