"""Adam's state in host memory. Parameters in bfloat16 say here that they are on a GPU, or Megatron would move none."""

from unittest import mock

import pytest
import torch

from moe_rl.errors import ConfigError
from tests.megatron.test_schedule import Run
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
MEMORY = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
MEMORY |= {"main_grads_dtype": "bfloat16", "grad_reduce_in_fp32": False, "pin_cpu_grads": False}


@pytest.fixture
def on_gpu():
    on_host = set()

    def pin(tensor):
        on_host.add(tensor.data_ptr())
        return tensor

    says = property(lambda tensor: tensor.dtype is torch.bfloat16 and tensor.data_ptr() not in on_host)
    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "is_cuda", says, create=True),
    ):
        yield on_host


def resumed(run):
    """Return a new policy with the weights and the optimizer of `run`, through the parts of a checkpoint."""
    from moe_rl.megatron import checkpoint
    from moe_rl.megatron.model import unwrap

    other = Run(dtype="bfloat16", megatron_optimizer=MEMORY)
    state = checkpoint.sharded(run.policy, loading=False)["optimizer"]
    checkpoint.sharded(other.policy, loading=True)
    for ours, theirs in zip(run.policy.chunks, other.policy.chunks, strict=True):
        unwrap(theirs).load_state_dict(unwrap(ours).state_dict())
    for number, optimizer in enumerate(other.policy.optimizers):
        parts = state[str(number)].items()
        loaded = {at: {kind: [box.data.clone() for box in boxes] for kind, boxes in own.items()} for at, own in parts}
        checkpoint._set_state(optimizer, loaded, checkpoint.optimizer_step(run.policy))
    other.policy.updates = run.policy.updates
    assert checkpoint.optimizer_sums(other.policy) == checkpoint.optimizer_sums(run.policy)
    return other


@pytest.mark.usefixtures("one_rank")
def test_a_run_with_its_optimizer_in_host_memory_learns_the_same_and_resumes_bit_for_bit(on_gpu):
    plain, run = Run(dtype="bfloat16"), Run(dtype="bfloat16", megatron_optimizer=MEMORY)
    (hybrid,) = {one.optimizer for one in run.policy.optimizers[:1]}
    moved = sum(values.numel() * 12 for values in hybrid.gpu_params_map_cpu_copy.values())
    assert moved > 0 and on_gpu and all(values.main_param is None for values in run.policy.chunks[0].parameters())
    before = run.weights()
    for _ in range(2):
        ours, theirs = run.update()[0], plain.update()[0]
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.02) and ours.grad_norm > 1  # they are clipped
    ours, theirs = run.weights(), plain.weights()
    change, apart = (
        torch.cat([(one[name] - ours[name]).flatten() for name in ours]).norm() for one in (before, theirs)
    )
    assert apart < 0.2 * change
    other = resumed(run)
    assert other.update() == run.update()
    ours, theirs = run.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run.policy.content(torch.bfloat16, updated=True)  # the parameters are what Adam wrote in host memory
    next(iter(hybrid.state.values()))["master_param"].add_(1.0)
    with pytest.raises(Exception, match="other weights than its optimizer wrote"):
        run.policy.content(torch.bfloat16, updated=True)


@pytest.mark.usefixtures("one_rank")
def test_without_a_gpu_there_is_nothing_to_move():
    with refused(ConfigError, key="train.megatron_optimizer.optimizer_cpu_offload"):
        Run(dtype="bfloat16", megatron_optimizer=MEMORY)
