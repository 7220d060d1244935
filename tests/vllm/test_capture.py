"""The buffer that the routers write to."""

import torch

from moe_rl.vllm.capture import NOT_REPORTED, Capture


def test_a_layer_that_says_nothing_does_not_keep_the_experts_of_the_step_before():
    capture = object.__new__(Capture)  # without a model to bind it to
    capture.buffer, capture._column = torch.full((4, 2, 2), NOT_REPORTED, dtype=torch.int32), {3: 0, 5: 1}
    first = torch.tensor([[1, 2], [3, 4], [5, 6]])
    capture.capture(3, first)
    capture.capture(5, first)
    capture.clear(3)
    capture.capture(5, first[:2])
    assert capture.buffer[:3, 0].eq(NOT_REPORTED).all()
    assert torch.equal(capture.buffer[:2, 1], first[:2].int()) and capture.buffer[2, 1].eq(NOT_REPORTED).all()
