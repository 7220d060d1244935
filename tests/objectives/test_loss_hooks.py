"""The losses behind the hooks of verl and slime: small imitations call them as these trainers do, on two ranks with two
microbatches each, and the gradient is that of the loss itself on the whole batch."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from moe_rl.config.objective import LOSS_PARAMETERS
from moe_rl.errors import ConfigError
from moe_rl.objectives.loss_hooks import slime_loss, verl_loss
from moe_rl.objectives.losses import POLICY_LOSSES, global_denominator, policy_loss
from tests.support.refusals import refused

RANKS, MICROBATCHES, LONGEST = 2, 2, 6
EVERY = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": None, "weight_cap": 1.3, "tau_positive": 1.0,
         "tau_negative": 1.05, "delta_low": 0.05, "delta_high": 0.05}  # fmt: skip
PARAMETERS = {name: {key: EVERY[key] for key in keys} for name, keys in LOSS_PARAMETERS.items()}
TOKEN_MEANS = ("dapo", "cispo", "dppo_tv", "decoupled")
MODES = dict.fromkeys(POLICY_LOSSES, "seq-mean-token-mean") | dict.fromkeys(TOKEN_MEANS, "token-mean")
MODES |= {"dr_grpo": "seq-mean-token-sum-norm", "minirl": "seq-mean-token-sum", "topr": "seq-mean-token-sum"}


class Batch:
    """Eight samples, two for each microbatch, with padding on the right and a tool's result in the middle."""

    def __init__(self, *, empty=False):
        make = torch.Generator().manual_seed(4)
        lengths = torch.tensor([6, 3, 5, 1, 4, 6, 2, 5])
        self.mask = torch.arange(LONGEST) < lengths[:, None]
        self.mask[[0, 4], 2] = False
        if empty:
            self.mask[3] = False
        self.lengths = lengths.tolist()
        self.old = -3 * torch.rand(8, LONGEST, dtype=torch.float64, generator=make)
        self.rollout = self.old + 0.2 * torch.randn(8, LONGEST, dtype=torch.float64, generator=make)
        self.now = (self.old + 0.2 * torch.randn(8, LONGEST, dtype=torch.float64, generator=make)).requires_grad_()
        self.advantages = torch.randn(8, dtype=torch.float64, generator=make)
        self.token_weights = torch.rand(8, LONGEST, dtype=torch.float64, generator=make)

    def expected(self, name, weights=None):
        """Return the gradient [8, R] of the loss itself."""
        mask = self.mask
        result = policy_loss(
            name, self.now[mask], self.old[mask], self.advantages, mask.nonzero()[:, 0],
            rollout_logprobs=self.rollout[mask], weights=None if weights is None else weights[mask],
            denominator=global_denominator(name, mask.sum(-1).tolist(), LONGEST), **PARAMETERS[name],
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(result.loss, self.now)
        return gradient

    def microbatches(self):
        """Yield the samples of each microbatch; the first two are of rank 0."""
        return torch.arange(8).split(2)


class Verl:
    """Keeps losses by name, and calls one by keywords on padded tensors, after it wrote the global counts into the
    config. FSDP averages gradients over ranks."""

    def __init__(self):
        self.losses = {}

    def register(self, name):
        return lambda loss: self.losses.setdefault(name, loss)

    def gradient(self, batch, mode, *, agg, weights=None, counts=True):
        total, seen = torch.zeros_like(batch.now), []
        config = SimpleNamespace(global_batch_info={})
        if counts:
            config.global_batch_info |= {
                "dp_size": RANKS, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": 8,
                "loss_scale_factor": None,
            }  # fmt: skip
        for rows in batch.microbatches() if counts else [torch.arange(8)]:
            loss, metrics = self.losses[mode](
                old_log_prob=batch.old[rows].masked_fill(~batch.mask[rows], 7.0),  # padding holds anything
                log_prob=batch.now[rows],
                advantages=batch.advantages[rows, None] * batch.mask[rows],
                response_mask=batch.mask[rows],
                loss_agg_mode=agg,
                config=config,
                rollout_is_weights=None if weights is None else weights[rows],
            )
            seen.append(metrics)
            total += torch.autograd.grad(loss, batch.now)[0]
        assert all(type(value) is float for metrics in seen for value in metrics.values())
        return total / (RANKS if counts else 1)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"minirl", "decoupled"}))
