"""Which losses have the right gradient on average over tokens that an older policy drew, summed over a vocabulary.

The trainer's policy is the old policy of the step, as in the first update, and no bound is reached.
"""

import pytest
import torch

from moe_rl.config.objective import CorrectionConfig
from moe_rl.objectives.corrections import token_weights
from moe_rl.objectives.lags import interpolated
from moe_rl.objectives.losses import policy_loss

F64 = torch.float64
WIDE = {"clip_low": 0.9, "clip_high": 9.0}
SAPO = {"tau_positive": 1.0, "tau_negative": 1.05}
CAPPED = {"weight_cap": 50.0}
NOW = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=F64).log()
SAMPLER = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64).log()
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64)
LAGS = torch.tensor([0, 1, 2, 8])
TIS = (CorrectionConfig(level="token", rule="truncate", high=50.0),)
PRODUCT = (CorrectionConfig(level="sequence", rule="truncate", high=50.0),)
RIGHT = {
    "decoupled": ("decoupled", NOW, WIDE | CAPPED, ()),
    "decoupled, interpolated": ("decoupled", interpolated(NOW, SAMPLER, LAGS), WIDE | CAPPED, ()),
    "minirl": ("minirl", NOW, WIDE | CAPPED, ()),
    "dppo_tv": ("dppo_tv", SAMPLER, {"delta_low": 1.0, "delta_high": 1.0} | CAPPED, ()),
    **{
        f"{name} from the sampler": (name, SAMPLER, WIDE, ()) for name in ("gspo", "gspo_token", "grpo", "dapo", "gmpo")
    },
    "cispo from the sampler": ("cispo", SAMPLER, CAPPED, ()),
    **{f"{name} with a token correction": (name, NOW, WIDE, TIS) for name in ("gspo_token", "grpo", "dr_grpo", "dapo")},
    "cispo with a token correction": ("cispo", NOW, CAPPED, TIS),
    "gspo with a sequence correction": ("gspo", NOW, WIDE, PRODUCT),
}
WRONG = {
    **{name: (name, NOW, WIDE, ()) for name in ("gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "gmpo")},
    "cispo": ("cispo", NOW, CAPPED, ()),
    "sapo from the sampler": ("sapo", SAMPLER, SAPO, ()),
    "topr": ("topr", SAMPLER, {"weight_cap": 1.0}, ()),
}


def mean_gradient(name, old, parameters, corrections):
    """Return the gradient [V] with respect to the logits, on average over tokens that the sampler draws.

    Each token is a completion of its own.
    """
    logits, ids = NOW.clone().requires_grad_(), torch.arange(len(NOW))
    logprobs = logits.log_softmax(0)
    found = token_weights(
        corrections, None, logprobs=logprobs, old_logprobs=old, rollout_logprobs=SAMPLER, advantages=ADVANTAGES,
        sequence_ids=ids,
    )  # fmt: skip
    drawn = SAMPLER.exp() * found.values
    loss = policy_loss(
        name, logprobs, old, ADVANTAGES, ids, rollout_logprobs=SAMPLER, denominator=1, weights=drawn, **parameters
    ).loss
    return torch.autograd.grad(loss, logits)[0]


POLICY_GRADIENT = -NOW.exp() * (ADVANTAGES - (NOW.exp() * ADVANTAGES).sum())


@pytest.mark.parametrize("case", RIGHT)
def test_the_mean_is_the_policy_gradient(case):
    torch.testing.assert_close(mean_gradient(*RIGHT[case]), POLICY_GRADIENT, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", WRONG)
def test_without_the_ratio_to_the_sampler_it_is_another_one(case):
    """The control: these losses take the trainer's old policy for the one that drew the tokens."""
    gradient = mean_gradient(*WRONG[case])
    assert (gradient - POLICY_GRADIENT).abs().max() > 0.1 * POLICY_GRADIENT.abs().max()


def test_interpolated_logprobs_by_hand():
    """At lag 0 the current policy's, at lag 1 the sampler's, later again nearer to the current policy's."""
    now, sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0, -5.0])
    assert interpolated(now, sampler, LAGS).tolist() == [-1.0, -3.0, -2.0, -1.5]
    assert interpolated(now, sampler, LAGS).dtype == torch.float32
