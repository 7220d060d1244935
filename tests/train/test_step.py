"""What the loss of a microbatch adds to a step's sums."""

from types import SimpleNamespace

import pytest
import torch

from moe_rl.config.schema import LOSS_PARAMETERS, ObjectiveConfig
from moe_rl.objectives.policy import POLICY_LOSSES, reference_kl
from moe_rl.train.shares import Share
from moe_rl.train.step import TrainStep, UpdateSums


def test_sums_wait_for_the_end_of_the_update(monkeypatch):
    """No microbatch makes the host wait for the device: nothing is read until all of them are through."""
    step = object.__new__(TrainStep)
    step.config = SimpleNamespace(objective=ObjectiveConfig(clip_low=0.1, clip_high=0.1, kl_coef=0.5))
    step.reference = True
    logprobs, old, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -0.4]), torch.full((3,), -1.0)
    microbatch = SimpleNamespace(
        advantages=torch.tensor([1.0, -1.0]), sequence_ids=torch.tensor([0, 0, 1]), rollout_logprobs=old
    )
    share = Share([microbatch] * 2, [], 4, 4, 6, old_logprobs=[old] * 2, ref_logprobs=[ref] * 2)
    sums = UpdateSums()
    loss = step._loss(share, sums, {})

    def read(tensor, *_):
        raise AssertionError("the host reads a tensor")

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
            patched.setattr(torch.Tensor, name, read)
        with pytest.raises(AssertionError):
            float(logprobs[0])
        one = loss(0, logprobs)
        loss(1, logprobs)
    # sequence 0 went up by exp(0.25) and is clipped; sequence 1 went down by exp(-0.1), within the range
    assert float(sums.clip_units) == 4 and float(sums.clip_events) == 2
    assert float(sums.ratio) == pytest.approx(2 * (torch.tensor([0.25, -0.1]).exp().sum().item()))
    assert float(sums.loss) == pytest.approx(2 * one.item()) and float(sums.kl) > 0


@pytest.mark.parametrize("name", LOSS_PARAMETERS)
def test_every_loss_is_given_its_parameters_and_its_denominator(name):
    """The KL penalty has a denominator of its own: its value does not depend on the loss beside it."""
    step = object.__new__(TrainStep)
    step.config = SimpleNamespace(objective=ObjectiveConfig(name=name, kl_coef=0.5, **LOSS_PARAMETERS[name]))
    step.reference = True
    logprobs, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -2.1, -0.4])
    microbatch = SimpleNamespace(
        advantages=torch.tensor([1.0, -1.0]), sequence_ids=torch.tensor([0, 0, 1]), rollout_logprobs=old - 0.3
    )
    share = Share([microbatch], [], 7, 2, 3, old_logprobs=[old], ref_logprobs=[torch.full((3,), -1.0)])
    sums = UpdateSums()
    total = step._loss(share, sums, {})(0, logprobs)
    ids = microbatch.sequence_ids
    alone = POLICY_LOSSES[name](
        logprobs,
        old,
        microbatch.advantages,
        ids,
        denominator=7,
        **LOSS_PARAMETERS[name],
        **({"rollout_logprobs": old - 0.3} if name in ("minirl", "decoupled") else {}),
    )
    kl = reference_kl(logprobs, share.ref_logprobs[0], ids, 2)
    assert float(sums.kl) == pytest.approx(float(kl), rel=1e-6) and float(kl) > 0
    assert float(total) == pytest.approx(float(alone.loss + 0.5 * kl), rel=1e-6)