def test_verl_gets_the_gradient_of_the_loss(name):
    batch, verl = Batch(), Verl()
    verl.register("ours")(verl_loss(name, **PARAMETERS[name]))
    expected = batch.expected(name)
    assert expected.abs().max() > 1e-3 and (expected[~batch.mask] == 0).all()
    for counts in (True, False):
        found = verl.gradient(batch, "ours", agg=MODES[name], counts=counts)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    weights = batch.token_weights
    if name in ("gspo", "gmpo"):
        with refused(ConfigError, sequence=0):
            verl.gradient(batch, "ours", agg=MODES[name], weights=weights)
        weights = weights[:, :1].expand(-1, LONGEST)
    found = verl.gradient(batch, "ours", agg=MODES[name], weights=weights)
    assert torch.allclose(found, batch.expected(name, weights), rtol=0, atol=1e-12)
    for wrong in set(MODES.values()) - {MODES[name]}:
        with refused(ConfigError, key="loss_agg_mode", got=wrong, expected=MODES[name]):
            verl.gradient(batch, "ours", agg=wrong)


def test_verl_without_what_a_loss_needs_is_refused():
    for name in ("minirl", "decoupled"):
        with refused(ConfigError, given=name):
            verl_loss(name, **PARAMETERS[name])
    with refused(ConfigError, key="objective.name"):
        verl_loss("nothing")
    mask, values = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    loss = verl_loss("grpo", **PARAMETERS["grpo"])
    config = SimpleNamespace(global_batch_info={"dp_size": 2, "global_batch_size": None})
    with refused(ConfigError, key="global_batch_size"):
        loss(values, values, values, mask, "seq-mean-token-mean", config)
    config.global_batch_info = {}
    with refused(ConfigError, sequence=0, got=("1", "2")):  # as from a critic
        loss(values, values, torch.tensor([[1.0, 2.0]]), mask, "seq-mean-token-mean", config)


class Slime:
    """Calls a custom loss on packed logits with a list of tensors for each key; divides by the samples of the step, or
    leaves it to Megatron to divide by the tokens; Megatron averages over microbatches and ranks."""

    def __init__(self, loss, **flags):
        self.loss = loss
        self.args = Namespace(
            **{"calculate_per_token_loss": False, "use_tis": False, "get_mismatch_metrics": False, "use_opsm": False,
               "entropy_coef": 0.0, "use_kl_loss": True, "kl_loss_coef": 0.0, "use_rollout_logprobs": False,
               "rollout_max_response_len": LONGEST} | flags
        )  # fmt: skip

    def gradient(self, batch, **changed):
        total = torch.zeros_like(batch.now)
        for rows in batch.microbatches():
            lengths = [batch.lengths[row] for row in rows]

            def parts(values, rows=rows, lengths=lengths):
                return [values[row][:length] for row, length in zip(rows, lengths, strict=True)]

            masks = [one.int() for one in parts(batch.mask)]
            given = {
                "advantages": parts(batch.advantages[:, None].expand(-1, LONGEST)), "log_probs": parts(batch.old),
                "rollout_log_probs": parts(batch.rollout), "loss_masks": masks, "response_lengths": lengths,
                "rollout_mask_sums": torch.stack([one.sum() for one in masks]),
            } | changed  # fmt: skip

            def mean(values, masks=masks, lengths=lengths):
                pairs = zip(values.split(lengths), masks, strict=True)
                return sum((one * mask).sum() / max(1, mask.sum()) for one, mask in pairs)

            logits = torch.zeros(1, 1, 1)
            loss, log = self.loss(self.args, given, logits, mean)
            assert not any(value.requires_grad for value in log.values()) and log["loss"] == loss.detach()
            per_token = self.args.calculate_per_token_loss
            loss = loss / batch.mask.sum() if per_token else loss * MICROBATCHES / 8 * RANKS / MICROBATCHES / RANKS
            total += torch.autograd.grad(loss, batch.now)[0]
        return total


