"""Tests that a NaN or an infinity in any input of an objective is refused or makes the result not finite."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_rl.comparison.quantities import extreme_fractions
from moe_rl.config.objective import LOSSES
from moe_rl.errors import RewardError
from moe_rl.objectives import corrections as of_corrections
from moe_rl.objectives import second_moment
from moe_rl.objectives.advantages import ADVANTAGES, advantages, has_spread
from moe_rl.objectives.centering import Head, centering
from moe_rl.objectives.logprobs import Support, token_logprobs, token_logprobs_and_entropies
from moe_rl.objectives.losses import USE_ROLLOUT_LOGPROBS, reference_kl
from moe_rl.objectives.mismatch import MismatchSums
from moe_rl.objectives.penalties import KL_ESTIMATORS, entropy_bonus
from moe_rl.rollout.pass_rates import interval
from tests.objectives.test_corrections import DELTA, corrections, noisy_batches, run
from tests.objectives.test_policy import F64, weighted_batches
from tests.support.refusals import refused

BAD = st.sampled_from([math.nan, math.inf, -math.inf])
DTYPES = st.sampled_from([torch.float32, F64])


def plant(data, **inputs):
    """Put one bad number into one of the lists; return which list and position."""
    name = data.draw(st.sampled_from(sorted(name for name, values in inputs.items() if values)), label="input")
    at = data.draw(st.integers(0, len(inputs[name]) - 1), label="place")
    inputs[name][at] = data.draw(BAD, label="planted")
    return name, at


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_loss_hides_it(name, data):
    batch = data.draw(weighted_batches(name))
    assume(batch.advantages)
    dtype = data.draw(DTYPES)
    whole, _ = batch.run(name, dtype)
    assume(math.isfinite(whole.loss.item()))
    rollout = {"rollout": batch.rollout} if name in USE_ROLLOUT_LOGPROBS else {}
    plant(data, l=batch.l, old=batch.old, advantages=batch.advantages, weights=batch.weights or [], **rollout)
    result, _ = batch.run(name, dtype)
    assert math.isnan(result.loss.item())


@settings(max_examples=200, deadline=None)
@given(corrections(), DELTA, noisy_batches(), st.data())
def test_no_correction_hides_it(chosen, delta, batch, data):
    assume(batch.l)
    assert run(chosen, delta, batch).values.isfinite().all()
    # what an empty sequence was worth is no matter of any token
    full = [value if i in batch.ids else None for i, value in enumerate(batch.advantages)]
    places = [i for i, value in enumerate(full) if value is not None]
    kept = [batch.advantages[i] for i in places]
    name, at = plant(data, l=batch.l, old=batch.old, rollout=batch.rollout, advantages=kept)
    for i, value in zip(places, kept, strict=True):
        batch.advantages[i] = value
    got = run(chosen, delta, batch)
    hit = (
        [owner == places[at] for owner in batch.ids] if name == "advantages" else [t == at for t in range(len(batch.l))]
    )
    assert got.values[torch.tensor(hit)].isnan().all()
    # and nothing of it in another sequence
    other = [owner not in {o for o, h in zip(batch.ids, hit, strict=True) if h} for owner in batch.ids]
    assert got.values[torch.tensor(other)].isfinite().all()
    shown = of_corrections.metrics(got.sums.tolist())
    assert all(math.isnan(value) for value in shown.values()), shown


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@settings(max_examples=60, deadline=None)
@given(noisy_batches(), st.booleans(), DTYPES, st.data())
def test_no_kl_hides_it(estimator, batch, unbiased, dtype, data):
    assume(batch.l)
    planted, _ = plant(data, l=batch.l, ref=batch.rollout, **({"old": batch.old} if unbiased else {}))

    def tensor(values):
        return torch.tensor(values, dtype=dtype)

    kl = reference_kl(
        tensor(batch.l),
        tensor(batch.rollout),
        torch.tensor(batch.ids),
        1,
        estimator=estimator,
        old_logprobs=tensor(batch.old) if unbiased else None,
    )
    assert not math.isfinite(kl.item())
    if planted != "old":
        d = tensor(batch.rollout).double() - tensor(batch.l).double()
        assert (~KL_ESTIMATORS[estimator](d).isfinite()).sum() == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 12), min_size=1, max_size=6), st.data())
def test_no_entropy_bonus_hides_it(entropies, data):
    plant(data, entropies=entropies)
    assert not entropy_bonus(torch.tensor(entropies), 9).isfinite()


@settings(max_examples=100, deadline=None)
@given(noisy_batches(), noisy_batches(), DTYPES, st.data())
def test_no_metric_of_the_mismatch_hides_it(batch, other, dtype, data):
    assume(batch.l)
    planted, _ = plant(data, train=batch.l, rollout=batch.rollout)

    def sums(one):
        columns = (torch.tensor(values, dtype=dtype) for values in (one.l, one.rollout))
        return MismatchSums.of(*columns, torch.tensor(one.ids, dtype=torch.int64), len(one.advantages))

    first, second = sums(batch), sums(other)
    assume(math.isfinite(sum(second.to_tensor().tolist())))
    for whole in (first, first.merge(second), MismatchSums.from_tensor(torch.stack([second.values, first.values]))):
        got = whole.metrics()
        assert got.pop("tokens") == len(batch.l) + (len(other.l) if whole is not first else 0)
        got.pop("sequences")
        # this one is of the other logprobs alone
        assert math.isfinite(got.pop("perplexity_rollout" if planted == "train" else "perplexity_train"))
        assert all(math.isnan(value) for value in got.values()), got


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_logprob_and_no_entropy_hides_it(data):
    """A logit of -inf means probability 0, which shows when that token was sampled. A logit outside a token's support
    counts too, though it has no weight: no sound model has one that is not finite.
    """
    tokens, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 6))
    logits = torch.tensor(data.draw(st.lists(st.floats(-9, 9), min_size=tokens * size, max_size=tokens * size)))
    logits = logits.reshape(tokens, size)
    targets = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=tokens, max_size=tokens)))
    support, at = None, data.draw(st.integers(0, tokens - 1))
    where = data.draw(st.integers(0, size - 1))
    if data.draw(st.booleans()):
        inside = data.draw(st.booleans())
        ids = [sorted({int(target), where}) if inside else [int(target)] for target in targets]
        support = Support.of(range(tokens), [len(one) for one in ids], sum(ids, []), torch.device("cpu"))
    bad = data.draw(BAD)
    where = int(targets[at]) if bad == -math.inf else where
    logits[at, where] = bad
    logits.requires_grad_()
    logprobs = token_logprobs(logits, targets, 0.7, support=support)
    again, entropies = token_logprobs_and_entropies(logits, targets, 0.7, support=support)
    assert torch.isfinite(logprobs).tolist() == torch.isfinite(again).tolist() == [t != at for t in range(tokens)]
    if bad != -math.inf:
        assert entropies.isfinite().tolist() == [t != at for t in range(tokens)]


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=50, deadline=None)
@given(rewards=st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=1, max_size=7), data=st.data())
def test_no_advantage_hides_it(name, rewards, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    failed = [reward is None for reward in rewards]
    assert [value is None for value in advantages(name, rewards, groups, lengths)] == failed
    _, at = plant(data, rewards=rewards)
    with refused(RewardError, completion=at, group=groups[at], got={"nan", "inf", "-inf"}):
        advantages(name, rewards, groups, lengths)
    with refused(RewardError, completion=at, got={"nan", "inf", "-inf"}):
        has_spread(rewards)


@settings(max_examples=100, deadline=None)
@given(noisy_batches(), DTYPES, st.data())
def test_no_second_moment_hides_it(batch, dtype, data):
    assume(batch.l)
    full = [at for at in range(len(batch.advantages)) if at in batch.ids]
    kept = [batch.advantages[at] for at in full]
    plant(data, old=batch.l, rollout=batch.rollout, advantages=kept)
    for at, value in zip(full, kept, strict=True):
        batch.advantages[at] = value
    old, rollout, advantage = (torch.tensor(one, dtype=dtype) for one in (batch.l, batch.rollout, batch.advantages))
    values, region = second_moment.squares(old, rollout, advantage, torch.tensor(batch.ids))
    in_region = values[region].numpy()
    assert math.isnan(in_region.mean())
    assert not (values[values.isnan()] <= second_moment.largest_kept(in_region, 0.04)).any()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_centering_hides_it(data):
    tokens, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    own, sampler = (torch.log_softmax(torch.randn(size + 1, tokens), 0)[:size] for _ in range(2))
    where = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, tokens - 1))
    side = data.draw(st.sampled_from([own, sampler]))
    side[where] = data.draw(st.sampled_from([math.nan, math.inf] + ([-math.inf] if side is own else [])))
    got = centering(Head(own, sampler), data.draw(st.sampled_from([1.0, 2.0])))
    assert got.isnan().tolist() == [token == where[1] for token in range(tokens)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.data())
def test_no_extreme_fraction_and_no_interval_hides_it(values, data):
    plant(data, d=values)
    assert np.isnan(extreme_fractions(np.array(values), np.array([1.5, 2.0, 5.0]))).all()
    rates = [abs(value) / 3 for value in values]
    if not math.isinf(sum(rates)):
        assert all(math.isnan(end) for end in interval(rates, 8))
