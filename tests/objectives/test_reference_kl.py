"""Tests the KL to the reference as a term of a loss: its mean, its denominator, and the factor of the ratio."""

import math

import pytest
import torch
from hypothesis import given, settings

from moe_rl.objectives.losses import nonempty, reference_kl
from moe_rl.objectives.penalties import KL_ESTIMATORS
from tests.objectives.test_policy import F64, batches, close
from tests.support.refusals import refused


def scalar(estimator, d):
    """Return the estimate and its derivative with respect to the policy's logprob."""
    return {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.expm1(d) - d, -math.expm1(d))}[estimator]


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@settings(max_examples=60, deadline=None)
@given(batches())
def test_values_and_gradients_equal_the_scalar_reference(estimator, unbiased, batch):
    """The batch's old policy serves as the reference, and the ratio is taken to the sampler."""
    logprobs = torch.tensor(batch.l, dtype=F64, requires_grad=True)
    ids, denominator = torch.tensor(batch.ids, dtype=torch.int64), max(1, nonempty(batch.lengths))
    got = reference_kl(
        logprobs,
        torch.tensor(batch.old, dtype=F64),
        ids,
        denominator,
        estimator=estimator,
        old_logprobs=torch.tensor(batch.rollout, dtype=F64) if unbiased else None,
    )
    got.backward()
    value, gradient = 0.0, []
    for current, reference, old, i in zip(batch.l, batch.old, batch.rollout, batch.ids, strict=True):
        term, slope = scalar(estimator, reference - current)
        ratio = math.exp(current - old) if unbiased else 1.0
        value += ratio * term / batch.lengths[i] / denominator
        gradient.append(ratio * (slope + (term if unbiased else 0.0)) / batch.lengths[i] / denominator)
    assert close([got.item()], [value]) and close(logprobs.grad.tolist(), gradient)


@pytest.mark.parametrize(("estimator", "unbiased"), [(name, unbiased) for name in KL_ESTIMATORS for unbiased in (0, 1)])
def test_directions_of_value_and_gradient(estimator, unbiased):
    """Compute exact expectations over a categorical policy by weighting every outcome with its probability.

    With the ratio, the tokens are drawn from another policy than the one whose gradient is taken.
    """
    theta = torch.tensor([1.5, -1.2, 0.8, -2.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.2, 1.1], dtype=F64).log_softmax(0)
    policy = theta.log_softmax(0)
    old = torch.tensor([0.9, -0.6, 0.3, -1.0], dtype=F64).log_softmax(0) if unbiased else policy.detach()
    value, slope = 0.0, torch.zeros(4, dtype=F64)
    for outcome, drawn in enumerate(old.exp()):
        at = slice(outcome, outcome + 1)
        token = policy.detach()[at].requires_grad_()
        kl = reference_kl(
            token,
            reference[at],
            torch.zeros(1, dtype=torch.int64),
            1,
            estimator=estimator,
            old_logprobs=old[at] if unbiased else None,
        )
        value += drawn * kl.detach()
        slope[outcome] = drawn * torch.autograd.grad(kl, token)[0][0]
    (gradient,) = torch.autograd.grad(policy, theta, slope, retain_graph=True)
    forward = (policy.exp() * (policy - reference)).sum()
    backward = (reference.exp() * (reference - policy)).sum()
    of_k2 = (policy.exp() * (policy - reference) ** 2 / 2).sum()
    zero = (0 * policy).sum()
    expected = {
        ("k1", 0): (forward, zero), ("k2", 0): (of_k2, forward), ("k3", 0): (forward, backward),
        ("k1", 1): (forward, forward), ("k2", 1): (of_k2, of_k2), ("k3", 1): (forward, forward),
    }[estimator, unbiased]  # fmt: skip
    assert math.isclose(value.item(), expected[0].item(), rel_tol=1e-12)
    for direction in (forward, backward, of_k2, zero):
        (other,) = torch.autograd.grad(direction, theta, retain_graph=True)
        assert torch.allclose(gradient, other, atol=1e-12) == (direction is expected[1])


def test_bad_input_is_refused():
    good = [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)]
    reference_kl(*good, 1, estimator="k3")
    with refused(ValueError, argument="denominator"):
        reference_kl(*good, 0, estimator="k3")
    with refused(TypeError, argument="logprobs", got=("bfloat16",)):
        reference_kl(good[0].bfloat16(), *good[1:], 1, estimator="k3")
    with refused(TypeError, got=("float64",)):
        reference_kl(*good, 1, estimator="k3", old_logprobs=torch.zeros(2, dtype=F64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_no_gradient_flows_into_the_reference_or_the_old_policy(estimator, unbiased):
    logprobs, ref, old = (torch.tensor([-1.0, -2.0, -0.5]) * scale for scale in (1.0, 1.1, 0.9))
    for tensor in (logprobs, ref, old):
        tensor.requires_grad_()
    ids = torch.tensor([0, 0, 1])
    reference_kl(logprobs, ref, ids, 2, estimator=estimator, old_logprobs=old if unbiased else None).backward()
    assert ref.grad is None and old.grad is None and logprobs.grad.abs().sum() > 0
