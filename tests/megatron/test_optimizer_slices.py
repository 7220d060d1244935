"""Tests where a slice of a parameter lies in what a checkpoint stores. tests/distributed/test_state.py saves it."""

import math
import queue
import weakref
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from moe_rl.megatron.optimizer_slices import _stored_boxes, boxes


@st.composite
def slices(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    ends = st.integers(0, math.prod(shape))
    return shape, *sorted((draw(ends), draw(ends)))


def cut(whole, offset, size):
    return whole[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))]


@given(slices())
def test_boxes_are_the_elements_in_their_order(case):
    shape, start, end = case
    whole, found = torch.arange(math.prod(shape)).view(shape), list(boxes(shape, start, end))
    assert torch.cat([torch.arange(0), *(cut(whole, *box).flatten() for box in found)]).tolist() == [*range(start, end)]
    assert all(math.prod(size) for _, size in found) and len(found) <= 2 * len(shape) - 1


def stored(whole, boxes):
    """What the boxes cut out of the tensor that all ranks store together."""
    return torch.cat([cut(whole, box.global_offset, box.local_shape).flatten() for box in boxes])


@pytest.mark.parametrize(("start", "end"), [(0, 24), (5, 24), (3, 7), (10, 14), (11, 23)])
def test_a_slice_of_an_expert_that_is_stored_in_two_halves(start, end):
    """The first matrix of a gated expert: rank 1 of 2 has half of the gate and half of the projection, one behind the
    other. They are stored as the gate of all ranks and then the projection, as one of 3 experts."""
    whole = torch.arange(3 * 16 * 3.0).view(3, 16, 3)
    parameter = torch.nn.Parameter(torch.cat([whole[2, 4:8], whole[2, 12:16]]))
    entry = ShardedTensor.from_rank_offsets("fc1", parameter, (0, 2, 3), (1, 1, 2), prepend_axis_num=1)
    factory = apply_swiglu_sharded_factory(entry, ((0, 2, 3),))
    found = list(_stored_boxes(factory, parameter, start, end))
    assert torch.equal(stored(whole, found), parameter.detach().flatten()[start:end])
    assert {box.key for box in found} == {"fc1"} and not any(box.has_regular_grid for box in found)


def test_slices_that_end_within_a_row_are_saved_and_loaded_by_other_slices(one_rank, tmp_path):
    parameter = torch.nn.Parameter(torch.arange(35.0).view(7, 5))
    entry, flat = ShardedTensor.from_rank_offsets("weight", parameter), parameter.detach().flatten()

    def cut_at(*places):
        ends = zip((0, *places), (*places, 35), strict=True)
        return [box for start, end in ends for box in _stored_boxes(entry, parameter, start, end)]

    boxes = cut_at(8, 11)
    assert len(boxes) == 6
    values = flat.split([math.prod(box.local_shape) for box in boxes])
    written = [replace(box, data=data.view(box.local_shape)) for box, data in zip(boxes, values, strict=True)]
    with patch.object(filesystem_async, "_results_queue", queue.Queue()):
        dist_checkpointing.save({"boxes": written}, str(tmp_path))
    for places in ((8, 11), (13, 29), ()):
        loaded = dist_checkpointing.load({"boxes": cut_at(*places)}, str(tmp_path))
        assert torch.equal(torch.cat([box.flatten() for box in loaded["boxes"]]), flat)


def test_what_is_not_stored_in_the_order_of_its_elements_is_refused():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    entry = ShardedTensor.from_rank_offsets("weight", parameter)
    turned = replace(entry, data=parameter.T, local_shape=(3, 2), global_shape=(3, 2))
    copied = replace(entry, data=parameter.detach().clone())
    for stored_as in (turned, copied):
        factory = ShardedTensorFactory("weight", parameter, lambda *_, one=stored_as: [one], lambda parts: parts[0])
        with pytest.raises(TypeError, match="weight is not stored in the order"):
            list(_stored_boxes(factory, parameter, 0, 6))


