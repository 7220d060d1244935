"""Our Adam makes the updates of torch's, which has another state."""

import pytest
import torch

from moe_rl.megatron.adam import FusedAdam


@pytest.mark.parametrize(("decoupled", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_its_updates_are_those_of_torch(decoupled, theirs):
    generator = torch.Generator().manual_seed(1)
    ours_p, theirs_p = (torch.nn.Parameter(torch.linspace(-2, 2, 12, dtype=torch.float64)) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, reference = FusedAdam([ours_p], adam_w_mode=decoupled, **settings), theirs([theirs_p], **settings)
    for _ in range(4):
        ours_p.grad = torch.randn(12, dtype=torch.float64, generator=generator)
        theirs_p.grad = ours_p.grad.clone()
        ours.step()
        reference.step()
        torch.testing.assert_close(ours_p, theirs_p, rtol=1e-12, atol=1e-12)
    assert ours.param_groups[0]["step"] == 4 and set(ours.state[ours_p]) == {"exp_avg", "exp_avg_sq"}
