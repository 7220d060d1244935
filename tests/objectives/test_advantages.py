import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.errors import RewardError
from moe_rl.objectives.advantages import group_advantages

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.1]), st.floats(-3, 3).map(lambda x: round(x, 3)))


def reference(rewards, group_ids, normalize_std):
    """The definition, one completion at a time, with the standard library's statistics."""
    result = []
    for reward, group in zip(rewards, group_ids, strict=True):
        peers = [r for r, g in zip(rewards, group_ids, strict=True) if g == group and r is not None]
        if reward is None:
            result.append(None)
        elif len(peers) < 2 or max(peers) == min(peers):
            result.append(0.0)
        else:
            result.append((reward - statistics.fmean(peers)) / (statistics.stdev(peers) if normalize_std else 1.0))
    return result


@given(st.lists(st.tuples(REWARDS, st.integers(-2, 3)), max_size=24), st.booleans())
def test_equals_the_definition(batch, normalize_std):
    rewards, group_ids = [r for r, _ in batch], [g for _, g in batch]
    got = group_advantages(rewards, group_ids, normalize_std=normalize_std)
    for a, b in zip(got.advantages, reference(rewards, group_ids, normalize_std), strict=True):
        assert (a is None) == (b is None)
        assert a is None or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)
    groups = {g: [r for r, h in batch if h == g and r is not None] for g in group_ids}
    assert got.groups == len(groups)
    assert got.failed == rewards.count(None)
    assert got.too_small_groups == sum(len(scored) < 2 for scored in groups.values())
    assert got.zero_variance_groups == sum(len(s) >= 2 and max(s) == min(s) for s in groups.values())


@given(st.lists(st.tuples(REWARDS, st.integers(0, 3)), max_size=16), st.randoms())
def test_order_of_the_batch_does_not_matter(batch, rng):
    plain = group_advantages([r for r, _ in batch], [g for _, g in batch], normalize_std=True)
    order = list(range(len(batch)))
    rng.shuffle(order)
    mixed = group_advantages([batch[i][0] for i in order], [batch[i][1] for i in order], normalize_std=True)
    assert mixed.advantages == [plain.advantages[i] for i in order]


def test_known_numbers():
    got = group_advantages([1.0, 0.0, 0.0, 0.0, 5.0, None, 5.0], [7, 7, 7, 7, 2, 2, 2], normalize_std=True)
    # mean 1/4, unbiased variance (9 + 3) / 16 / 3 = 1/4, std 1/2
    assert got.advantages == [1.5, -0.5, -0.5, -0.5, 0.0, None, 0.0]
    assert (got.groups, got.zero_variance_groups, got.too_small_groups, got.failed) == (2, 1, 0, 1)
    assert group_advantages([1.0, 0.0], [0, 0], normalize_std=False).advantages == [0.5, -0.5]


def test_a_failed_verification_is_not_a_wrong_answer():
    with_failure = group_advantages([1.0, 1.0, None], [0, 0, 0], normalize_std=False)
    with_zero = group_advantages([1.0, 1.0, 0.0], [0, 0, 0], normalize_std=False)
    assert with_failure.advantages == [0.0, 0.0, None]
    assert with_zero.advantages[0] > 0.3  # the witness: reward 0 would have made a difference


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.1 + 0.2 - 0.3, 0.0, 0.0], [1e9 / 3 * 3.3, 1.1e9, 1.1e9]])
def test_rounding_noise_is_no_signal(rewards):
    assert rewards[0] != rewards[1]
    got = group_advantages(rewards, [0, 0, 0], normalize_std=True)
    assert got.advantages == [0.0, 0.0, 0.0] and got.zero_variance_groups == 1


@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 / 3, -2.3])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(value, size):
    got = group_advantages([value] * size, [0] * size, normalize_std=True)
    assert got.advantages == [0.0] * size and got.zero_variance_groups == 1


def test_normalised_group_has_mean_zero_and_unbiased_std_one():
    rng = random.Random(3)
    got = group_advantages([rng.gauss(2, 5) for _ in range(9)], [0] * 9, normalize_std=True).advantages
    assert abs(statistics.fmean(got)) < 1e-15 and math.isclose(statistics.stdev(got), 1.0, rel_tol=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(RewardError, match="completion 1, group 4"):
        group_advantages([1.0, value], [4, 4], normalize_std=True)


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="1 group ids"):
        group_advantages([1.0, 0.0], [0], normalize_std=True)
