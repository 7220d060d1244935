"""Adam's state in host memory. Parameters in bfloat16 say here that they are on a GPU, or Megatron would move none."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.errors import ConfigError
from tests.megatron.test_schedule import Run
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
MEMORY = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
MEMORY |= {"grad_reduce_in_fp32": False, "pin_cpu_grads": False}


@pytest.fixture
def on_gpu():
    from moe_rl.megatron.optimizer_slices import HybridDeviceOptimizer

    on_host, divide = {}, HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divided(hybrid, fraction):
        """Give the float32 copies of parameters that stay on the GPU, which do not say so, to the GPU's Adam."""
        groups, none, of_gpu, of_host, in_float32 = divide(hybrid, fraction)
        assert none == []
        sides = []
        for moved in (True, False):
            side = [{**group, "params": [p for p in group["params"] if (p in of_host) is moved]} for group in groups]
            sides.append([group for group in side if group["params"]])
        return *sides, of_gpu, of_host, in_float32

    def pin(tensor):
        on_host[tensor.data_ptr()] = tensor  # kept, so that no other tensor gets its place
        return tensor

    says = property(lambda tensor: tensor.dtype is torch.bfloat16 and tensor.data_ptr() not in on_host)
    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "is_cuda", says, create=True),
        mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divided),
    ):
        yield on_host


def resumed(run, memory):
    """Return a new policy with the weights and the optimizer of `run`, through the parts of a checkpoint."""
    from moe_rl.megatron import checkpoint
    from moe_rl.megatron.model import unwrap

    other = Run(dtype="bfloat16", megatron_optimizer=memory)
    state = checkpoint.sharded(run.policy, loading=False)["optimizer"]
    checkpoint.sharded(other.policy, loading=True)
    for ours, theirs in zip(run.policy.chunks, other.policy.chunks, strict=True):
        unwrap(theirs).load_state_dict(unwrap(ours).state_dict())
    for number, optimizer in enumerate(other.policy.optimizers):
        parts = state[str(number)].items()
        loaded = {at: {kind: [box.data.clone() for box in boxes] for kind, boxes in own.items()} for at, own in parts}
        checkpoint._set_state(optimizer, loaded, checkpoint.optimizer_step(run.policy))
    other.policy.updates = run.policy.updates
    theirs, ours = (checkpoint.sharded(one.policy, loading=False) for one in (other, run))
    assert checkpoint.optimizer_sums(theirs) == checkpoint.optimizer_sums(ours)
    return other


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "also",
    [{}, {"overlap_cpu_optimizer_d2h_h2d": True}, {"optimizer_offload_fraction": 0.5}],
    ids=["all", "overlap", "half"],
)
def test_a_run_with_its_optimizer_in_host_memory_learns_the_same_and_resumes_bit_for_bit(on_gpu, also):
    """`overlap` is what configs/qwen3_30b_a3b_8gpu.yaml sets. On a CPU it overlaps nothing, but each parameter has an
    Adam of its own."""
    memory = MEMORY | also
    plain, run = Run(dtype="bfloat16"), Run(dtype="bfloat16", megatron_optimizer=memory)
    (hybrid,) = {one.optimizer for one in run.policy.optimizers[:1]}
    parameters = [values for group in hybrid.param_groups for values in group["params"]]
    moved = [values for values in parameters if values in hybrid.gpu_params_map_cpu_copy]
    adams, half = len(hybrid.cpu_optimizers), memory["optimizer_offload_fraction"] < 1
    assert moved and (len(moved) < len(parameters)) == (hybrid.gpu_optimizer is not None) == half
    assert adams == (len(moved) if memory.get("overlap_cpu_optimizer_d2h_h2d") else 1)
    assert on_gpu and all(values.main_param is None for values in run.policy.chunks[0].parameters())
    before = run.weights()
    for _ in range(2):
        ours, theirs = run.update()[0], plain.update()[0]
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.02) and ours.grad_norm > 1  # they are clipped
    ours, theirs = run.weights(), plain.weights()
    change, apart = (
        torch.cat([(one[name] - ours[name]).flatten() for name in ours]).norm() for one in (before, theirs)
    )
    assert apart < 0.2 * change
    other = resumed(run, memory)
    assert other.update() == run.update()
    ours, theirs = run.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run.policy.content(torch.bfloat16, updated=True)  # the parameters are what Adam wrote in host memory
    next(iter(hybrid.state.values()))["master_param"].add_(1.0)
    with pytest.raises(Exception, match="other weights than its optimizer wrote"):
        run.policy.content(torch.bfloat16, updated=True)


