import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.live_bytes import LiveBytes
from moe_rl.objectives import logprobs as module
from moe_rl.objectives.logprobs import (
    Support,
    hidden_scores,
    token_logprobs,
    token_logprobs_and_entropies,
    token_scores,
)
from tests.support.refusals import refused


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


def supported(targets, vocabulary):
    """Make a support for each token: its own id and others; for token 1 all ids, for token 2 only its own. Tokens 3 and
    4 share a set, which lists the ids outside it."""
    rng = np.random.default_rng(3)
    sets = [sorted({target, *rng.choice(vocabulary, vocabulary // 2).tolist()}) for target in targets.tolist()]
    sets[1:3] = [], [int(targets[2])]
    outside = [i for i in range(vocabulary) if i not in {*sets[3], int(targets[4])}]
    sets[3:5] = [[i for i in range(vocabulary) if i not in outside]] * 2
    listed = [*sets[:3], outside, *sets[5:]]
    counts = np.array([len(ids) for ids in listed])
    counts[3] *= -1
    numbers = [*range(4), 3, *range(4, len(listed))]
    flat = np.array([i for ids in listed for i in ids])
    return sets, Support.of(numbers, counts, flat, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("restricted", [False, True])
def test_logprob_and_entropy_equal_the_scalar_definition(temperature, restricted):
    logits, targets = sample(6, 7, torch.float64)
    sets, support = supported(targets, 7) if restricted else ([[]] * 6, None)
    got = token_logprobs_and_entropies(logits, targets, temperature, support=support)
    for t, (row, target, ids) in enumerate(zip(logits.tolist(), targets.tolist(), sets, strict=True)):
        of_id = {i: math.exp(row[i] / temperature) for i in ids or range(7)}
        total = math.fsum(of_id.values())
        entropy = -math.fsum(x / total * math.log(x / total) for x in of_id.values())
        assert math.isclose(got[0][t], math.log(of_id[target] / total), rel_tol=1e-12, abs_tol=1e-15)
        assert math.isclose(got[1][t], entropy, rel_tol=1e-12, abs_tol=1e-15)
    if restricted:
        assert got[0][2] == got[1][2] == 0 and got[0][1] < 0 < got[1][1]


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [2, 100])
def test_gradients_of_logprob_and_entropy(monkeypatch, rows_per_chunk, restricted):
    logits, targets = sample(5, 6, torch.float64, scale=1.0)
    sets, support = supported(targets, 6) if restricted else (None, None)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 6 * rows_per_chunk)
    logits.requires_grad_()

    def both(x):
        return token_logprobs_and_entropies(x, targets, 0.7, support=support)

    assert torch.autograd.gradcheck(both, logits)
    for chosen in (0, 1):  # each alone: the other has no gradient then
        assert torch.autograd.gradcheck(lambda x, chosen=chosen: both(x)[chosen], logits)
    (gradient,) = torch.autograd.grad(sum(values.sum() for values in both(logits)), logits)
    assert (gradient != 0).any(-1).tolist() == [not restricted or n != 2 for n in range(5)]
    if restricted:
        outside = [[ids != [] and i not in ids for i in range(6)] for ids in sets]
        assert torch.equal(gradient[torch.tensor(outside)], torch.zeros(sum(map(sum, outside)), dtype=torch.float64))


@pytest.mark.parametrize("restricted", [False, True])
def test_further_ids_have_the_logprobs_and_gradients_that_targets_have(restricted):
    logits, targets = sample(6, 7, torch.float64)
    sets, support = supported(targets, 7) if restricted else ([[]] * 6, None)
    others = torch.arange(7).repeat(6, 1)[:, [3, 0, 6]]
    weights = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    inside = torch.tensor([[not ids or i in ids for i in (3, 0, 6)] for ids in sets]).T
    weights[1:4] *= inside
    leaf, alone = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scores = token_scores(leaf, targets, 0.7, entropy=True, others=others, support=support)
    (torch.where(weights == 0, 0.0, scores) * weights).sum().backward()
    first, entropies = token_logprobs_and_entropies(alone, targets, 0.7, support=support)
    expected = [first, *(token_logprobs(alone, ids, 0.7, support=support) for ids in others.T), entropies]
    assert torch.equal(scores, torch.stack(expected)) and scores[1:4][~inside].isneginf().all()
    sum((torch.where(w == 0, 0.0, s) * w).sum() for w, s in zip(weights, expected, strict=True)).backward()
    torch.testing.assert_close(leaf.grad, alone.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("others", "error", "facts"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, {"argument": "others", "expected": 6}),
        (torch.zeros(6, 3, dtype=torch.int32), TypeError, {"fault": "dtype"}),
    ],
)
def test_further_ids_of_other_tokens_are_refused(others, error, facts):
    logits, targets = sample(6, 7)
    with refused(error, **facts):
        token_scores(logits, targets, 1.0, others=others)


def test_a_support_of_everything_changes_no_bit():
    logits, targets = sample(16, 300, torch.bfloat16)
    plain, everything = token_logprobs(logits, targets, 0.9), Support.of(np.zeros(16), [0], [], logits.device)
    assert torch.equal(plain, token_logprobs(logits, targets, 0.9, support=everything))
    named = Support.of(np.zeros(16), [300], np.arange(300), logits.device)
    assert torch.equal(plain, token_logprobs(logits, targets, 0.9, support=named))
    assert torch.equal(plain, token_logprobs_and_entropies(logits, targets, 0.9)[0])


def test_a_token_outside_its_support_is_impossible():
    logits, targets = sample(3, 5)
    others = [[i for i in range(5) if i != target] for target in targets.tolist()]
    support = Support.of(np.arange(3), np.full(3, 4), np.array(others).flatten(), logits.device)
    assert token_logprobs(logits, targets, 1.0, support=support).tolist() == [-math.inf] * 3


@pytest.mark.parametrize("first, size", [(0, 9), (3, 3), (6, 3)])
def test_a_support_is_cut_to_rows_and_to_a_part_of_the_vocabulary(first, size):
    _, targets = sample(7, 9)
    sets, support = supported(targets, 9)
    for rows in (slice(0, 7), slice(2, 5), slice(5, 10)):
        expected = [[ids != [] and i not in ids for i in range(first, first + size)] for ids in sets[rows]]
        assert support.removed(rows, first, size).tolist() == expected


def test_entropy_of_bfloat16_logits_is_computed_in_float32():
    logits, targets = sample(16, 1000, torch.bfloat16)
    got = token_logprobs_and_entropies(logits, targets, 1.0)[1]
    exact = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    assert got.dtype == torch.float32 and (got.double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 3, 100])
def test_gradient_equals_finite_differences_and_autograd(monkeypatch, rows_per_chunk):
    logits, targets = sample(5, 4, torch.float64)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 4 * rows_per_chunk)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.7), logits)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (ours,) = torch.autograd.grad((token_logprobs(logits, targets, 0.7) * weights).sum(), logits)
    plain = (logits / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (theirs,) = torch.autograd.grad((plain * weights).sum(), logits)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_a_bit(monkeypatch, dtype):
    logits, targets = sample(37, 53, dtype)
    _, support = supported(targets, 53)

    def run():
        leaf = logits.clone().requires_grad_()
        value, entropy = token_logprobs_and_entropies(leaf, targets, 0.9, support=support)
        (value.exp() + entropy).sum().backward()
        return value.detach(), entropy.detach(), leaf.grad

    whole = run()
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 53 * 5)
    assert all(torch.equal(*pair) for pair in zip(whole, run(), strict=True))


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
    nothing = Support.of([], [], [], logits.device)
    got = token_logprobs_and_entropies(logits, torch.zeros(0, dtype=torch.int64), 1.0, support=nothing)
    sum(values.sum() for values in got).backward()
    assert [values.tolist() for values in got] == [[], []] and logits.grad.shape == (0, 8)


