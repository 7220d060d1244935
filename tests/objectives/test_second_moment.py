"""Compares the second-moment mask with M2PO's algorithm, token by token in Python floats."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.config.objective import CorrectionConfig
from moe_rl.objectives.corrections import token_weights
from moe_rl.objectives.losses import policy_loss
from moe_rl.objectives.second_moment import largest_kept, squares
from tests.objectives.test_policy import F64, batches, close


def algorithm_1(found, limit):
    """Return which squares the paper's loop keeps, removing equal ones together."""
    kept = set(range(len(found)))
    while kept and math.fsum(found[i] for i in kept) / len(kept) > limit:
        most = max(found[i] for i in kept)
        kept = {i for i in kept if found[i] < most}
    return kept


# No mean of a few of these equals the limit.
SQUARES = st.lists(st.one_of(st.sampled_from([0.0, 1e-4, 0.05, 0.05, 0.3]), st.floats(0, 1)), max_size=12)


@settings(max_examples=400, deadline=None)
@given(SQUARES, st.sampled_from([1e-5, 0.0401, 0.2007, 2.0]), st.randoms())
def test_the_mask_is_that_of_the_algorithm_in_any_order(found, limit, random):
    largest = largest_kept(np.array(found), limit)
    assert {i for i, value in enumerate(found) if value <= largest} == algorithm_1(found, limit)
    random.shuffle(found)
    assert largest_kept(np.array(found), limit) == largest


def test_the_mask_by_hand():
    # 0.04 + 0.02 + 0.12 has the mean 0.06; without 0.12 it is 0.03.
    assert largest_kept(np.array([0.04, 0.12, 0.02]), 0.04) == 0.04
    assert largest_kept(np.array([0.04, 0.12, 0.02]), 0.06) == 0.12
    # One of the two equal ones could stay: (0.01 + 0.07) / 2 is the limit.
    assert largest_kept(np.array([0.07, 0.01, 0.07]), 0.04) == 0.01
    assert largest_kept(np.array([0.3, 0.2]), 0.1) == -math.inf
    assert largest_kept(np.array([]), 0.1) == math.inf
    assert largest_kept(np.array([0.01, math.nan]), 0.1) == 0.01


def test_the_trust_region_is_where_the_loss_pushes_away_from_the_sampler():
    d, advantages, ids = [0.5, -0.5, 0.5, -0.5, 0.5, 0.0], [1.0, -2.0, 0.0], [0, 0, 1, 1, 2, 0]
    values, region = squares(
        torch.tensor(d, dtype=F64), torch.zeros(6, dtype=F64), torch.tensor(advantages), torch.tensor(ids)
    )
    assert values.tolist() == [0.25] * 5 + [0.0]
    assert region.tolist() == [True, False, False, True, False, False]


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from([0.0401, 0.5]))
def test_the_recipe_has_the_gradient_of_the_papers_loss(batch, limit):
    """cispo with wide bounds and a truncated ratio to the sampler, against -(1 / N) sum_t M_t r_t A_i."""
    batch.l = list(batch.old)  # one update per step: the paper's policy is the old one
    tensor = {key: torch.tensor(getattr(batch, key), dtype=F64) for key in ("old", "rollout", "advantages")}
    ids = torch.tensor(batch.ids, dtype=torch.int64)
    values, region = squares(tensor["old"], tensor["rollout"], tensor["advantages"], ids)
    trusted = ~region | (values <= largest_kept(values[region].numpy(), limit))
    logprobs = tensor["old"].clone().requires_grad_()
    weights = token_weights(
        [CorrectionConfig(level="token", rule="truncate", high=1000.0)],
        None,
        logprobs=logprobs,
        old_logprobs=tensor["old"],
        rollout_logprobs=tensor["rollout"],
        advantages=tensor["advantages"],
        sequence_ids=ids,
        trusted=trusted,
    )
    result = policy_loss(
        "cispo",
        logprobs,
        tensor["old"],
        tensor["advantages"],
        ids,
        rollout_logprobs=tensor["rollout"],
        denominator=batch.denominator("cispo"),
        weights=weights.values,
        weight_cap=1000.0,
    )
    result.loss.backward()
    d = [o - r for o, r in zip(batch.old, batch.rollout, strict=True)]
    pushed = [t for t, i in enumerate(batch.ids) if d[t] * batch.advantages[i] > 0]
    kept = {pushed[n] for n in algorithm_1([d[t] ** 2 for t in pushed], limit)}
    expected = [
        -math.exp(d[t]) * batch.advantages[i] / batch.denominator("cispo") if t in kept or t not in pushed else 0.0
        for t, i in enumerate(batch.ids)
    ]
    assert close(logprobs.grad.tolist(), expected)
    assert weights.sums[3].item() == len(pushed) - len(kept)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_logprob_that_is_not_finite_makes_the_weight_nan(broken):
    old, rollout = torch.tensor([-1.0, broken]), torch.tensor([-1.5, -1.0])
    advantages, ids = torch.tensor([1.0]), torch.tensor([0, 0])
    values, region = squares(old, rollout, advantages, ids)
    trusted = ~region | (values <= largest_kept(values[region].numpy(), 1e-3))
    weights = token_weights(
        [], None, logprobs=old, old_logprobs=old, rollout_logprobs=rollout, advantages=advantages, sequence_ids=ids,
        trusted=trusted,
    )  # fmt: skip
    assert weights.values[0].item() == 0 and weights.values[1].isnan()
