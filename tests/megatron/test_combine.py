"""Tests the sums over the experts' outputs: their order, their precision, and their gradients."""

import pytest
import torch

from moe_rl.megatron.dispatcher import places_of, spread, summed
from tests.support.operations import Operations


def sent_rows(rows, top_k, experts=16):
    """Return the order in which rows are sent to random experts."""
    chosen = torch.rand(rows, experts).topk(top_k)[1]
    return chosen.flatten().argsort(stable=True) // top_k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "top_k"), [(37, 3), (5, 1), (1, 16), (0, 4)])
def test_sums_are_those_of_each_row_in_the_order_of_sending(rows, top_k, dtype):
    """In bfloat16 they are rounded once: a sum in bfloat16 would be off by many units of its rounding."""
    order = sent_rows(rows, top_k)
    sent = torch.randn(rows * top_k, 24).to(dtype).requires_grad_()
    output = summed(sent, order, places_of(order, rows))
    exact, sizes = torch.zeros(2, rows, 24, dtype=torch.float64)
    for row, one in zip(order.tolist(), sent.detach().double(), strict=True):
        exact[row] += one
        sizes[row] += one.abs()
    adding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert output.shape == (rows, 24) and output.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + top_k * adding * sizes
    assert ((output.detach().double() - exact).abs() <= bound).all()
    weight = torch.randn(rows, 24).to(dtype)
    (output * weight).sum().backward()
    assert torch.equal(sent.grad, weight[order])


def test_one_is_the_backward_of_the_other():
    order = sent_rows(7, 4)
    places = places_of(order, 7)
    rows, sent = (torch.randn(count, 3, dtype=torch.float64, requires_grad=True) for count in (7, 28))
    torch.autograd.gradcheck(lambda rows: spread(rows, order, places), (rows,))
    torch.autograd.gradcheck(lambda sent: summed(sent, order, places), (sent,))
    assert torch.equal(spread(rows, order, places), rows[order])


class Atomics(Operations):
    """Counts the operations that a GPU does with atomics in any order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0].rstrip("_") not in ("scatter_add", "index_add", "index_put", "_index_put_impl"):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_no_order_is_left_to_chance():
    order = sent_rows(37, 3)
    places = places_of(order, 37)
    rows = torch.randn(37, 24, dtype=torch.bfloat16, requires_grad=True)
    with Atomics() as atomics:
        (summed(spread(rows, order, places), order, places) * torch.randn(37, 24)).sum().backward()
        assert atomics.count == 0
        torch.zeros(37, 24).index_add_(0, order, torch.ones(111, 24))
    assert atomics.count == 1
