"""Compares advantages with their definitions, one completion (or token) at a time, using the statistics module."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import ConfigError, RewardError
from moe_rl.objectives.advantages import ADVANTAGES, advantages, has_spread, overlong_penalty
from tests.support.refusals import refused

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.1]), st.floats(-3, 3).map(lambda x: round(x, 3)))
BATCH = st.lists(st.tuples(REWARDS, st.integers(-2, 3), st.integers(0, 4)), max_size=24)
NAMES = pytest.mark.parametrize("name", ADVANTAGES)
IN_GROUPS = pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "reinforce_pp"])


def reference(name, batch):
    """Compute advantages directly from the definition."""
    result = []
    for number, (reward, group, _) in enumerate(batch):
        peers = [r for r, g, _ in batch if g == group and r is not None]
        others = [r for i, (r, g, _) in enumerate(batch) if g == group and r is not None and i != number]
        tokens = [r for r, _, length in batch if r is not None for _ in range(length)]
        if reward is None:
            result.append(None)
        elif name == "reinforce_pp":
            spread = len(set(tokens)) > 1
            result.append((reward - statistics.fmean(tokens)) / statistics.stdev(tokens) if spread else 0.0)
        elif len(set(peers)) < 2:
            result.append(0.0)
        elif name == "leave_one_out":
            result.append(reward - statistics.fmean(others))
        else:
            whole = [r for r, *_ in batch if r is not None]
            divisor = {"group_std": peers, "batch_std": whole, "group_mean": None}[name]
            result.append((reward - statistics.fmean(peers)) / (statistics.stdev(divisor) if divisor else 1.0))
    return result


def of(name, batch):
    return advantages(name, *([item[k] for item in batch] for k in range(3)))


@NAMES
@settings(deadline=None)  # the standard library's exact fractions take their time
@given(BATCH)
def test_equals_the_definition(name, batch):
    for got, expected in zip(of(name, batch), reference(name, batch), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or math.isclose(got, expected, rel_tol=1e-11, abs_tol=1e-11)


@NAMES
@settings(deadline=None)
@given(BATCH, st.randoms())
def test_order_of_the_batch_does_not_matter(name, batch, rng):
    plain, order = of(name, batch), list(range(len(batch)))
    rng.shuffle(order)
    assert of(name, [batch[i] for i in order]) == [plain[i] for i in order]


def test_known_numbers():
    """One group of (1, 0, 0, 0): mean 1/4, unbiased variance (9 + 3) / 16 / 3 = 1/4; and one of equals beside a failed
    verification. Over the batch (1, 0, 0, 0, 3, 3): mean 7/6, unbiased variance (19 - 49/6) / 5 = 13/6."""
    rewards, groups, lengths = [1.0, 0.0, 0.0, 0.0, 3.0, None, 3.0], [7, 7, 7, 7, 2, 2, 2], [1] * 7
    known = {
        "group_std": [1.5, -0.5, -0.5, -0.5, 0.0, None, 0.0],
        "group_mean": [0.75, -0.25, -0.25, -0.25, 0.0, None, 0.0],
        "leave_one_out": [1.0, -1 / 3, -1 / 3, -1 / 3, 0.0, None, 0.0],
        "batch_std": [x / math.sqrt(13 / 6) if x else x for x in (0.75, -0.25, -0.25, -0.25, 0.0, None, 0.0)],
        "reinforce_pp": [None if r is None else (r - 7 / 6) / math.sqrt(13 / 6) for r in rewards],
    }
    for name, expected in known.items():
        got = advantages(name, rewards, groups, lengths)
        assert got.pop(5) is None and expected.pop(5) is None
        assert got == pytest.approx(expected, rel=1e-14), name


def test_reinforce_pp_weighs_by_tokens():
    # tokens 1, 0, 0, 0: as the group above
    assert advantages("reinforce_pp", [1.0, 0.0], [0, 1], [1, 3]) == pytest.approx([1.5, -0.5], rel=1e-14)
    # what has no token moves nothing, and is told apart nevertheless
    assert advantages("reinforce_pp", [1.0, 0.0, 9.0], [0, 1, 2], [1, 3, 0])[:2] == pytest.approx([1.5, -0.5])


@NAMES
def test_a_failed_verification_is_not_a_wrong_answer(name):
    with_failure = advantages(name, [1.0, 1.0, None], [0, 0, 0], [2, 2, 2])
    with_zero = advantages(name, [1.0, 1.0, 0.0], [0, 0, 0], [2, 2, 2])
    assert with_failure == [0.0, 0.0, None]
    assert with_zero[0] > 0.3  # the witness: reward 0 would have made a difference


@IN_GROUPS
@pytest.mark.parametrize("others", [[], [None, None]])
def test_a_member_that_is_left_alone_has_nothing_to_be_compared_with(name, others):
    """verl would return the raw reward here. Differences between groups do not count."""
    rewards = [0.5, *others, 7.0, 7.0]
    groups = [0, *(0 for _ in others), 1, 1]
    assert advantages(name, rewards, groups, [3] * len(rewards)) == [0.0, *others, 0.0, 0.0]


@NAMES
def test_a_group_that_failed_wholly_changes_nothing_for_the_others(name):
    alone = advantages(name, [1.0, 0.0, 0.5], [1, 1, 2], [2, 3, 4])
    assert advantages(name, [None, 1.0, 0.0, 0.5, None], [0, 1, 1, 2, 0], [9, 2, 3, 4, 9]) == [None, *alone, None]
    assert advantages(name, [None, None], [0, 0], [1, 1]) == [None, None]
    assert advantages(name, [], [], []) == []


def test_without_groups_a_member_that_is_alone_is_compared_all_the_same():
    assert advantages("reinforce_pp", [1.0, 0.0], [0, 1], [2, 2]) == pytest.approx([0.75**0.5, -(0.75**0.5)])


@NAMES
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.1 + 0.2 - 0.3, 0.0, 0.0], [1e9 / 3 * 3.3, 1.1e9, 1.1e9]])
def test_rounding_noise_is_no_signal(name, rewards):
    assert rewards[0] != rewards[1]
    assert not has_spread(rewards)
    assert advantages(name, rewards, [0, 0, 0], [1, 2, 3]) == [0.0, 0.0, 0.0]


@NAMES
@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 / 3, -2.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(name, value, size):
    assert advantages(name, [value] * size, [0] * size, range(1, size + 1)) == [0.0] * size


def test_normalised_group_has_mean_zero_and_unbiased_std_one():
    rng = random.Random(3)
    got = advantages("group_std", [rng.gauss(2, 5) for _ in range(9)], [0] * 9, [1] * 9)
    assert abs(statistics.fmean(got)) < 1e-15 and math.isclose(statistics.stdev(got), 1.0, rel_tol=1e-14)


@NAMES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1.1e12])
def test_a_reward_that_is_not_finite_or_too_large_is_refused(name, value):
    """The square of 1e308 is an OverflowError that names nothing."""
    with refused(RewardError, completion=1, group=4, got=value):
        advantages(name, [1.0, value], [4, 4], [1, 1])


def test_what_does_not_fit_together_is_refused():
    with refused(ValueError, got=("1 group",), expected=2):
        advantages("group_std", [1.0, 0.0], [0], [1, 1])
    with refused(ValueError, got=("3 lengths",), expected=2):
        advantages("group_std", [1.0, 0.0], [0, 0], [1, 1, 1])
    with refused(ConfigError, key="objective.advantage", got="'grpo'", expected=("group_std", "group_mean")):
        advantages("grpo", [1.0, 0.0], [0, 0], [1, 1])


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (12, 0.0), (13, -0.5), (14, -1.0), (16, -2.0), (17, -2.0), (99, -2.0)]
)
def test_the_overlong_penalty_grows_over_the_cache_and_not_beyond(tokens, expected):
    assert overlong_penalty(tokens, limit=16, cache=4, penalty=2.0) == expected
    # the paper's own numbers: half way through the cache half the penalty
    assert overlong_penalty(20480 - 2048, limit=20480, cache=4096, penalty=1.0) == -0.5
