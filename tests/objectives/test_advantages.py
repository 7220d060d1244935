"""Compares advantages with their definitions, one completion (or token) at a time, using the statistics module."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import ConfigError, RewardError
from moe_rl.objectives.advantages import ADVANTAGES, advantages, equal, has_spread, overlong_penalty
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
            result.append((reward - statistics.fmean(tokens)) / (statistics.stdev(tokens) + 1e-6) if spread else 0.0)
        elif len(set(peers)) < 2:
            result.append(0.0)
        elif name == "leave_one_out":
            result.append(reward - statistics.fmean(others))
        else:
            whole = [r for r, *_ in batch if r is not None]
            divisor = {"group_std": peers, "batch_std": whole, "group_mean": None}[name]
            result.append((reward - statistics.fmean(peers)) / (statistics.stdev(divisor) + 1e-6 if divisor else 1.0))
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
        "group_std": [x / (0.5 + 1e-6) if x else x for x in (0.75, -0.25, -0.25, -0.25, 0.0, None, 0.0)],
        "group_mean": [0.75, -0.25, -0.25, -0.25, 0.0, None, 0.0],
        "leave_one_out": [1.0, -1 / 3, -1 / 3, -1 / 3, 0.0, None, 0.0],
        "batch_std": [x / (math.sqrt(13 / 6) + 1e-6) if x else x for x in (0.75, -0.25, -0.25, -0.25, 0.0, None, 0.0)],
        "reinforce_pp": [None if r is None else (r - 7 / 6) / (math.sqrt(13 / 6) + 1e-6) for r in rewards],
    }
    for name, expected in known.items():
        got = advantages(name, rewards, groups, lengths)
        assert got.pop(5) is None and expected.pop(5) is None
        assert got == pytest.approx(expected, rel=1e-14), name


def test_reinforce_pp_weighs_by_tokens():
    # tokens 1, 0, 0, 0: as the group above
    assert advantages("reinforce_pp", [1.0, 0.0], [0, 1], [1, 3]) == pytest.approx([1.5, -0.5], rel=3e-6)
    # what has no token moves nothing, and is told apart nevertheless
    assert advantages("reinforce_pp", [1.0, 0.0, 9.0], [0, 1, 2], [1, 3, 0])[:2] == pytest.approx([1.5, -0.5], rel=3e-6)


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
    assert advantages("reinforce_pp", [1.0, 0.0], [0, 1], [2, 2]) == pytest.approx([0.75**0.5, -(0.75**0.5)], rel=3e-6)


def float32(*rewards):
    return [float(np.float32(reward)) for reward in rewards]


ROUNDED = {  # equal outcomes, as float64 and float32 have them
    "sums": [0.1 + 0.2, 0.3, 0.3],
    "sums that cancel": [0.1 + 0.2 - 0.3, 0.0, 0.0],
    "large sums": [1e9 / 3 * 3.3, 1.1e9, 1.1e9],
    "one unit of float32": [1.0, 1.0, 0.99999994, 1.0],
    "above 1": [1.0, 1.0000001, 1.0],
    "negative": [-1.0, -0.99999994, -1.0],
    "float32 sums": float32(np.float32(0.1) * 7, 0.7, np.float32(0.1) + np.float32(0.6)),
    "float32 sums that cancel": [float(np.float32(0.9) - 1), float(np.float32(1.1) - 1) - 0.2, -0.1],
    "large": float32(1e6, np.nextafter(np.float32(1e6), np.float32(2e6)), 1e6),
    "large and negative": float32(-1e6, np.nextafter(np.float32(-1e6), np.float32(0)), -1e6),
    "a KL in the reward of a policy that has not moved": [1 - 2e-7, 1.0, 1 - 3e-7],
}


@NAMES
@pytest.mark.parametrize("case", ROUNDED)
def test_rounding_noise_is_no_signal(name, case):
    rewards = ROUNDED[case]
    assert len(set(rewards)) > 1
    assert not has_spread(rewards)
    assert advantages(name, rewards, [0] * len(rewards), [1, 2, 3, 4][: len(rewards)]) == [0.0] * len(rewards)
    assert advantages(name, [*rewards, 5.0, None], [0] * len(rewards) + [1, 0], [1] * len(rewards) + [1, 1])[-1] is None


TOLD_APART = {
    "a thousandth": (0.0, 1e-3),
    "a thousandth below 1": (1.0, 0.999),
    "negative": (-1.0, -1.001),
    "a hundred thousandth": (0.5, 0.50001),
    "one in a million": (1e6, 1e6 + 1),
    "large and negative": (-1e6, -1e6 - 1),
}


@NAMES
@pytest.mark.parametrize("case", TOLD_APART)
def test_a_small_difference_keeps_its_signal(name, case):
    low, high = sorted(TOLD_APART[case])
    rewards = [high, low, low, high]
    assert has_spread(rewards)
    got = advantages(name, rewards, [0] * 4, [1] * 4)
    half = {"group_mean": (high - low) / 2, "leave_one_out": (high - low) * 2 / 3}.get(name)
    if half is not None:
        assert got == pytest.approx([half, -half, -half, half], rel=1e-9)
    else:  # std 0.577 of the difference: the epsilon takes less than a fifth of the smallest one
        assert got == pytest.approx([0.75**0.5 * sign for sign in (1, -1, -1, 1)], rel=0.2)
        assert high - low < 1e-4 or got[0] > 0.998 * 0.75**0.5


@pytest.mark.parametrize("name", ["group_std", "batch_std", "reinforce_pp"])
def test_the_epsilon_damps_a_spread_that_is_hardly_one(name):
    """As in verl, slime and NeMo-RL."""
    got = advantages(name, [1.0, 1.0, 1.0, 1 - 1e-6], [0] * 4, [1] * 4)
    assert got == pytest.approx([0.25 / 1.5, 0.25 / 1.5, 0.25 / 1.5, -0.5], rel=1e-6)


def test_rewards_that_are_equal():
    assert equal(1.0, 0.99999994) and equal(-3.0, -3.000001) and equal(0.0, -4e-7) and equal(1e6, 1e6 + 0.4)
    assert not equal(1.0, 0.999999) and not equal(0.0, 5e-7) and not equal(1e6, 1e6 + 0.5) and not equal(1.0, math.nan)


@NAMES
@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 / 3, -2.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(name, value, size):
    assert advantages(name, [value] * size, [0] * size, range(1, size + 1)) == [0.0] * size


def test_normalised_group_has_mean_zero_and_unbiased_std_one():
    rng = random.Random(3)
    got = advantages("group_std", [rng.gauss(2, 5) for _ in range(9)], [0] * 9, [1] * 9)
    assert abs(statistics.fmean(got)) < 1e-15 and math.isclose(statistics.stdev(got), 1.0, rel_tol=1e-6)


@NAMES
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.bool_, int, bool])
def test_numbers_of_another_type_are_computed_with_as_floats(name, kind):
    rewards, groups, lengths = (
        [kind(value) for value in (1, 0, 0, 1, 1, 0, 1)],
        [0, 0, 0, 1, 1, 1, 1],
        [3, 1, 2] * 2 + [7],
    )
    got = advantages(name, rewards, groups, lengths)
    assert got == advantages(name, [float(value) for value in rewards], groups, lengths)
    assert {type(value) for value in got} == {float}


@NAMES
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1.1e12, 10**400, np.float32("nan"), np.float32("inf")]
)
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
