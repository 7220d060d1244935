import math

import pytest
import torch

from moe_rl.objectives import logprobs as module
from moe_rl.objectives.logprobs import token_logprobs


def sample(tokens, vocabulary, dtype=torch.float32, scale=4.0):
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    logits = (scale * torch.randn(tokens, vocabulary, generator=generator)).to(dtype)
    return logits, torch.randint(vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_equals_the_scalar_definition(temperature):
    logits, targets = sample(5, 7, torch.float64)
    got = token_logprobs(logits, targets, temperature)
    for row, target, value in zip(logits.tolist(), targets.tolist(), got.tolist(), strict=True):
        total = math.fsum(math.exp(x / temperature) for x in row)
        assert math.isclose(value, row[target] / temperature - math.log(total), rel_tol=1e-12)


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 3, 100])
def test_gradient_equals_finite_differences_and_autograd(monkeypatch, rows_per_chunk):
    logits, targets = sample(5, 4, torch.float64)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 4 * rows_per_chunk)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.7), logits)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    ours, = torch.autograd.grad((token_logprobs(logits, targets, 0.7) * weights).sum(), logits)
    plain = (logits / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    theirs, = torch.autograd.grad((plain * weights).sum(), logits)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_a_bit(monkeypatch, dtype):
    logits, targets = sample(37, 53, dtype)

    def run():
        leaf = logits.clone().requires_grad_()
        value = token_logprobs(leaf, targets, 0.9)
        value.exp().sum().backward()
        return value.detach(), leaf.grad

    whole = run()
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 53 * 5)
    pieces = run()
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])


def test_bfloat16_logits_are_normalised_in_float32():
    logits, targets = sample(16, 1000, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    got = token_logprobs(leaf, targets, 1.0)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert got.dtype == torch.float32 and (got.double() - exact).abs().max() < 1e-5
    coarse = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (coarse.double() - exact).abs().max() > 1e-3  # the witness: in bfloat16 it would not hold
    got.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16
    expected = torch.nn.functional.one_hot(targets, 1000) - logits.double().softmax(-1)
    assert (leaf.grad.double() - expected).abs().max() < 4e-3


def test_large_logits_neither_overflow_nor_cancel():
    logits = torch.tensor([[1e4, 1e4 - 2.0], [-1e4, 1e4]])
    got = token_logprobs(logits, torch.tensor([1, 0]), 1.0).tolist()
    assert math.isclose(got[0], -2 - math.log1p(math.exp(-2)), rel_tol=1e-6) and got[1] == -2e4


def test_backward_holds_no_second_copy_of_the_logits():
    logits, targets = sample(64, 500, torch.bfloat16)
    saved = []

    def pack(tensor):
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(logits.requires_grad_(), targets, 1.0)
    assert sum(saved) == logits.numel() * 2 + targets.numel() * 8


def test_no_tokens():
    logits = torch.zeros(0, 8, requires_grad=True)
    got = token_logprobs(logits, torch.zeros(0, dtype=torch.int64), 1.0)
    got.sum().backward()
    assert got.tolist() == [] and logits.grad.shape == (0, 8)


@pytest.mark.parametrize(("logits", "targets", "temperature", "error", "message"), [
    (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1.0, TypeError, "int64"),
    (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), 1.0, TypeError, "int32"),
    (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), 1.0, ValueError, r"\(2, 3\).*\(3,\)"),
    (torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64), 1.0, ValueError, r"\(1, 2, 3\)"),
    (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0.0, ValueError, "temperature"),
    (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), math.nan, ValueError, "temperature"),
])
def test_bad_input_is_refused(logits, targets, temperature, error, message):
    with pytest.raises(error, match=message):
        token_logprobs(logits, targets, temperature)
