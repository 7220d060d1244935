"""Tests that near ties are left out of comparisons, that nothing else is, and that only so much may be."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families import write_checkpoint
from tests.support.independent import Independent
from tests.support.near_ties import MOST_LEFT_OUT, NEAR, ROWS, Computed, Rows, clear_rows, gaps_of

T, LAYERS, E, K, PROMPT, TIED = 12, 3, 8, 2, 4, 9


@pytest.fixture
def scores():
    """Router logits that lead from expert to expert by a tenth at least."""
    order = torch.rand(T, LAYERS, E, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return 0.2 * order.argsort(-1).float() + 0.1 * torch.rand(T, LAYERS, E, generator=torch.Generator().manual_seed(1))


def tie(scores, row: int, gap: float) -> None:
    """Let the chosen expert with the lowest score of a row lead the next one by `gap` of the largest score."""
    last, following = scores[row, 1].topk(K + 1).indices[-2:]
    scores[row, 1, last] = scores[row, 1, following] + gap * scores.abs().max()


def computed_from(scores) -> Computed:
    sets = scores.topk(K, -1).indices.sort(-1).values.numpy()
    return Computed(sets, gaps_of(scores, K), -np.arange(1.0, T + 1))


def recorded(computed: Computed, *, other_expert=None, other_logprob=None):
    """Return routes and log-probabilities of an engine that agrees, except in a row."""
    routes, logprobs = computed.sets[..., ::-1].copy(), computed.logprobs[PROMPT - 1 :].copy()
    if other_expert is not None:
        routes[other_expert, 1, 0] = next(e for e in range(E) if e not in routes[other_expert, 1])
    if other_logprob is not None:
        logprobs[other_logprob - PROMPT + 1] += 0.027
    return routes, logprobs


FAULTS = [{"other_expert": 0}, {"other_expert": TIED - 1}, {"other_logprob": PROMPT}, {"other_logprob": TIED - 1}]


def test_behind_a_near_tie_nothing_is_compared_and_the_rows_are_counted(scores):
    tie(scores, TIED, NEAR / 2)
    for differs in ({}, {"other_expert": TIED}, {"other_expert": T - 1}, {"other_logprob": TIED}):
        ROWS.clear()
        computed = computed_from(scores)
        computed.check("s", *recorded(computed, **differs), atol=1e-5)
        assert (ROWS.left_out, ROWS.computed) == (T - TIED, T)
    ROWS.clear()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fault", [*FAULTS, {"other_expert": TIED}, {"other_logprob": T - 1}], ids=str)
def test_a_fault_in_a_row_without_a_near_tie_before_it_is_found(scores, fault, tied):
    """A gap that is clear, if only just, excuses nothing: not the results judge what is a tie."""
    tie(scores, TIED, NEAR / 2 if tied else 1.5 * NEAR)
    computed = computed_from(scores)
    if tied and fault not in FAULTS:
        computed.check("s", *recorded(computed, **fault), atol=1e-5)
    else:
        with pytest.raises(AssertionError, match="s: other experts|s\n"):
            computed.check("s", *recorded(computed, **fault), atol=1e-5)
    ROWS.clear()


def test_rows_of_a_record_that_begins_later(scores):
    tie(scores, TIED, 0.0)
    computed = computed_from(scores)
    for first in (5, TIED, TIED + 1):
        routes, logprobs = recorded(computed, other_expert=5)
        if first == 5:
            with pytest.raises(AssertionError, match=r"row, layer \[\[5, 1\]\]"):
                computed.check("s", routes[first:], logprobs, first=first, atol=1e-5)
        else:
            computed.check("s", routes[first:], logprobs, first=first, atol=1e-5)
    with pytest.raises(AssertionError, match="11 rows from row 0 on"):
        computed.check("s", computed.sets[1:], computed.logprobs, atol=1e-5)
    ROWS.clear()


def test_a_gap_is_that_of_the_scores_a_router_may_choose_by(scores):
    scores = torch.tensor([[[4.0, 1.0, 3.0, 2.0], [-torch.inf, -8.0, -1.0, -2.0]]])
    assert gaps_of(scores, 2).tolist() == [[(3 - 2) / 8, (-2 + 8) / 8]]


def test_too_many_rows_left_out_fail_a_test(scores):
    Rows(100, int(100 * MOST_LEFT_OUT)).check()
    with pytest.raises(AssertionError, match="near ties leave out 26 of 100 rows"):
        Rows(100, 26).check()
    tie(scores, 0, 0.0)
    assert clear_rows(gaps_of(scores, K)) == 0
    with pytest.raises(AssertionError, match=f"{T} of {T} rows"):
        ROWS.check()
    ROWS.clear()


@pytest.mark.parametrize("name, size", [("qwen-mixed", 1), ("glm-groups", 4)])
def test_experts_with_equal_scores_are_near_ties_of_transformers(tmp_path, name, size):
    """An expert, or a group, gets the router weights of another one. Either choice is right where one of the two
    is chosen and the other is not."""
    folder = write_checkpoint(name, tmp_path / "model")
    tokens = np.random.default_rng(1).integers(0, 160, 60).tolist()
    apart, column = Independent(folder)(tokens), 0 if name == "glm-groups" else 1  # of layer 1
    assert (apart.gaps[:, column] > 10 * NEAR).all()
    counts = np.bincount(apart.sets[:, column].ravel() // size)
    often, seldom = counts.argmax(), counts.argmin()

    tensors = load_file(folder / "model.safetensors")
    for key in (key for key in tensors if key.startswith("model.layers.1.mlp.gate.")):
        tensors[key][size * seldom : size * (seldom + 1)] = tensors[key][size * often : size * (often + 1)]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tied = Independent(folder)(tokens)
    one, other = ((tied.sets[:, column] // size == number).any(-1) for number in (often, seldom))
    assert 3 < (one != other).sum() < 57 and ((tied.gaps[:, column] < NEAR) == (one != other)).all()
    ROWS.clear()
