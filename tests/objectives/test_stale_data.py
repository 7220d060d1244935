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


def mean_loss(logprobs, sampler, advantages, ids, name, old, parameters, corrections):
    """Return the loss on average over completions that the sampler draws. ids: for each token its completion."""
    found = token_weights(
        corrections, None, logprobs=logprobs, old_logprobs=old, rollout_logprobs=sampler, advantages=advantages,
        sequence_ids=ids,
    )  # fmt: skip
    drawn = torch.zeros_like(advantages).index_add(0, ids, sampler).exp()[ids] * found.values
    return policy_loss(
        name, logprobs, old, advantages, ids, rollout_logprobs=sampler, denominator=1, weights=drawn, **parameters
    ).loss


def mean_gradient(*case):
    """Return the mean gradient [V] with respect to the logits. Each token is a completion of its own."""
    logits = NOW.clone().requires_grad_()
    loss = mean_loss(logits.log_softmax(0), SAMPLER, ADVANTAGES, torch.arange(len(NOW)), *case)
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


# All completions of two tokens. A table has the log-probabilities of the first token, and below them those of the
# second token after each first one.
FIRST, SECOND = torch.cartesian_prod(torch.arange(4), torch.arange(4)).T
PAIRS = torch.arange(16).repeat_interleave(2)
OF_PAIRS = torch.arange(16, dtype=F64).cos()
TABLE = torch.stack([NOW, *(NOW.roll(1 + first) for first in range(4))])
OF_SAMPLER = torch.stack([SAMPLER, *(SAMPLER.roll(first) for first in range(4))])


def of_tokens(table):
    """Return the log-probabilities [32] of the tokens of all completions. table: [5, 4]."""
    return torch.stack((table[0, FIRST], table[1 + FIRST, SECOND]), 1).flatten()


NOW_2, SAMPLER_2 = of_tokens(TABLE), of_tokens(OF_SAMPLER)
GEOMETRIC = (CorrectionConfig(level="geometric", rule="mask", high=50.0),)
TWO_TOKENS = {
    "grpo with a sequence correction": ("grpo", NOW_2, WIDE, PRODUCT, "policy gradient"),
    "gspo with a sequence correction": ("gspo", NOW_2, WIDE, PRODUCT, "policy gradient"),
    "decoupled": ("decoupled", NOW_2, WIDE | CAPPED, (), "token by token"),
    "decoupled, interpolated": (
        "decoupled", interpolated(NOW_2, SAMPLER_2, LAGS.repeat(8)), WIDE | CAPPED, (), "token by token",
    ),
    "minirl": ("minirl", NOW_2, WIDE | CAPPED, (), "token by token"),
    "dppo_tv": ("dppo_tv", SAMPLER_2, {"delta_low": 1.0, "delta_high": 1.0} | CAPPED, (), "token by token"),
    "grpo from the sampler": ("grpo", SAMPLER_2, WIDE, (), "token by token"),
    "dr_grpo from the sampler": ("dr_grpo", SAMPLER_2, WIDE, (), "token by token"),
    "dapo from the sampler": ("dapo", SAMPLER_2, WIDE, (), "token by token"),
    "cispo from the sampler": ("cispo", SAMPLER_2, CAPPED, (), "token by token"),
    "grpo with a token correction": ("grpo", NOW_2, WIDE, TIS, "token by token"),
    "gspo from the sampler": ("gspo", SAMPLER_2, WIDE, (), "neither"),
    "gspo_token from the sampler": ("gspo_token", SAMPLER_2, WIDE, (), "neither"),
    "gmpo from the sampler": ("gmpo", SAMPLER_2, WIDE, (), "neither"),
    "sapo from the sampler": ("sapo", SAMPLER_2, SAPO, (), "neither"),
    "grpo with a geometric correction": ("grpo", NOW_2, WIDE, GEOMETRIC, "neither"),
}  # fmt: skip


@pytest.mark.parametrize("case", TWO_TOKENS)
def test_for_two_tokens_only_the_ratio_of_the_whole_completion_gives_the_policy_gradient(case):
    """Token by token: the gradient of the mean advantage if the policy drew one token and the sampler the other one."""
    *loss, expected = TWO_TOKENS[case]
    logits = TABLE.clone().requires_grad_()
    logprobs = of_tokens(logits.log_softmax(1))
    policy, sampler = logprobs.exp().view(16, 2), SAMPLER_2.exp().view(16, 2)
    means = {
        "policy gradient": policy[:, 0] * policy[:, 1],
        "token by token": policy[:, 0] * sampler[:, 1] + sampler[:, 0] * policy[:, 1],
    }
    losses = {name: -(mean * OF_PAIRS).sum() for name, mean in means.items()}
    losses["loss"] = mean_loss(logprobs, SAMPLER_2, OF_PAIRS, PAIRS, *loss)
    gradients = {name: torch.autograd.grad(one, logits, retain_graph=True)[0] for name, one in losses.items()}
    here, *directions = (gradients[name] / gradients[name].norm() for name in ("loss", *means))
    for name, direction in zip(means, directions, strict=True):
        if name == expected:
            torch.testing.assert_close(here, direction, rtol=1e-12, atol=1e-14)
        else:
            assert (here - direction).abs().max() > 0.1, name


def test_interpolated_logprobs_by_hand():
    """At lag 0 the current policy's, at lag 1 the sampler's, later again nearer to the current policy's."""
    now, sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0, -5.0])
    assert interpolated(now, sampler, LAGS).tolist() == [-1.0, -3.0, -2.0, -1.5]
    assert interpolated(now, sampler, LAGS).dtype == torch.float32