class PreciseAdam(torch.optim.Optimizer):
    """Keeps its state as TransformerEngine's FusedAdam does for bfloat16 parameters: main weights are the 16 bits that
    a parameter lacks, and moments in bfloat16 are given and taken in float32."""

    store_param_remainders = True

    def __init__(self, groups):
        super().__init__(groups, {})

    def initialize_state(self, parameter, store_param_remainders):
        assert store_param_remainders is (parameter.dtype is torch.bfloat16)
        kinds = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.int16}
        self.state[parameter] = {kind: torch.zeros_like(parameter, dtype=dtype) for kind, dtype in kinds.items()}

    def get_unscaled_state(self, parameter, kind):
        state = self.state[parameter][kind]
        return state if state.dtype is torch.int16 else on_pretended_gpu(state.float())

    def set_scaled_state(self, parameter, kind, values):
        self.state[parameter][kind].copy_(values)


made, on_host = [], []


def on_pretended_gpu(values, noted=made):
    """Return a copy, and note the memory in which it is."""
    memory = np.empty(values.nbytes, np.uint8)
    noted.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values) if values.numel() else values


def precise(run):
    """Give a run's optimizers Adam with moments in bfloat16, as Megatron would where TransformerEngine is."""
    for optimizer in run.policy.optimizers:
        settings = optimizer.config
        settings.use_precision_aware_optimizer = settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        settings.exp_avg_dtype = settings.exp_avg_sq_dtype = torch.bfloat16
        shards = [*zip(optimizer.shard_fp32_groups, optimizer.shard_float16_groups, strict=True)]
        groups = [{"params": [*ours, *theirs]} for ours, theirs in shards]
        optimizer.optimizer = PreciseAdam(groups)
    return run


@pytest.fixture
def two_runs(one_rank, monkeypatch):
    from tests.megatron.test_schedule import Run

    made.clear()
    on_host.clear()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda values: on_pretended_gpu(values, on_host))
    return [precise(Run(dtype="bfloat16")) for _ in range(2)]


def alive(noted=made):
    return sum(memory() is not None for memory in noted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_moments_below_float32_are_saved_and_resumed_without_copies_of_all_on_the_gpu(two_runs, tmp_path, monkeypatch):
    from moe_rl.config.training import ParallelConfig
    from moe_rl.megatron import checkpoint, world
    from moe_rl.megatron.saving import Checkpoints

    run, other = (one.policy for one in two_runs)
    state = checkpoint.sharded(run, loading=False)  # Adam has no state before its first step
    assert made and alive() == 0
    (adam,) = [one.optimizer for one in run.optimizers]
    generator = torch.Generator().manual_seed(1)
    for own in adam.state.values():
        for kind in own:
            own[kind].copy_(torch.randn(own[kind].shape, generator=generator) * 100)
    adam.param_groups[0]["step"] = 3
    made.clear()
    on_host.clear()
    most, gave, left = [], adam.get_unscaled_state, []

    def give(*which):
        most.append(alive())
        return gave(*which)

    adam.get_unscaled_state = give
    monkeypatch.setattr(world, "await_device", lambda: left.append(alive(on_host)))  # when all is copied to write it
    saved = Checkpoints(tmp_path, ParallelConfig(), keep=1, asynchronous=True)
    saved.save(1, run, {})
    saved.finish()
    assert on_host and left[0] <= 1
    parameters = len(adam.state)
    assert len(most) == 3 * parameters and max(most) <= 4  # those of a parameter and of the one before it
    (path,) = tmp_path.iterdir()
    checkpoint.load_start(path, other, optimizer=False)
    other.content(torch.bfloat16, updated=True)  # Adam has its main weights
    for one in other.optimizers:
        one.optimizer.state_dict = one.optimizer.load_state_dict = None  # would copy everything
    loaded = checkpoint.load(path, other, parallel=ParallelConfig(), seed=1)
    checkpoint.check_optimizer(path, other, loaded["optimizer"])
    (theirs,) = [one.optimizer for one in other.optimizers]
    assert checkpoint.optimizer_step(other) == 3 and len(state["optimizer"]["0"]) == parameters
    for ours, own in zip(adam.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(ours[kind], own[kind]) for kind in ours)
