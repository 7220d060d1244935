"""What ends a run, what does not, and that an interruption changes nothing about it."""

import math
from types import SimpleNamespace

import pytest

from moe_rl.config.schema import GuardsConfig
from moe_rl.errors import NonFiniteError, WeightSyncError
from moe_rl.train.guards import Guards

HEALTHY = {
    "policy_kl/k3": 1e-3,
    "policy/extreme_fraction": 1e-4,
    "rollout/truncated_fraction": 0.5,
    "reward/pass_rate": 0.0,
    "reward/mean": 0.0,
}
RAMBLING = {"rollout/truncated_fraction": 1.0}
GOOD, BAD = SimpleNamespace(applied=True), SimpleNamespace(applied=False, nonfinite="gradient on rank 3")


def guards(**settings):
    return Guards(GuardsConfig(**settings))


def told(guard, changes, first=1):
    """The errors after steps with these changes to healthy metrics, None for a step without one."""
    errors = [guard.after_step(step, HEALTHY | change) for step, change in enumerate(changes, start=first)]
    return [error and str(error) for error in errors]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy_kl/k3": 0.6}, "policy_kl/k3 = 0.6, above 0.5"),
        ({"policy_kl/k3": math.nan}, "policy_kl/k3 = nan, above 0.5"),
        ({"policy_kl/k3": math.inf}, "policy_kl/k3 = inf, above 0.5"),
        ({"policy/extreme_fraction": 0.51}, "policy/extreme_fraction = 0.51, above 0.5"),
        (RAMBLING, "every completion truncated, none passed, mean reward 0"),
        (RAMBLING | {"reward/mean": -0.5}, "every completion truncated, none passed, mean reward -0.5"),
    ],
)
def test_each_condition_in_a_row_ends_the_run_and_says_since_when(change, said):
    first, second, third = told(guards(), [change] * 3, first=5)
    assert (first, second) == (None, None)
    assert said in third and "since step 5, now step 7" in third and "guards.collapse_steps = 3" in third


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"policy_kl/k3": 0.5},
        {"policy/extreme_fraction": 0.5},
        RAMBLING | {"reward/mean": 0.01},
        RAMBLING | {"reward/pass_rate": 0.01},
        RAMBLING | {"rollout/truncated_fraction": 0.99},
    ],
)
def test_what_is_not_lost_goes_on(change):
    assert told(guards(collapse_steps=1), [change] * 5) == [None] * 5


def test_the_steps_must_follow_each_other_but_need_not_have_the_same_reason():
    bad, other = {"policy_kl/k3": 1.0}, RAMBLING
    assert told(guards(), [bad, bad, {}, bad, bad, {}]) == [None] * 6
    assert "policy_kl/k3 = 1, above 0.5; every completion" in told(guards(), [other, bad, bad | other])[2]
    assert told(guards(collapse_steps=0), [bad] * 9) == [None] * 9
    assert told(guards(max_policy_kl=2.0), [bad] * 9) == [None] * 9


def test_skipped_updates_are_counted_in_a_row():
    guard = guards()
    for result in (BAD, BAD, GOOD, BAD, BAD):
        guard.after_update(result, step=4, update=0)
    with pytest.raises(NonFiniteError) as error:
        guard.after_update(BAD, step=5, update=1)
    for part in ("3 updates in a row", "update 1 of step 5", "gradient on rank 3", "guards.max_skipped_updates = 3"):
        assert part in str(error.value)


def test_counts_outlive_a_restart():
    before, after = guards(), guards()
    for _ in range(2):
        before.after_update(BAD, step=1, update=0)
        before.after_step(1, HEALTHY | RAMBLING)
    after.restore(before.state())
    assert "since step 1, now step 3" in told(after, [RAMBLING], first=3)[0]
    with pytest.raises(NonFiniteError):
        after.after_update(BAD, step=3, update=0)


@pytest.mark.parametrize("difference", [1.01, 5.6, math.inf, math.nan])
def test_a_sampler_with_other_weights_ends_the_run_before_it_samples(difference):
    guard = guards()
    guard.after_sync(3, 0.26)
    guard.after_sync(3, 1.0)
    with pytest.raises(WeightSyncError, match="after the sync of version 4.*at most guards.max_canary_difference = 1"):
        guard.after_sync(4, difference)
    guards(max_canary_difference=9.0).after_sync(4, 5.6)
