"""Compares the quantities with loops in plain Python, and checks the coverage of the intervals."""

import math
import random

import numpy as np
import pytest

from moe_rl.comparison.quantities import (
    ROUTING,
    Bootstrap,
    Choices,
    Estimate,
    busiest,
    by_layer,
    by_sequence,
    extreme_fractions,
    policy_sums,
    quantiles,
    routing,
    routing_sums,
    soft_kl,
)
from tests.support.refusals import refused

OWNERS = np.array([0, 0, 0, 1, 2, 2, 2, 2])  # sequences of 3, 1 and 4 tokens


def test_policy_sums_are_those_of_a_loop():
    random.seed(3)
    train = [random.gauss(-1, 2) for _ in OWNERS]
    rollout = [random.gauss(-1, 2) for _ in OWNERS]
    got = policy_sums(np.array(train, np.float32), np.array(rollout, np.float32), OWNERS, 3)
    want = {name: [0.0] * 3 for name in ("k1", "k3", "abs", "F(2)", "F(5)")}
    for p, q, owner in zip(train, rollout, OWNERS.tolist(), strict=True):
        d = float(np.float32(p)) - float(np.float32(q))
        want["k1"][owner] -= d
        want["k3"][owner] += math.exp(d) - 1 - d
        want["abs"][owner] += abs(d)
        ratio = max(math.exp(d), math.exp(-d))
        want["F(2)"][owner] += ratio > 2
        want["F(5)"][owner] += ratio > 5
    assert {name: values.tolist() for name, values in got.items()} == {
        name: pytest.approx(values, rel=1e-12) for name, values in want.items()
    }
    assert 0 < sum(want["F(5)"]) < sum(want["F(2)"]) < len(OWNERS)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_shows_in_every_number_of_its_sequence_and_in_the_mean(bad, side):
    both = np.full((2, 8), -1.0)
    both[side, 5] = bad
    for name, sums in policy_sums(*both, OWNERS, 3).items():
        assert np.isfinite(sums).tolist() == [True, True, False], name
        estimate = Bootstrap(3, seed=0).mean(sums, np.array([3, 1, 4]))
        assert not any(map(math.isfinite, (estimate.value, estimate.low, estimate.high))), name
    assert not math.isfinite(quantiles(*both)["abs_max"])


def test_k3_of_a_tiny_difference_is_not_lost_to_rounding():
    d = 1e-6
    (k3,) = policy_sums(np.array([d]), np.array([0.0]), np.array([0]), 1)["k3"]
    assert k3 == pytest.approx(d * d / 2, rel=1e-3)


def test_quantiles_and_extremes():
    d = np.array([0.0, 0.1, -0.2, 0.3, -3.0])
    assert quantiles(d, np.zeros(5)) == pytest.approx({"abs_p50": 0.2, "abs_p99": 0.3 + 0.96 * 2.7, "abs_max": 3.0})
    taus = np.array([1.0, 1.05, 1.2, 2.0, 5.0, 30.0])
    want = [sum(max(math.exp(x), math.exp(-x)) > tau for x in d) / 5 for tau in taus]
    assert extreme_fractions(d, taus).tolist() == pytest.approx(want)


def test_routing_sums_are_those_of_a_loop():
    rng = np.random.default_rng(5)
    layers, top_k = 3, 4
    shared = rng.integers(0, top_k + 1, (layers, len(OWNERS)))
    shared[:, 3] = top_k
    margin = np.where(shared < top_k, rng.random(shared.shape), 0)
    rows = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
    got = routing_sums(Choices(shared, margin, top_k), OWNERS, rows, 3)
    want = {name: [0.0] * 3 for name in (*ROUTING, "tokens", "positions")}
    for row, owner in enumerate(OWNERS.tolist()):
        if not rows[row]:
            continue
        differing = 0
        for layer in range(layers):
            overlap = int(shared[layer, row]) / top_k
            differing += overlap < 1
            want["overlap"][owner] += overlap
            want["hard_jsd"][owner] += math.log(2) * (1 - overlap)
            want["replay_margin"][owner] += float(margin[layer, row])
        want["set_mismatch"][owner] += differing
        want["token_layers"][owner] += differing
        want["token_any"][owner] += differing > 0
        want["tokens"][owner] += 1
        want["positions"][owner] += layers
    assert {name: values.tolist() for name, values in got.items()} == {
        name: pytest.approx(values) for name, values in want.items()
    }
    means = routing(Bootstrap(3, seed=0), got)
    assert means["set_mismatch"].value == pytest.approx(sum(want["set_mismatch"]) / (6 * layers))
    assert means["token_layers"].value == pytest.approx(sum(want["set_mismatch"]) / 6)
    assert means["token_any"].value == pytest.approx(sum(want["token_any"]) / 6)


