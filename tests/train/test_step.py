"""Tests what the loss of a microbatch adds to a step's sums."""

from types import SimpleNamespace

import pytest
import torch

from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES, CorrectionConfig, DecoupledConfig, GspoConfig
from moe_rl.megatron.microbatch import Share, Work
from moe_rl.objectives.losses import policy_loss, reference_kl
from moe_rl.train.loss import LossSums, UpdateLoss


def test_sums_wait_for_the_end_of_the_update(monkeypatch):
    """No microbatch may make the host wait for the device: sums are read after all microbatches have run."""
    corrections = (
        CorrectionConfig(level="token", rule="veto", low=0.5),
        CorrectionConfig(level="sequence", rule="truncate", high=2.0),
        CorrectionConfig(level="geometric", rule="reject", high=2.0),
    )
    objective = GspoConfig(clip_low=0.1, clip_high=0.1, kl_coef=0.5, corrections=corrections, off_policy_delta=0.5)
    logprobs, old, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -0.4]), torch.full((3,), -1.0)
    microbatch = SimpleNamespace(
        advantages=torch.tensor([1.0, -1.0]), sequence_ids=torch.tensor([0, 0, 1]), rollout_logprobs=old
    )
    share = Share([Work(microbatch, None, old, ref)] * 2, 4, 4, 6)
    sums = LossSums()
    loss = UpdateLoss(objective, share, sums)

    def read(tensor, *_):
        raise AssertionError("the host reads a tensor")

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
            patched.setattr(torch.Tensor, name, read)
        with pytest.raises(AssertionError):
            float(logprobs[0])
        one = loss(0, logprobs)
        loss(1, logprobs)
    # Sequence 0 went up by exp(0.25) and is clipped; sequence 1 went down by exp(-0.1), within the range.
    assert float(sums.clip_units) == 4 and float(sums.clip_events) == 2
    assert float(sums.ratio) == pytest.approx(2 * (torch.tensor([0.25, -0.1]).exp().sum().item()))
    assert float(sums.loss) == pytest.approx(2 * one.item()) and float(sums.kl) > 0
    assert sums.corrections.tolist() == [6, 6, 6, 0, 0, 4, 0]  # trainer and sampler agree, so every weight is 1


@pytest.mark.parametrize("name", LOSS_PARAMETERS)
def test_every_loss_is_given_its_parameters_its_denominator_and_its_weights(name):
    """The KL penalty has its own denominator: its value does not depend on the policy loss."""
    corrections = (CorrectionConfig(level="geometric", rule="reject", low=0.5),)
    objective = LOSSES[name].model_construct(  # skips validation, because not every loss accepts these corrections
        name=name,
        kl_coef=0.5,
        kl_estimator="k1",
        kl_unbiased=True,
        corrections=corrections,
        off_policy_delta=0.25,
        **LOSS_PARAMETERS[name],
    )
    logprobs, old = torch.tensor([-1.0, -2.0, -0.5, -1.0]), torch.tensor([-1.0, -2.1, -0.4, -1.1])
    # Ratios to the sampler: one above one half, one below, and one that has decreased since.
    rollout = old + torch.tensor([0.3, 0.5, 0.9, 0.2])
    microbatch = SimpleNamespace(
        advantages=torch.tensor([1.0, -1.0, -1.0]),
        sequence_ids=torch.tensor([0, 0, 1, 2]),
        rollout_logprobs=rollout - torch.tensor([0.0, 0.0, 0.0, 0.4]),
    )
    work = Work(microbatch, None, old, torch.full((4,), -1.0))
    share = Share([work], 7, 3, 4)
    sums = LossSums()
    total = UpdateLoss(objective, share, sums)(0, logprobs)
    ids = microbatch.sequence_ids
    alone = policy_loss(
        name,
        logprobs,
        old,
        microbatch.advantages,
        ids,
        denominator=7,
        weights=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64),
        rollout_logprobs=microbatch.rollout_logprobs,
        **LOSS_PARAMETERS[name],
    )
    kl = reference_kl(logprobs, work.ref_logprobs, ids, 3, estimator="k1", old_logprobs=old)
    assert float(sums.kl) == pytest.approx(float(kl), rel=1e-6) and float(kl) != 0
    assert float(total) == pytest.approx(float(alone.loss + 0.5 * kl), rel=1e-6)
    assert sums.corrections.tolist() == [4, 3, 3, 1, 0, 3, 1]
    # The mask uses the current policy.
    UpdateLoss(objective, share, sums)(0, logprobs - torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert sums.corrections.tolist() == [8, 5, 5, 3, 0, 6, 3]


def test_the_entropy_bonus_lowers_the_loss_by_the_mean_over_all_tokens():
    logprobs, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -0.4])
    microbatch = SimpleNamespace(
        advantages=torch.tensor([1.0, -1.0]), sequence_ids=torch.tensor([0, 0, 1]), rollout_logprobs=old
    )
    share = Share([Work(microbatch, None, old)], 4, 4, 6)
    without = UpdateLoss(GspoConfig(), share, LossSums())(0, logprobs)
    entropies = torch.tensor([1.0, 2.0, 0.5])
    bonus = UpdateLoss(GspoConfig(entropy_coef=0.5), share, LossSums())(0, logprobs, entropies)
    assert float(bonus - without) == pytest.approx(-0.5 * 3.5 / 6)


def test_interpolated_old_logprobs_follow_the_current_policy_by_lag():
    """No pass has computed old logprobs: the loss has them from its own forward, in every update."""
    objective = DecoupledConfig(
        name="decoupled", clip_low=0.2, clip_high=0.2, weight_cap=5.0, old_logprobs="interpolated"
    )
    rollout, lags = torch.tensor([-1.5, -2.0, -0.4]), torch.tensor([0, 1, 4])
    microbatch = SimpleNamespace(
        advantages=torch.tensor([1.0, -1.0]), sequence_ids=torch.tensor([0, 0, 1]), rollout_logprobs=rollout
    )
    work = Work(microbatch, None, rollout, lags=lags)
    for logprobs in (torch.tensor([-1.0, -2.1, -0.8]), torch.tensor([-1.1, -2.3, -0.7])):
        old = torch.tensor([float(logprobs[0]), -2.0, float(0.75 * logprobs[2] + 0.25 * rollout[2])])
        alone = policy_loss(
            "decoupled", logprobs, old, microbatch.advantages, microbatch.sequence_ids, denominator=3,
            rollout_logprobs=rollout, **objective.parameters,
        )  # fmt: skip
        assert float(UpdateLoss(objective, Share([work], 3, 2, 3), LossSums())(0, logprobs)) == pytest.approx(
            float(alone.loss), rel=1e-6
        )
        torch.testing.assert_close(work.old_logprobs, old)