@pytest.mark.usefixtures("one_rank")
def test_a_run_begins_with_the_weights_of_another(on_gpu, tmp_path):
    from moe_rl.megatron import checkpoint
    from moe_rl.megatron.saving import Checkpoints

    other = Run(dtype="bfloat16")
    with torch.no_grad():
        for values in other.policy.chunks[0].parameters():
            values.mul_(1.5)
    Checkpoints(tmp_path, ParallelConfig(), keep=1, asynchronous=False).save(1, other.policy, {})
    plain, run = Run(dtype="bfloat16"), Run(dtype="bfloat16", megatron_optimizer=MEMORY)
    (path,) = tmp_path.iterdir()
    for one in (plain, run):
        checkpoint.load_start(path, one.policy, optimizer=False)
        one.policy.content(torch.bfloat16, updated=True)
    begun = other.weights()
    assert all(torch.equal(begun[name], values) for name, values in run.weights().items()) and on_gpu
    assert run.update()[0].applied and plain.update()[0].applied
    ours, theirs = run.weights(), plain.weights()
    change, apart = (torch.cat([(one[name] - ours[name]).flatten() for name in ours]).norm() for one in (begun, theirs))
    assert apart < 0.2 * change
    run.policy.content(torch.bfloat16, updated=True)


@pytest.mark.usefixtures("one_rank")
def test_a_sync_compares_with_main_weights_a_chunk_at_a_time(on_gpu, monkeypatch):
    """Each copy on the device lies here in memory of numpy, whose end is seen."""
    from moe_rl.megatron import live_weights

    run, move, copies, most = Run(dtype="bfloat16", megatron_optimizer=MEMORY), torch.Tensor.to, [], []
    run.update()
    for size in ("_GROUP", "_CHUNK"):
        monkeypatch.setattr(live_weights, size, 1000)
    assert max(values.numel() for values in run.policy.chunks[0].parameters()) > 4000

    def to(values, *where):
        moved = move(values, *where)
        if not isinstance(where[0], torch.device) or values.dtype is not torch.float32:
            return moved
        memory = np.empty(moved.nbytes, np.uint8)
        copies.append((weakref.ref(memory), moved.numel()))
        most.append(sum(size for alive, size in copies if alive() is not None))
        return torch.frombuffer(memory, dtype=moved.dtype).copy_(moved.view(-1))

    monkeypatch.setattr(torch.Tensor, "to", to)
    run.policy.content(torch.bfloat16, updated=True)
    assert max(most) <= 1000
    assert sum(size for _, size in copies) == sum(values.numel() for values in run.policy.chunks[0].parameters())


def test_main_weights_of_two_memories_are_not_joined(monkeypatch):
    """Some are in host memory if a fraction is; `meta` is another memory here."""
    from moe_rl.megatron import live_weights

    groups = []
    monkeypatch.setattr(live_weights, "_unlike", lambda group: groups.append(group) or torch.tensor(False))
    held = []
    for device in ("cpu", "cpu", "meta"):
        values = torch.ones(3, dtype=torch.bfloat16)
        values.main_param = torch.ones(3, device=device)
        held.append(live_weights._Owned(values, ("part",), lambda whole: (whole,)))
    assert live_weights._late(held, []) == []
    assert [len(group) for group in groups] == [2, 1]


@pytest.mark.usefixtures("one_rank")
def test_without_a_gpu_there_is_nothing_to_move():
    with refused(ConfigError, key="train.megatron_optimizer.optimizer_cpu_offload"):
        Run(dtype="bfloat16", megatron_optimizer=MEMORY)