def test_the_support_of_other_tokens_is_refused():
    logits, targets = sample(3, 5)
    with refused(ValueError, argument="support", got=("4",), expected=3):
        token_logprobs(logits, targets, 1.0, support=Support.of(np.zeros(4), [0], [], logits.device))


@pytest.mark.parametrize(
    ("logits", "targets", "temperature", "error", "facts"),
    [
        (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
            1.0,
            TypeError,
            {"fault": "dtype", "got": ("logits torch.int64",)},
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.int32),
            1.0,
            TypeError,
            {"fault": "dtype", "got": ("targets torch.int32",)},
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(3, dtype=torch.int64),
            1.0,
            ValueError,
            {"fault": "shape", "got": ("(2, 3)", "(3,)")},
        ),
        (
            torch.zeros(1, 2, 3),
            torch.zeros(1, 2, dtype=torch.int64),
            1.0,
            ValueError,
            {"fault": "shape", "got": ("(1, 2, 3)",)},
        ),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0.0, ValueError, {"argument": "temperature"}),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), math.nan, ValueError, {"argument": "temperature"}),
    ],
)
def test_bad_input_is_refused(logits, targets, temperature, error, facts):
    with refused(error, **facts):
        token_logprobs(logits, targets, temperature)


def test_every_id_belongs_to_one_rank_of_those_that_share_the_vocabulary():
    from moe_rl.objectives.logprobs import _own

    targets = torch.arange(12)
    owners = []
    for rank in range(3):
        own, local = _own(targets, 4, SimpleNamespace(rank=lambda rank=rank: rank))
        assert local[own].tolist() == [0, 1, 2, 3] and ((local >= 0) & (local < 4)).all()
        owners.append(own)
    assert torch.stack(owners).sum(0).eq(1).all() and targets[owners[1]].tolist() == [4, 5, 6, 7]


