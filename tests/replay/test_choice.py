"""`replay_topk`: the weights and gradients of a router that takes recorded experts."""

import pytest
import torch

from moe_rl.errors import ReplayError
from moe_rl.replay.choice import replay_topk

LOGITS = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROUTES = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:3] for seed in range(6)])


def by_hand(logits, weights):
    """The same from one token and one expert at a time."""
    rows = []
    for row, ids in zip(logits, ROUTES.tolist(), strict=True):
        whole = 1.0 if weights == "softmax" else row.exp().sum()
        each = [row[i].exp() / whole for i in ids]
        total = 1.0 if weights == "plain" else sum(each)
        rows.append(torch.stack([one / total for one in each]))
    return torch.stack(rows)


@pytest.mark.parametrize("weights", ["softmax", "renormalised", "plain"])
def test_weights_and_gradients_are_those_of_the_recorded_experts(weights):
    grads, towards = [], torch.arange(18.0, dtype=torch.float64).view(6, 3)
    for compute in (by_hand, None):
        logits = LOGITS.clone().requires_grad_()
        if compute is None:
            scores = logits if weights == "softmax" else logits.softmax(-1)
            found, ids = replay_topk(scores, ROUTES.to(torch.uint8), weights=weights)
            assert ids.equal(ROUTES)
        else:
            found = compute(logits, weights)
        (found * towards).sum().backward()
        grads.append((found.detach(), logits.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_rows_without_a_record_take_their_own_best():
    without = torch.tensor([True, False] * 3)
    _, ids = replay_topk(LOGITS, ROUTES, without=without)
    assert ids[1::2].equal(ROUTES[1::2]) and ids[::2].equal(LOGITS.topk(3)[1][::2])


@pytest.mark.parametrize("routes", [ROUTES[:5], ROUTES.float(), ROUTES[0], LOGITS > 0])
def test_routes_of_other_rows_are_refused(routes):
    with pytest.raises(ReplayError) as error:
        replay_topk(LOGITS, routes)
    assert error.value.message.fault == "rows"


def test_unknown_weights_are_refused():
    """They would be the scores as they are."""
    with pytest.raises(ReplayError) as error:
        replay_topk(LOGITS, ROUTES, weights="renormalized")
    assert error.value.about["argument"] == "weights"