def logprobs_of(batch):
    """What slime's own function of the logits would return for each microbatch in turn."""
    turns = iter(list(batch.microbatches()))
    return lambda args, given, logits: [batch.now[row][: batch.lengths[row]] for row in next(turns)]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_slime_gets_the_gradient_of_the_loss(name):
    batch, per_token = Batch(), name in TOKEN_MEANS
    expected = batch.expected(name)
    slime = Slime(slime_loss(name, logprobs_of(batch), **PARAMETERS[name]), calculate_per_token_loss=per_token)
    assert torch.allclose(slime.gradient(batch), expected, rtol=0, atol=1e-12)

    # With --use-rollout-logprobs the sampler's are the old ones; without either, a sample's own.
    for flag, key in ((True, "rollout"), (False, "now")):
        other, lacks = Batch(), {} if flag else {"log_probs": None}
        other.old = getattr(other, key).detach()
        loss = slime_loss(name, logprobs_of(batch), **PARAMETERS[name])
        found = Slime(loss, calculate_per_token_loss=per_token, use_rollout_logprobs=flag).gradient(batch, **lacks)
        assert torch.allclose(found, other.expected(name), rtol=0, atol=1e-12)

    loss = slime_loss(name, logprobs_of(batch), **PARAMETERS[name])
    with refused(ConfigError, key="calculate_per_token_loss", got=not per_token):
        Slime(loss, calculate_per_token_loss=not per_token).gradient(batch)


@pytest.mark.parametrize(
    ("flags", "changed", "facts"),
    [
        ({"use_tis": True}, {}, {"key": "use_tis"}),
        ({"use_opsm": True}, {}, {"key": "use_opsm"}),
        ({"get_mismatch_metrics": True}, {}, {"key": "get_mismatch_metrics"}),
        ({"entropy_coef": 0.01}, {}, {"key": "entropy_coef"}),
        ({"kl_loss_coef": 0.01}, {}, {"key": "kl_loss_coef"}),
        ({}, {"response_lengths": [3, 2]}, {"expected": [3, 2]}),  # context parallelism: a part of each
        ({}, {"rollout_mask_sums": [11, 11]}, {"got": ("11",)}),  # both samples are one rollout
        ({"use_rollout_logprobs": True}, {"rollout_log_probs": None}, {"given": "gspo"}),
    ],
)
def test_slime_settings_that_the_loss_would_pass_over_are_refused(flags, changed, facts):
    batch = Batch()
    with refused(ConfigError, **facts):
        Slime(slime_loss("gspo", logprobs_of(batch), **PARAMETERS["gspo"]), **flags).gradient(batch, **changed)


def test_a_coefficient_without_its_flag_does_nothing_and_is_not_refused():
    batch = Batch()
    loss = slime_loss("gspo", logprobs_of(batch), **PARAMETERS["gspo"])
    found = Slime(loss, use_kl_loss=False, kl_loss_coef=0.5).gradient(batch)
    assert torch.allclose(found, batch.expected("gspo"), rtol=0, atol=1e-12)


def test_a_sample_without_a_trained_token_has_no_gradient():
    batch = Batch(empty=True)
    verl, expected = Verl(), batch.expected("dapo")
    verl.register("ours")(verl_loss("dapo", **PARAMETERS["dapo"]))
    slime = Slime(slime_loss("dapo", logprobs_of(batch), **PARAMETERS["dapo"]), calculate_per_token_loss=True)
    for found in (verl.gradient(batch, "ours", agg="token-mean"), slime.gradient(batch)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12) and not found[3].any()