def of_logits(hidden, matrix, places, *given, **options):
    """Compute `hidden_scores` through the logits of all rows."""
    return token_scores((hidden @ matrix.t()).index_select(0, places), *given, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_hidden_states_are_those_of_their_logits(monkeypatch, dtype):
    torch.manual_seed(8)
    hidden, matrix = torch.randn(40, 16).to(dtype), torch.randn(53, 16).to(dtype)
    places = torch.arange(40)[torch.rand(40) < 0.6]
    targets, others = torch.randint(53, (len(places),)), torch.randint(53, (len(places), 3))
    options = {"entropy": True, "others": others}
    weights = torch.randn(5, len(places))

    def run(scores):
        leaves = [leaf.clone().requires_grad_() for leaf in (hidden, matrix)]
        values = scores(*leaves, places, targets, 0.7, **options)
        return values.detach(), *torch.autograd.grad((values * weights).sum(), leaves)

    whole, direct = run(of_logits), run(hidden_scores)
    assert all(map(torch.equal, whole, direct))  # the logits of all rows fit into a chunk
    for rows in (3, 39):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 53 * rows)
        cut, close = run(hidden_scores), 0.05 if dtype is torch.bfloat16 else 1e-5
        for got, expected in zip(cut, whole, strict=True):
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=close, atol=close)
    frozen = hidden_scores(hidden.clone().requires_grad_(), matrix, places, targets, 0.7)
    frozen.sum().backward()


@pytest.mark.parametrize("elements", [1, 10**6])
def test_a_rank_that_predicts_no_token_gives_the_matrix_a_gradient_of_zeros(monkeypatch, elements):
    """Megatron refuses a parameter without a gradient where it sums gradients during the backward pass."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    hidden, matrix = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    hidden_scores(hidden, matrix, nothing, nothing, 1.0, entropy=True).sum().backward()
    for leaf in (hidden, matrix):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_only_a_chunk_of_the_logits_of_hidden_states_exists(monkeypatch):
    rows, width, vocabulary, chunk = 256, 8, 512, 16 * 512
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    hidden, matrix = torch.randn(rows, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets, places = torch.randint(vocabulary, (rows,)), torch.arange(rows)

    def peak(scores):
        with LiveBytes([hidden, matrix]) as counter:
            scores(hidden, matrix, places, targets, 1.0).sum().backward()
        return counter.peak

    assert peak(of_logits) > 2 * 4 * rows * vocabulary  # logits and their gradient
    gradients = 4 * width * (rows + 2 * vocabulary)
    assert peak(hidden_scores) < 6 * 4 * chunk + 2 * gradients < 4 * rows * vocabulary
