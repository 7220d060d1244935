"""Tests pass@k against every choice of samples, and that intervals hold what they should."""

import itertools
import math

import numpy as np
import pytest

from moe_rl.config.load import load_config
from moe_rl.config.prompt_sources import HeldoutSourceConfig
from moe_rl.rollout.pass_rates import PromptResult, eval_metrics, interval, pass_at

SOURCE = HeldoutSourceConfig(name="sums", data="sums.jsonl", samples=4, greedy=False, pass_at=(1, 3))


def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passes():
    for samples in range(1, 8):
        for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
            assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("prompts", "samples"), [(20, 1), (30, 1), (30, 8), (200, 4)])
def test_an_interval_holds_the_true_rate_in_about_95_of_100_evaluations(prompts, samples):
    """Prompts of very different difficulty: intervals that took each sample as independent would hold it too rarely."""
    rng, repeats, truth = np.random.default_rng(1), 600, 0.5
    difficulty = rng.beta(0.5, 0.5, (repeats, prompts))
    passed = rng.binomial(samples, difficulty) / samples
    found = [interval(one.tolist(), prompts * samples) for one in passed]
    held = sum(low <= truth <= high for low, high in found) / repeats
    assert 0.92 < held < 0.995
    if samples > 1:
        naive = 1.96 * np.sqrt(0.25 / (prompts * samples))
        assert np.mean(np.abs(passed.mean(1) - truth) <= naive) < 0.85


def test_the_ends_of_an_interval():
    low, high = interval([1.0] * 30, 30)
    assert high == 1 and 0.85 < low < 0.9  # Wilson's, and not a width of 0
    assert interval([0.0] * 30, 240) == pytest.approx((1 - high, 1 - low))
    assert interval([0.5] * 4, 8)[0] > interval([0.0, 1.0] * 2, 8)[0]  # alike by chance: as 8 independent samples
    assert interval([0.5] * 4, 8)[0] < 0.3
    assert all(map(math.isnan, interval([], 0)))
    low, high = interval([1.0], 1)
    assert low < 0.2 and high == 1


def test_a_failed_verification_is_no_wrong_answer():
    results = [PromptResult(SOURCE, None, [True, None, False, None]), PromptResult(SOURCE, None, [None] * 4)]
    rates = eval_metrics(results)
    assert rates["eval/pass_rate"] == rates["eval/pass_at/sums/1"] == 0.5
    assert math.isnan(rates["eval/pass_at/sums/3"]) and math.isnan(rates["eval/low/pass_at/sums/3"])


def test_the_config_names_the_metrics_that_an_evaluation_has():
    heldout = (
        "task.heldout=[{name: a, data: a.jsonl, samples: 2, pass_at: [2]}, {name: b, data: b.jsonl, greedy: false}]"
    )
    for overrides in ([], [heldout]):
        task = load_config("configs/tiny_moe_cpu.yaml", overrides).task
        results = [PromptResult(one, "easy", [True] * one.samples, [True] * one.greedy) for one in task.heldout]
        rates = {key for key in eval_metrics(results) if key.split("/")[1] not in ("low", "high", "level")}
        assert sorted(task.pass_rates) == sorted(rates)
