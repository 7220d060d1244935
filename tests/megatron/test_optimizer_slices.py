"""Tests where a slice of a parameter lies in what a checkpoint stores. tests/distributed/test_state.py saves it."""

import math
import queue
from dataclasses import replace
from unittest.mock import patch

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