def test_hard_jsd_is_the_divergence_of_uniform_distributions_on_the_sets():
    for overlap in range(5):
        ours, theirs = set(range(4)), set(range(4 - overlap, 8 - overlap))
        divergence = 0.0
        for expert in ours | theirs:
            p, q = (expert in ours) / 4, (expert in theirs) / 4
            m = (p + q) / 2
            divergence += sum(x / 2 * math.log(x / m) for x in (p, q) if x)
        sums = routing_sums(Choices(np.array([[overlap]]), np.zeros((1, 1)), 4), np.array([0]), np.array([True]), 1)
        assert sums["hard_jsd"][0] == pytest.approx(divergence)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_soft_kl_is_that_of_a_loop(score_function):
    rng = np.random.default_rng(7)
    sampler, trainer = rng.normal(0, 3, (2, 5, 6))

    def distribution(logits):
        scores = [math.exp(x) if score_function == "softmax" else 1 / (1 + math.exp(-x)) for x in logits]
        return [score / sum(scores) for score in scores]

    got = soft_kl(sampler, trainer, score_function)
    for at in range(5):
        p, q = distribution(sampler[at]), distribution(trainer[at])
        assert got[at] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert np.allclose(soft_kl(sampler, sampler, score_function), 0, atol=1e-15)
    huge = np.array([1000.0, 0.0, -1000.0])
    assert np.isfinite(soft_kl(huge, huge[::-1], score_function))


def test_a_mean_and_its_interval_are_those_of_resampled_ratios():
    sums, counts = np.array([1.0, 4.0, 0.0, 2.0]), np.array([2.0, 5.0, 1.0, 4.0])
    bootstrap = Bootstrap(4, seed=9, resamples=500)
    got = bootstrap.mean(sums, counts)
    ratios = sorted(
        sum(t * s for t, s in zip(times, sums, strict=True)) / sum(t * n for t, n in zip(times, counts, strict=True))
        for times in bootstrap._times.tolist()
    )
    assert got.value == pytest.approx(7 / 12)
    assert (got.low, got.high) == pytest.approx((ratios[12], ratios[487]), abs=0.02)
    assert all(sum(times) == 4 for times in bootstrap._times.tolist())
    assert got == Bootstrap(4, seed=9, resamples=500).mean(sums, counts)
    assert not np.array_equal(bootstrap._times, Bootstrap(4, seed=8, resamples=500)._times)


def test_a_difference_is_paired():
    """Sequences differ a lot, and each of them decreases a little: only a paired difference can detect that."""
    rng = np.random.default_rng(2)
    counts = np.full(50, 10.0)
    before = rng.exponential(1, 50) * counts
    after = before - 0.02 * counts * rng.random(50)
    bootstrap = Bootstrap(50, seed=1)
    assert bootstrap.mean(after, counts).high > bootstrap.mean(before, counts).low
    difference = bootstrap.difference(before, after, counts)
    assert 0 < difference.low < 0.01 < difference.high < 0.02
    same = bootstrap.difference(before, before, counts)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_an_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(4)
    covered = 0
    for trial in range(200):
        counts = rng.integers(1, 20, 60)
        sums = np.array([rng.exponential(2.0, n).sum() for n in counts])
        estimate = Bootstrap(60, seed=trial, resamples=400).mean(sums, counts)
        covered += estimate.low <= 2.0 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_completions_that_are_alike_say_no_more_than_one_of_them():
    """Each of 20 prompts has ten equal sequences. Resampled by prompt, the interval is that of 20 sequences, not of
    200."""
    sums = np.random.default_rng(6).exponential(1, 20)
    clusters = np.repeat(np.arange(20), 10)
    alone = Bootstrap(20, seed=3).mean(sums, np.ones(20))
    together = Bootstrap(200, seed=3, clusters=clusters).mean(np.repeat(sums, 10), np.ones(200))
    assert (together.value, together.low, together.high) == pytest.approx((alone.value, alone.low, alone.high))
    naive = Bootstrap(200, seed=3).mean(np.repeat(sums, 10), np.ones(200))
    assert naive.high - naive.low < 0.5 * (together.high - together.low)
    with refused(ValueError, expected=("2",)):
        Bootstrap(5, seed=0, clusters=np.zeros(5, int))


def test_one_sequence_has_no_interval_and_nothing_has_no_mean():
    with refused(ValueError, got=1, expected=("2",)):
        Bootstrap(1, seed=0)
    assert math.isnan(Bootstrap(2, seed=0).mean(np.zeros(2), np.zeros(2)).value)
    # Only one sequence has this part: resamples without this sequence are skipped.
    assert Bootstrap(2, seed=0).mean(np.array([3.0, 0]), np.array([2.0, 0])) == Estimate(1.5, 1.5, 1.5)


def test_by_layer_by_sequence_and_the_busiest():
    values = np.arange(16.0).reshape(2, 8)
    rows = np.array([1, 0, 0, 0, 0, 0, 0, 1], bool)
    assert by_layer(values, rows) == [3.5, 11.5]
    assert by_sequence(values[0], OWNERS, 4).tolist() == [3, 3, 22, 0]
    differs = np.zeros((2, 8), bool)
    differs[:, 1] = differs[0, 4:] = True
    assert busiest(differs, OWNERS, range(3), limit=9) == 2
    assert busiest(differs, OWNERS, range(3), limit=3) == 0
    assert busiest(differs, OWNERS, range(3), limit=0) == 1
