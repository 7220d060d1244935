import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.objectives.lags import LAGS, sums_by_lag, with_keys
from moe_rl.objectives.mismatch import MismatchSums
from tests.support.refusals import refused

PAIRS = st.lists(st.tuples(st.floats(-12, 0, width=32), st.floats(-12, 0, width=32)), max_size=6)
BATCHES = st.lists(PAIRS, max_size=4)  # sequences, empty ones and ones of a single token among them
COUNTS = ("tokens", "sequences")


def sums(batch):
    """batch: sequences of (trainer logprob, sampler logprob)"""
    pairs = [pair for sequence in batch for pair in sequence]
    columns = (torch.tensor([p[i] for p in pairs], dtype=torch.float32) for i in range(2))
    ids = torch.tensor([i for i, sequence in enumerate(batch) for _ in sequence], dtype=torch.int64)
    return MismatchSums.of(*columns, ids, len(batch))


def scalar_reference(batch):
    pairs = [sequence for sequence in batch if sequence]
    differences = [[train - rollout for train, rollout in sequence] for sequence in pairs]
    d, n, count = [x for sequence in differences for x in sequence], sum(map(len, pairs)), len(pairs)
    train = [sum(p[0] for p in sequence) / len(sequence) for sequence in pairs]
    rollout = [sum(p[1] for p in sequence) / len(sequence) for sequence in pairs]
    weights = [math.exp(x) for x in d]
    return {
        "k1": math.fsum(-x for x in d) / n,
        "k3": math.fsum(math.expm1(x) - x for x in d) / n,
        "extreme_fraction_2": sum(max(math.exp(x), math.exp(-x)) > 2 for x in d) / n,
        "extreme_fraction_5": sum(max(math.exp(x), math.exp(-x)) > 5 for x in d) / n,
        "abs_mean": math.fsum(map(abs, d)) / n,
        "abs_max": max(map(abs, d)),
        "perplexity_train": math.fsum(math.exp(-x) for x in train) / count,
        "perplexity_rollout": math.fsum(math.exp(-x) for x in rollout) / count,
        "log_perplexity_diff": math.fsum(r - t for t, r in zip(train, rollout, strict=True)) / count,
        "log_perplexity_abs_diff": math.fsum(abs(r - t) for t, r in zip(train, rollout, strict=True)) / count,
        "chi2_token": math.fsum(w * w for w in weights) / n - 1,
        "chi2_sequence_product": math.fsum(math.exp(2 * sum(s)) for s in differences) / count - 1,
        "chi2_sequence_geometric": math.fsum(math.exp(2 * sum(s) / len(s)) for s in differences) / count - 1,
        "effective_sample_fraction": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
        "tokens": n,
        "sequences": count,
    }


@settings(deadline=None)
@given(BATCHES.filter(any))
def test_metrics_equal_the_scalar_reference(batch):
    got, expected = sums(batch).metrics(), scalar_reference(batch)
    assert got.keys() - expected.keys() == {"abs_p50", "abs_p99"}
    for name, value in expected.items():
        assert math.isclose(got[name], value, rel_tol=1e-9, abs_tol=1e-12), name
    assert got["k3"] >= 0 and (got["k3"] == 0) == all(a == b for sequence in batch for a, b in sequence)
    assert got["effective_sample_fraction"] <= 1 + 1e-12


@settings(deadline=None)
@given(BATCHES.filter(any), st.sampled_from([0.5, 0.99]))
def test_quantiles_are_not_too_low_and_little_too_high(batch, q):
    """The expected value is the nearest rank: the smallest value that at least a fraction q of the tokens does not
    exceed.
    """
    sizes = sorted(abs(train - rollout) for sequence in batch for train, rollout in sequence)
    exact = sizes[math.ceil(q * len(sizes)) - 1]
    got = sums(batch).metrics()[f"abs_p{100 * q:.0f}"]
    if exact <= 1e-7:
        assert got == 0
    else:
        assert exact * (1 - 1e-12) <= got <= exact * 1.024


@settings(deadline=None)
@given(st.lists(BATCHES, max_size=4))
def test_merging_parts_equals_the_whole(parts):
    whole = sums([sequence for part in parts for sequence in part])
    merged = MismatchSums.empty()
    for part in parts:
        merged = merged.merge(sums(part))
    rows = torch.stack([MismatchSums.empty().to_tensor(), *(sums(part).to_tensor() for part in parts)])
    for got in (merged, MismatchSums.from_tensor(rows)):
        assert torch.allclose(got.to_tensor(), whole.to_tensor(), rtol=1e-12, atol=1e-12)
    assert torch.equal(MismatchSums.from_tensor(whole.to_tensor()).to_tensor(), whole.to_tensor())


def test_direction_is_kl_of_rollout_from_trainer():
    """A pair of categorical distributions with very different KL in both directions.

    k1 and k3 converge to KL(rollout || trainer), chi2_token to chi^2(trainer || rollout).
    """
    rollout = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    train = torch.tensor([0.25, 0.25, 0.2, 0.3], dtype=torch.float64)
    forward = (rollout * (rollout / train).log()).sum().item()
    reverse = (train * (train / rollout).log()).sum().item()
    chi2 = (train**2 / rollout).sum().item() - 1
    samples = torch.multinomial(rollout, 200_000, replacement=True, generator=torch.Generator().manual_seed(1))
    got = MismatchSums.of(train.log()[samples], rollout.log()[samples], torch.zeros_like(samples), 1).metrics()
    assert abs(forward - reverse) > 0.08
    assert abs(got["k1"] - forward) < 0.01 and abs(got["k3"] - forward) < 0.01
    assert abs(got["k1"] - reverse) > 0.05 and abs(got["k3"] - reverse) > 0.05
    assert got["chi2_token"] == pytest.approx(chi2, rel=0.03)
    assert got["effective_sample_fraction"] == pytest.approx(1 / (1 + chi2), rel=0.03)


