"""What ranks saw of a sequence is put together: rows by position, layers added up, log-probabilities from one rank."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.megatron.microbatch import ScoredWork
from moe_rl.replay.replay_pass import PassSeen
from moe_rl.replay.row_places import RowPlaces
from moe_rl.rollout.kept import KeptSample
from moe_rl.train import samples
from moe_rl.types import Sequence, sampled_by

# Two sequences of 2 prompt tokens; a padding row comes last.
FED = [np.array([1, 2, 3]), np.array([4, 5, 6, 7]), np.array([0])]


def sequence(key, tokens):
    return Sequence(key, (1, 2), (3,) * tokens, np.full(tokens, -0.5, np.float32), 0.25, sampled_by(6, tokens), None)


def seen(rows, differs, recorded=None):
    """A pass over both sequences on a rank that sees `rows` of them. differs: bool [layers, rows with a record]."""
    recorded = np.array([True] * 7 + [False]) if recorded is None else recorded
    places = RowPlaces.of(FED, [2, 2, 0], recorded, rows)
    table = SimpleNamespace(
        names=("a", "b", "padding"), places=places, recorded=torch.from_numpy(np.flatnonzero(recorded[rows]))
    )
    batch = SimpleNamespace(counts=(2, 3), units=(1, 1), advantages=torch.tensor([0.5, math.nan]))
    work = SimpleNamespace(table=table, microbatch=batch)
    logprobs = torch.tensor([-0.1, -0.2, -0.3, -math.inf, -0.5])
    compared = [SimpleNamespace(differs=torch.tensor(differs))]
    return ScoredWork([work], [logprobs], [-logprobs], PassSeen(compared=compared))


def test_ranks_with_other_rows_and_layers_add_up(monkeypatch):
    # Rank 0 sees the even rows in two layers and speaks; rank 1 the odd ones in one layer.
    views = []
    for rank, rows, differs in (
        (0, np.arange(0, 8, 2), [[True, False, True, False], [True, False, False, True]]),
        (1, np.arange(1, 8, 2), [[False, True, True]]),
    ):
        monkeypatch.setattr(samples.world, "speaks_for_its_sequences", lambda rank=rank: rank == 0)
        views.append(samples._views(frozenset({"a", "b"}), seen(rows, differs)))
    monkeypatch.setattr(samples.world, "gather", lambda mine, kind: views)
    found = samples.gather_views(["a", "b"], [seen(slice(None), [[True] * 7])])
    drawn = [KeptSample(key, "p", "c", ["x"] * n, {"r": 1.0}, "stop") for key, n in (("a", 2), ("b", 3))]
    first, second = samples.lines(7, drawn, [sequence("b", 3), sequence("a", 2)], found)
    assert (first.key, second.key) == ("a", "b")
    # Rows 0 to 2 are a's, 3 to 6 are b's. Even rows: 0, 2, 4, 6; odd ones: 1, 3, 5.
    assert first.differing_layers == [2, 0, 0] and second.differing_layers == [1, 1, 1, 1]
    assert first.trainer_logprobs == [pytest.approx(-0.1), pytest.approx(-0.2)]
    assert second.trainer_logprobs == [pytest.approx(-0.3), None, pytest.approx(-0.5)]
    assert (first.advantages, second.advantages) == ([0.5], [None])
    assert (first.shown_advantages, second.shown_advantages) == ("advantage +0.500", "advantage not finite")
    assert (first.step, first.reward, first.versions, first.prompt_tokens) == (7, 0.25, sampled_by(6, 2), 2)


def test_rows_without_a_record_count_nothing(monkeypatch):
    monkeypatch.setattr(samples.world, "speaks_for_its_sequences", lambda: False)
    recorded = np.array([True, False, True, True, True, True, True, False])
    (view,) = samples._views(frozenset({"a"}), seen(slice(None), [[True, True, False, False, False, False]], recorded))
    assert (view.positions, view.differing) == ([0, 2], [1, 1]) and view.logprobs == view.advantages == []


def test_a_log_probability_that_is_not_finite_is_kept_as_none():
    one = sequence("a", 2)
    one.rollout_logprobs[1] = math.nan
    (line,) = samples.lines(1, [KeptSample("a", "p", "c", ["x"] * 2, {}, "stop")], [one], {})
    assert line.sampler_logprobs == [-0.5, None]


def test_a_sequence_that_no_pass_had_is_kept_without_numbers():
    (line,) = samples.lines(1, [KeptSample("a", "p", "c", ["x"], {}, "length")], [sequence("a", 1)], {})
    assert line.trainer_logprobs == [] and line.differing_layers == line.advantages == []
    assert math.isnan(line.mismatch)
