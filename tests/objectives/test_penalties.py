import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.objectives.penalties import KL_ESTIMATORS, k3

getcontext().prec = 80


@given(st.floats(-80, 80, width=32))
def test_never_negative_and_zero_only_at_zero(d):
    value = k3(torch.tensor(d, dtype=torch.float64)).item()
    assert value >= 0 and (value == 0) == (d == 0)


@pytest.mark.parametrize("d", [s * m for s in (1, -1) for m in (1e-14, 1e-8, 3e-5, 9.99e-4, 1e-3, 1.01e-3, 0.2, 5, 30)])
def test_equals_the_definition_at_80_digits(d):
    exact = Decimal(d).exp() - 1 - Decimal(d)
    got = k3(torch.tensor(d, dtype=torch.float64)).item()
    assert abs(Decimal(got) - exact) <= Decimal("1e-12") * exact


@pytest.mark.parametrize("d", [-40.0, -1.0, -1e-3, -2e-5, 0.0, 2e-5, 1e-3, 1.0, 40.0])
def test_slope_is_expm1(d):
    x = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    k3(x).backward()
    assert math.isclose(x.grad.item(), math.expm1(d), rel_tol=1e-12)


def expected(name, policy, reference, theta):
    """Compute exact expectations over a categorical policy: of the estimator, and of its gradient at fixed tokens."""
    value, slope = 0.0, torch.zeros_like(theta)
    for outcome, probability in enumerate(policy.detach().exp()):
        l = policy.detach()[outcome].clone().requires_grad_()  # noqa: E741
        estimate = KL_ESTIMATORS[name](reference[outcome] - l)
        value += probability * estimate.detach()
        slope[outcome] = probability * torch.autograd.grad(estimate, l)[0]
    return value.item(), torch.autograd.grad(policy, theta, slope, retain_graph=True)[0]


def test_values_and_expected_gradients_are_what_the_table_says():
    theta = torch.tensor([1.5, -1.2, 0.8, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.2, 1.1], dtype=torch.float64).log_softmax(0)
    policy = theta.log_softmax(0)
    forward = (policy.exp() * (policy - reference)).sum()  # KL(policy || reference)
    backward = (reference.exp() * (reference - policy)).sum()
    of_forward, of_backward = (torch.autograd.grad(kl, theta, retain_graph=True)[0] for kl in (forward, backward))
    assert not torch.allclose(of_forward, of_backward, atol=1e-2)
    (k1, from_k1), (k2, from_k2), (k3, from_k3) = (expected(n, policy, reference, theta) for n in KL_ESTIMATORS)
    assert math.isclose(k1, forward.item(), rel_tol=1e-12) and math.isclose(k3, forward.item(), rel_tol=1e-12)
    assert abs(k2 - forward.item()) > 0.05 and abs(backward.item() - forward.item()) > 0.05
    assert from_k1.abs().max() < 1e-15
    assert torch.allclose(from_k2, of_forward, atol=1e-12) and torch.allclose(from_k3, of_backward, atol=1e-12)


@pytest.mark.parametrize("near", [1e-2, 1e-3])
def test_k2_is_right_to_second_order(near):
    policy = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64).log_softmax(0)
    reference = (policy + near * torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum().item()
    got = (policy.exp() * KL_ESTIMATORS["k2"](reference - policy)).sum().item()
    assert 0 < abs(got - exact) < near * exact


@given(st.floats(-30, 30))
def test_k1_and_k2_by_the_definition(d):
    x = torch.tensor(d, dtype=torch.float64)
    assert KL_ESTIMATORS["k1"](x).item() == -d and KL_ESTIMATORS["k2"](x).item() == d * d / 2