def test_known_numbers():
    got = sums([[(-1.0, -1.0), (-1.0, -2.0)], [(-3.0, -1.0), (-1.0, -1.5)]]).metrics()
    assert got["tokens"] == 4 and got["abs_max"] == 2.0 and got["abs_mean"] == 3.5 / 4
    assert got["k1"] == 0.5 / 4  # the sampler was on the whole more certain of what it drew
    assert got["extreme_fraction_2"] == 2 / 4  # factors e and e^2 (the other way), not e^0.5
    assert got["extreme_fraction_5"] == 1 / 4
    # sums of d 1 and -1.5, means 0.5 and -0.75: the two sequence levels are not the same number
    assert got["chi2_sequence_product"] == pytest.approx((math.exp(2) + math.exp(-3)) / 2 - 1)
    assert got["chi2_sequence_geometric"] == pytest.approx((math.exp(1) + math.exp(-1.5)) / 2 - 1)


def test_no_tokens_is_undefined_not_zero():
    got = MismatchSums.empty().merge(sums([])).merge(sums([[], []])).metrics()
    assert [got.pop(name) for name in COUNTS] == [0, 0] and all(math.isnan(value) for value in got.values())


def test_a_broken_logprob_is_shown():
    got = sums([[(-1.0, -1.0), (math.nan, -1.0)]]).merge(sums([[(-1.0, -1.0)]])).metrics()
    assert got.pop("tokens") == 3 and got.pop("sequences") == 2
    # the sampler's own logprobs are sound
    assert got.pop("perplexity_rollout") == pytest.approx(math.e)
    assert all(math.isnan(value) for value in got.values())


def test_a_product_that_overflows_is_shown_and_harms_no_other_number():
    got = sums([[(0.0, -400.0)], [(-1.0, -1.0)]]).metrics()
    assert math.isinf(got["chi2_sequence_product"]) and got["k1"] == -200 and got["extreme_fraction_5"] == 0.5


def test_bad_input_is_refused():
    ids = torch.zeros(2, dtype=torch.int64)
    with refused(TypeError, argument="rollout_logprobs", got="torch.bfloat16"):
        MismatchSums.of(torch.zeros(2), torch.zeros(2).bfloat16(), ids, 1)
    with refused(ValueError, fault="tokens", got=("(2,)", "(3,)")):
        MismatchSums.of(torch.zeros(2), torch.zeros(3), ids, 1)
    width = len(MismatchSums.empty().to_tensor())
    for rows in (torch.zeros(width), torch.zeros(width - 1).double(), torch.zeros(0, width).double()):
        with refused(ValueError, fault="sums"):
            MismatchSums.from_tensor(rows)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.floats(-12, 0, width=32), st.floats(-12, 0, width=32)), max_size=12))
def test_the_k3_of_each_lag_is_that_of_its_tokens(tokens):
    ends = {"0": range(1), "1": range(1, 2), "2-3": range(2, 4), "4-7": range(4, 8), "8+": range(8, 99)}

    def run(chosen):
        lags, train, rollout = (torch.tensor([t[i] for t in chosen]) for i in range(3))
        ids = torch.zeros(len(chosen), dtype=torch.int64)
        return MismatchSums.of(train.float(), rollout.float(), ids, 1, lags.long())

    got = run(tokens[:5]).merge(run(tokens[5:])).by_lag()
    assert tuple(ends) == LAGS
    expected = {
        name: [math.expm1(a - b) - (a - b) for lag, a, b in tokens if lag in found] for name, found in ends.items()
    }
    assert got.keys() == {name for name, values in expected.items() if values}
    for name, (value, count) in got.items():
        assert count == len(expected[name])
        assert math.isclose(value, math.fsum(expected[name]) / len(expected[name]), rel_tol=1e-9, abs_tol=1e-12)


def test_tokens_whose_lag_is_not_known_are_of_no_lag():
    assert sums([[(-1.0, -2.0)]]).by_lag() == {}
    with refused(ValueError, fault="tokens"):
        MismatchSums.of(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1, torch.zeros(3).long())


def test_a_token_behind_an_update_has_the_lag_of_the_keys_that_it_saw():
    lags = torch.tensor([2, 2, 0, 1, 0, 0, 3])
    assert with_keys(lags, (4, 1, 0, 2)).tolist() == [2, 2, 2, 2, 0, 0, 3]
    assert with_keys(lags[:0], (0, 0)).tolist() == with_keys(lags[:0], ()).tolist() == []


def test_sums_by_lag_by_hand():
    lags = torch.tensor([0, 1, 2, 3, 4, 7, 8, 500])
    assert sums_by_lag(torch.tensor([1, 2, 4, 8, 16, 32, 64, 128]), lags).tolist() == [1, 2, 12, 48, 192]
