"""Which sequences a step is trained on when some have no routes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.errors import ReplayError
from moe_rl.megatron.microbatch import Microbatch
from moe_rl.train import shares as module
from moe_rl.train.shares import Shares, divisors
from moe_rl.types import RewardedTurn, RouteRef, Sequence, VersionSpan, sampled_by


def sequence(number, *, recorded=True, segment_of="", tokens=(3, 4, 5)):
    ref, size = RouteRef(f"k{number}", 1 + len(tokens), ()) if recorded else None, len(tokens)
    logprobs = np.zeros(size, np.float32)
    return Sequence(f"k{number}", (1, 2), tokens, logprobs, 0.0, sampled_by(0, size), ref, segment_of)


def complete(recorded, groups, *, limit, missing="drop", segments={}):  # noqa: B006 - read only
    replay = SimpleNamespace(missing=missing, stale="replay", max_fallback_fraction=limit)
    pipeline = SimpleNamespace(lag=0, kv="keep")
    shares = Shares(SimpleNamespace(replay=replay, pipeline=pipeline), (0,), None, None, vocabulary=8)
    given = [sequence(n, recorded=one, segment_of=segments.get(n, "")) for n, one in enumerate(recorded)]
    return shares._complete(given, groups)


def test_a_sequence_that_is_left_keeps_its_group():
    kept, groups, dropped = complete([False, True, True, False, True], [0, 0, 1, 1, 2], limit=0.4)
    assert [one.key for one in kept] == ["k1", "k2", "k4"] and groups == [0, 1, 2] and dropped == 2


def test_as_many_may_be_dropped_as_the_limit_says_and_none_more():
    assert complete([True, True], [0, 1], limit=0.0)[2] == 0
    assert complete([False, True, True, True], [0, 0, 1, 1], limit=0.25)[2] == 1
    with pytest.raises(ReplayError):
        complete([False, False, True, True], [0, 0, 1, 1], limit=0.25)
    with pytest.raises(ReplayError):  # none would be left
        complete([False, False], [0, 1], limit=1.0)


def test_nothing_is_dropped_where_the_router_chooses_instead():
    assert complete([False, True], [0, 1], limit=0.0, missing="native")[1:] == ([0, 1], 0)


def test_with_a_segment_without_routes_goes_its_whole_completion():
    kept, groups, dropped = complete([True, True, False, True], [0, 0, 0, 1], limit=0.5, segments={1: "k1", 2: "k1"})
    assert [one.key for one in kept] == ["k0", "k3"] and groups == [0, 1] and dropped == 2


def test_the_segments_of_a_completion_are_divided_by_as_one():
    cut = [sequence(0), sequence(1, segment_of="k1"), sequence(2, segment_of="k1", tokens=(6,)), sequence(3, tokens=())]
    for name, expected in {"gspo": 2, "grpo": 2, "minirl": 3, "dr_grpo": 27, "dapo": 7}.items():
        assert divisors(name, cut, 9) == (expected, 2, 7), name


def test_each_branch_of_an_episode_is_divided_by_as_one():
    cut = [sequence(0), sequence(1, segment_of="e"), sequence(2, segment_of="e", tokens=(6,)), sequence(3, tokens=())]
    apart = [replace(one, alone=bool(one.segment_of)) for one in cut]
    for name, expected in {"gspo": 3, "grpo": 3, "minirl": 4, "dr_grpo": 36, "dapo": 7}.items():
        assert divisors(name, apart, 9) == (expected, 3, 7), name


@pytest.mark.parametrize(("kv", "of_played"), [("keep", [3, 3, 3]), ("recompute", [3, 3, 1])])
def test_a_token_has_the_lag_of_the_keys_of_its_own_record(monkeypatch, kv, of_played):
    """Newer weights made all keys of a later segment, and older ones some of a later turn of the same segment."""
    alone = SimpleNamespace(
        data_parallel=lambda: (0, 1), context_parallel=lambda: (0, 1), device=lambda: torch.device("cpu"),
        is_last_stage=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(module, "world", alone)
    policies = []
    monkeypatch.setattr(Microbatch, "read_routes", lambda *_, policy, **__: policies.append(policy))
    first, later = (
        replace(sequence(number, segment_of="e"), versions=sampled_by(version, 3))
        for number, version in ((0, 1), (1, 4))
    )
    turns = (RewardedTurn(0, None, 2, 0.5), RewardedTurn(1, 0, 1, 1.0))
    played = replace(sequence(2), versions=(VersionSpan(2, 2), VersionSpan(1, 4)), turns=turns)
    config = SimpleNamespace(
        replay=SimpleNamespace(missing="drop", stale="replay"), pipeline=SimpleNamespace(lag=9, kv=kv),
        rollout=SimpleNamespace(max_completion_tokens=9), objective=SimpleNamespace(name="gspo"),
        train=SimpleNamespace(megatron={}), parallel=SimpleNamespace(tensor=1),
    )  # fmt: skip
    config.rollout.keep_sampling_mask, config.objective.score_centering = False, None
    shares = Shares(config, (0,), None, None, vocabulary=8)
    for sequences, lags in (([first, later], [4, 4, 4, 1, 1, 1]), ([played], of_played)):
        (share,) = shares._read([sequences], [[[list(range(len(sequences)))]]], 5)
        assert share.work[0].lags.tolist() == lags
    assert [one.keep_keys for one in policies] == [kv == "keep"] * 2
