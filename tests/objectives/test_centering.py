"""Compares centered scores with their definition over a whole vocabulary, in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.config.objective import LOSS_PARAMETERS
from moe_rl.objectives.centering import Head, centering
from moe_rl.objectives.loss_parts import LossInputs
from moe_rl.objectives.losses import POLICY_LOSSES
from tests.objectives.test_policy import F64, close

VOCABULARY = 6
PARAMETERS = {"cispo": {"weight_cap": 1.2}, "dppo_tv": {"delta_low": 0.05, "delta_high": 0.04, "weight_cap": 1.3}}
distribution = st.lists(st.floats(-2, 2), min_size=VOCABULARY, max_size=VOCABULARY).map(
    lambda logits: torch.tensor(logits, dtype=F64).log_softmax(0)
)


def weight(name, p, q, advantage):
    """Return f of one token, from the definitions of the losses."""
    moved = p - q
    if name == "dppo_tv" and (advantage > 0 and moved > 0.04 or advantage < 0 and moved < -0.05):
        return 0.0
    return min(p / q, PARAMETERS[name]["weight_cap"])


def gradient_of(name, logits, q, token, advantage, head):
    """Return the loss's gradient with respect to the trainer's logits [V], for one sampled token."""
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(0)
    given = Head(log_p[head][:, None], q[head][:, None]) if head is not None else None
    inputs = LossInputs(
        log_p[token][None], q[token][None].clone(), torch.tensor([advantage], dtype=F64), torch.tensor([0]),
        denominator=1, head=given,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(POLICY_LOSSES[name](inputs, **PARAMETERS[name]).loss, leaf)
    return gradient


@pytest.mark.parametrize("name", PARAMETERS)
@settings(max_examples=60, deadline=None)
@given(distribution, distribution, st.sampled_from([1.5, -0.5]))
def test_over_the_whole_vocabulary_the_mean_over_the_sampler_is_0(name, logits, q, advantage):
    head = q.argsort(descending=True)
    mean = sum(q[v].exp() * gradient_of(name, logits, q, v, advantage, head) for v in range(VOCABULARY))
    assert close(mean.tolist(), [0.0] * VOCABULARY, 1e-9)


def test_without_centering_the_mean_is_not_0():
    """The control: what the sum above would be."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    mean = sum(q[v] * gradient_of("cispo", p.double().log(), q.double().log(), v, 1.0, None) for v in range(3))
    # p / q is truncated to 1.2 for token 0: it has the weight 0.36 in place of 0.6.
    lost = torch.tensor([0.36, 0.3, 0.1]) - 0.76 * p
    assert close(mean.tolist(), (-lost).tolist(), 1e-6)


@pytest.mark.parametrize("name", PARAMETERS)
@settings(max_examples=150, deadline=None)
@given(distribution, distribution, st.sampled_from([1.5, -0.5, 0.0]), st.integers(1, 5), st.integers(0, 5))
def test_the_gradient_is_that_of_the_paper(name, logits, q_log, advantage, size, token):
    """-A (w_a s_a - sum_v q^_v f(p_v / q^_v) s_v), where q^ is the sampler on the head, and rho p beyond it."""
    head = q_log.argsort(descending=True)[:size]
    p, q = logits.softmax(0).tolist(), q_log.exp().tolist()
    inside = head.tolist()
    rho = (1 - math.fsum(q[v] for v in inside)) / (1 - math.fsum(p[v] for v in inside))
    tail = min(1 / rho, PARAMETERS[name]["weight_cap"])
    of_v = [q[v] * weight(name, p[v], q[v], advantage) if v in inside else rho * p[v] * tail for v in range(VOCABULARY)]
    total = math.fsum(of_v)
    w = weight(name, p[token], q[token], advantage)
    # s_v = e_v - p, so a sum of c_v s_v is c - p sum(c).
    expected = [-advantage * (w * ((u == token) - p[u]) - (of_v[u] - p[u] * total)) for u in range(VOCABULARY)]
    got = gradient_of(name, logits, q_log, token, advantage, head)
    assert close(got.tolist(), expected, 1e-8)


def test_a_token_that_could_not_be_drawn_is_not_in_the_head():
    leaf = torch.tensor([[-0.7, -0.2], [-math.inf, -1.8]], dtype=F64).requires_grad_()
    values = centering(Head(leaf, torch.tensor([[0.0, -0.1], [-math.inf, -2.4]], dtype=F64)), 2.0)
    alone = centering(Head(leaf[:1, :1], torch.zeros(1, 1, dtype=F64)), 2.0)
    assert values[0].item() == alone[0].item() and math.isfinite(values[1].item())
    values.sum().backward()
    assert leaf.grad[1, 0].item() == 0 and leaf.grad.isfinite().all()


def test_a_head_of_everything_leaves_no_tail():
    """Both tails are then rounding, and a floor keeps their ratio finite."""
    p, q = torch.tensor([0.7, 0.3]).log()[:, None], torch.tensor([0.4, 0.6]).log()[:, None]
    leaf = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(centering(Head(leaf, q), 10.0).sum(), leaf)
    # Here f(r) = r: the coefficients are p - rho p / rho = 0, whatever rho is.
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("where", ["logprobs", "rollout_logprobs"])
def test_a_logprob_that_is_not_a_number_makes_the_loss_nan(name, where):
    parts = {"logprobs": torch.full((2, 3), -1.0), "rollout_logprobs": torch.full((2, 3), -1.1)}
    parts[where][1, 2] = math.nan
    old = torch.full((3,), -1.0)
    ids = torch.zeros(3, dtype=torch.int64)
    inputs = LossInputs(old, old, torch.tensor([1.0]), ids, denominator=1, head=Head(**parts))
    assert POLICY_LOSSES[name](inputs, **LOSS_PARAMETERS[name]).loss.isnan()


@pytest.mark.parametrize("name", PARAMETERS)
def test_centering_is_weighted_and_divided_as_the_loss_is(name):
    """The gradient of two tokens together is that of each alone, times its weight and over the denominator."""
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(4, 2, generator=generator, dtype=F64).log_softmax(0) for _ in range(2))
    token, advantages, weights = torch.tensor([1, 3]), torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([0.5, 3.0])

    def gradient(columns, denominator, weights=None):
        leaf = p.clone().requires_grad_()
        taken = token[columns]
        head = Head(leaf[:3, columns], q[:3, columns])
        inputs = LossInputs(
            leaf[taken, columns], q[taken, columns], advantages[columns], torch.arange(len(columns)),
            denominator=denominator, weights=weights, head=head,
        )  # fmt: skip
        POLICY_LOSSES[name](inputs, **PARAMETERS[name]).loss.backward()
        return leaf.grad

    both = gradient(torch.tensor([0, 1]), 7, weights.double())
    alone = [gradient(torch.tensor([n]), 1) * weights[n] / 7 for n in (0, 1)]
    assert torch.allclose(both, alone[0] + alone[1], rtol=1e-12, atol=1e-15)
