"""Tests how a pass gathers its results, with one rank that has everything, and how sequences are packed otherwise."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.comparison import passes
from moe_rl.errors import ReplayError
from moe_rl.planning.packing import pack
from tests.support.refusals import refused

LAYERS, EXPERTS = (1, 3), 4


def router_kl(monkeypatch, stored, ours):
    """Return the router KL of four rows, of which the sampler stored rows 1 and 2. stored [2, L, E], ours [4, L, E]."""
    monkeypatch.setattr(passes.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(passes.world, "device", lambda: torch.device("cpu"))
    scorer = object.__new__(passes.Scorer)
    scorer.spec = SimpleNamespace(moe_layers=LAYERS)
    scorer.policy = SimpleNamespace(layers=LAYERS, facts=SimpleNamespace(score_function="softmax"))
    scorer._first_row, scorer._logits = np.array([0, 4]), [(np.array([1, 2]), np.array([1, 2]), stored)]
    logits = {(0, layer): torch.from_numpy(ours[:, column]) for column, layer in enumerate(LAYERS)}
    return scorer._gather_router_kl(SimpleNamespace(router_logits=logits))


def test_rows_that_the_sampler_did_not_store_are_nan(monkeypatch):
    ours = np.random.default_rng(0).normal(size=(4, 2, EXPERTS)).astype(np.float32)
    got = router_kl(monkeypatch, ours[1:3], ours)
    assert np.isnan(got[:, [0, 3]]).all() and (np.abs(got[:, [1, 2]]) < 1e-12).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["sampler", "trainer"])
def test_a_logit_that_is_not_finite_is_not_taken_for_one_that_was_not_stored(monkeypatch, bad, side):
    ours = np.random.default_rng(0).normal(size=(4, 2, EXPERTS)).astype(np.float32)
    stored = ours[1:3].copy()
    (stored if side == "sampler" else ours)[1, 1, 2] = bad
    with refused(ReplayError, layers="[3]"):
        router_kl(monkeypatch, stored, ours)


@pytest.mark.parametrize("budget", [1200, 2048, 2400])
def test_another_packing_has_room_for_what_is_held_together(monkeypatch, budget):
    monkeypatch.setattr(passes.world, "data_parallel", lambda: (0, 1))
    segments = [SimpleNamespace(forwarded=400, together=f"episode{index // 3}") for index in range(12)]
    tokens = passes.other_budget(segments, budget)
    usual, other = (pack([1200] * 4, ranks=1, microbatch_tokens=size) for size in (budget, tokens))
    assert usual != other
