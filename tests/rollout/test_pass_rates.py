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


@pytest.mark.parametrize("prompts", [20, 30, 200])
def test_an_interval_holds_a_true_rate_near_1(prompts):
    """Whether pass@4 of 4 samples is 1 or 0 is one trial a prompt. The chance that the interval holds is summed up."""
    found = [interval([1.0] * passed + [0.0] * (prompts - passed), prompts) for passed in range(prompts + 1)]
    for truth in (0.8, 0.9, 0.95, 0.98, 0.99, 0.9946, 0.999):
        chances = [math.comb(prompts, n) * truth**n * (1 - truth) ** (prompts - n) for n in range(prompts + 1)]
        assert sum(c for c, (low, high) in zip(chances, found, strict=True) if low <= truth <= high) > 0.94


def test_samples_that_make_one_value_of_pass_at_k_together_count_once():
    source = SOURCE.model_copy(update={"samples": 8, "pass_at": (1, 4)})
    metrics = eval_metrics([PromptResult(source, None, [True] * 4 + [False] * 4) for _ in range(10)])
    of_one, of_four = (metrics[f"eval/high/pass_at/sums/{k}"] - metrics[f"eval/low/pass_at/sums/{k}"] for k in (1, 4))
    value = metrics["eval/pass_at/sums/4"]
    assert (metrics["eval/low/pass_at/sums/4"], metrics["eval/high/pass_at/sums/4"]) == interval([value] * 10, 20)
    assert of_one < of_four


def test_the_ends_of_an_interval():
    low, high = interval([1.0] * 30, 30)
    assert high == 1 and 0.85 < low < 0.9  # not a width of 0
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
