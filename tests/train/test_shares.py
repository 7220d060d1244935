"""Which sequences a step is trained on when some have no routes."""

from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.errors import ReplayError
from moe_rl.train.shares import Shares
from moe_rl.types import RouteRef, Sequence, sampled_by


def sequence(number, *, recorded):
    ref = RouteRef(f"k{number}", 4, ()) if recorded else None
    return Sequence(f"k{number}", (1, 2), (3, 4, 5), np.zeros(3, np.float32), 0.0, sampled_by(0, 3), ref)


def complete(recorded, groups, *, limit, missing="drop"):
    replay = SimpleNamespace(missing=missing, stale="replay", max_fallback_fraction=limit)
    shares = Shares(SimpleNamespace(replay=replay, pipeline=SimpleNamespace(lag=0)), (0,), None, None, vocabulary=8)
    return shares._complete([sequence(n, recorded=one) for n, one in enumerate(recorded)], groups)


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
