import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.objectives.mismatch import MismatchSums

PAIRS = st.lists(st.tuples(st.floats(-12, 0, width=32), st.floats(-12, 0, width=32)), max_size=12)


def sums(pairs):
    """pairs: (trainer logprob, sampler logprob)"""
    return MismatchSums.of(*(torch.tensor(column, dtype=torch.float32) for column in
                             ([p[0] for p in pairs], [p[1] for p in pairs])))


def scalar_reference(pairs):
    d = [train - rollout for train, rollout in pairs]
    n = len(d)
    return {
        "k1": math.fsum(-x for x in d) / n,
        "k3": math.fsum(math.expm1(x) - x for x in d) / n,
        "extreme_fraction": sum(max(math.exp(x), math.exp(-x)) > 2 for x in d) / n,
        "abs_mean": math.fsum(map(abs, d)) / n,
        "abs_max": max(map(abs, d)),
        "tokens": n,
    }


@settings(deadline=None)
@given(PAIRS.filter(bool))
def test_metrics_equal_the_scalar_reference(pairs):
    got, expected = sums(pairs).metrics(), scalar_reference(pairs)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(got[name], value, rel_tol=1e-12, abs_tol=1e-12), name
    assert got["k3"] >= 0 and (got["k3"] == 0) == all(a == b for a, b in pairs)


@settings(deadline=None)
@given(st.lists(PAIRS, max_size=4))
def test_merging_parts_equals_the_whole(parts):
    whole = sums([pair for part in parts for pair in part])
    merged = MismatchSums.empty()
    for part in parts:
        merged = merged.merge(sums(part))
    rows = torch.stack([MismatchSums.empty().to_tensor(), *(sums(part).to_tensor() for part in parts)])
    for got in (merged, MismatchSums.from_tensor(rows)):
        assert torch.allclose(got.to_tensor(), whole.to_tensor(), rtol=1e-12, atol=1e-12)
    assert torch.equal(MismatchSums.from_tensor(whole.to_tensor()).to_tensor(), whole.to_tensor())


def test_direction_is_kl_of_rollout_from_trainer():
    """A categorical pair whose two directions differ widely; k1 and k3 converge to KL(rollout || trainer)."""
    rollout = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    train = torch.tensor([0.25, 0.25, 0.2, 0.3], dtype=torch.float64)
    forward = (rollout * (rollout / train).log()).sum().item()
    reverse = (train * (train / rollout).log()).sum().item()
    samples = torch.multinomial(rollout, 200_000, replacement=True, generator=torch.Generator().manual_seed(1))
    got = MismatchSums.of(train.log()[samples], rollout.log()[samples]).metrics()
    assert abs(forward - reverse) > 0.08
    assert abs(got["k1"] - forward) < 0.01 and abs(got["k3"] - forward) < 0.01
    assert abs(got["k1"] - reverse) > 0.05 and abs(got["k3"] - reverse) > 0.05


def test_known_numbers():
    got = sums([(-1.0, -1.0), (-1.0, -2.0), (-3.0, -1.0), (-1.0, -1.5)]).metrics()
    assert got["tokens"] == 4 and got["abs_max"] == 2.0 and got["abs_mean"] == 3.5 / 4
    assert got["k1"] == 0.5 / 4  # the sampler was on the whole more certain of what it drew
    assert got["extreme_fraction"] == 2 / 4  # factors e and e^2 (the other way), not e^0.5


def test_no_tokens_is_undefined_not_zero():
    got = MismatchSums.empty().merge(sums([])).metrics()
    assert got.pop("tokens") == 0 and all(math.isnan(value) for value in got.values())


def test_a_broken_logprob_is_shown():
    got = sums([(-1.0, -1.0), (math.nan, -1.0)]).merge(sums([(-1.0, -1.0)])).metrics()
    assert got["tokens"] == 3 and all(math.isnan(got[name]) for name in ("k1", "k3", "abs_mean", "abs_max"))


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="rollout_logprobs.*bfloat16"):
        MismatchSums.of(torch.zeros(2), torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        MismatchSums.of(torch.zeros(2), torch.zeros(3))
    for rows in (torch.zeros(6), torch.zeros(5).double(), torch.zeros(0, 6).double()):
        with pytest.raises(ValueError, match="no tensor of mismatch sums"):
            MismatchSums.from_tensor(rows)
