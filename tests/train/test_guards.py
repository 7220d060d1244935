"""Tests what ends a run and what does not, and that an interruption does not change this."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.config.load import load_config
from moe_rl.config.schema import GuardsConfig
from moe_rl.errors import CheckpointError, NonFiniteError, PipelineError, WeightSyncError
from moe_rl.train.canary import Heard
from moe_rl.train.guards import Guards, computes_alike
from tests.support.refusals import refused, tells

HEALTHY = {
    "policy_kl/k3": 1e-3,
    "policy/extreme_fraction": 1e-4,
    "rollout/truncated_fraction": 0.5,
    "reward/pass_rate": 0.0,
    "reward/mean": 0.0,
}
RAMBLING = {"rollout/truncated_fraction": 1.0}
GOOD = SimpleNamespace(applied=True, lr=1e-3)
BAD = SimpleNamespace(applied=False, lr=1e-3, nonfinite="gradient on rank 3")


def guards(**settings):
    return Guards(GuardsConfig(**settings))


def told(guard, changes, first=1):
    """Return the errors after steps with these changes to healthy metrics; None for a step without an error."""
    errors = [guard.after_step(step, HEALTHY | change) for step, change in enumerate(changes, start=first)]
    return [error and error.message for error in errors]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy_kl/k3": 0.6}, "policy_kl/k3 = 0.6, above 0.5"),
        ({"policy_kl/k3": math.nan}, "policy_kl/k3 = nan, above 0.5"),
        ({"policy_kl/k3": math.inf}, "policy_kl/k3 = inf, above 0.5"),
        ({"policy/extreme_fraction": 0.51}, "policy/extreme_fraction = 0.51, above 0.5"),
        (RAMBLING, "reward 0"),
        (RAMBLING | {"reward/mean": -0.5}, "reward -0.5"),
    ],
)
def test_each_condition_in_a_row_ends_the_run_and_says_since_when(change, said):
    first, second, third = told(guards(), [change] * 3, first=5)
    assert (first, second) == (None, None)
    tells(third, step=7, got=("step 5", said), expected=("guards.collapse_steps = 3",))


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
    assert "policy_kl/k3 = 1, above 0.5; " in told(guards(), [other, bad, bad | other])[2]
    assert told(guards(collapse_steps=0), [bad] * 9) == [None] * 9
    assert told(guards(max_policy_kl=2.0), [bad] * 9) == [None] * 9


def test_skipped_updates_are_counted_in_a_row():
    guard = guards()
    for result in (BAD, BAD, GOOD, BAD, BAD):
        guard.after_update(result, step=4, update=0)
    with pytest.raises(NonFiniteError) as error:
        guard.after_update(BAD, step=5, update=1)
    tells(
        error.value, "3 ", step=5, update=1, got=("gradient on rank 3",), expected=("guards.max_skipped_updates = 3",)
    )


def test_counts_outlive_a_restart():
    before, after = guards(), guards()
    for _ in range(2):
        before.after_update(BAD, step=1, update=0)
        before.after_step(1, HEALTHY | RAMBLING)
    after.restore(before.state())
    tells(told(after, [RAMBLING], first=3)[0], step=3, got=("step 1",))
    with pytest.raises(NonFiniteError):
        after.after_update(BAD, step=3, update=0)


def heard(difference, *, settled=None):
    return Heard(difference, difference if settled is None else settled, "http://host:8", suspects="look at expert 3")


@pytest.mark.parametrize("difference", [1.01, 5.6, math.inf, math.nan])
def test_a_sampler_with_other_weights_ends_the_run_before_it_samples(difference):
    guard = guards()
    guard.after_sync(3, heard(0.26))
    guard.after_sync(3, heard(1.0))
    with refused(WeightSyncError, version=4, sampler="http://host:8", expected=("guards.max_canary",)):
        guard.after_sync(4, heard(difference))
    guards(max_canary_difference=9.0).after_sync(4, heard(5.6))


def test_the_advice_blames_exported_names_only_where_the_two_have_agreed():
    """At the first sync of a run anything may differ, as the numbers that each side reads from config.json."""
    with refused(WeightSyncError, "config.json", version=1):
        guards().after_sync(1, heard(1.35))
    agreed = guards()
    agreed.after_sync(1, heard(0.06))
    with refused(WeightSyncError, version=2) as caught:
        agreed.after_sync(2, heard(1.35))
    assert "config.json" not in str(caught.value)


def test_the_limit_is_that_of_the_precisions():
    exact = Guards(GuardsConfig(), exact=True)
    exact.after_sync(1, heard(9.9e-5))
    exact.after_sync(1, heard(0.5, settled=1e-6))  # a tie was decided differently in one run of the canary
    with refused(WeightSyncError, got=("expert 3",), expected=("0.0001", "float32")):
        exact.after_sync(2, heard(1.1e-4))
    guards().after_sync(2, heard(1.1e-4))
    Guards(GuardsConfig(max_canary_difference=0.5), exact=True).after_sync(2, heard(0.4))
    config = load_config("configs/tiny_moe_cpu.yaml", [])
    assert not computes_alike(config)
    both = ["rollout.dtype=float32", "train.dtype=float32"]
    assert computes_alike(load_config("configs/tiny_moe_cpu.yaml", both))
    assert not computes_alike(load_config("configs/tiny_moe_cpu.yaml", [*both, "rollout.weights=fp8_e4m3"]))


# Values of sync/canary_abs_diff in the demo, seed 1, when the canary was one run of 35 tokens.
HEALTHY_SYNCS = [
    0.143, 0.0419, 0.0969, 0.0759, 0.0638, 0.0581, 0.0963, 0.0724, 0.0959, 0.0489, 0.0565, 0.123, 0.07, 0.0667, 0.0903,
    0.26, 0.0919, 0.0628, 0.114, 0.0646, 0.0617, 0.083, 0.129, 0.128, 0.117, 0.123, 0.126, 0.0614, 0.109, 0.0645, 0.237,
    0.0804, 0.0227, 0.151, 0.141, 0.132, 0.0531, 0.0404, 0.0699, 0.0898,
]  # fmt: skip


def test_a_difference_far_above_the_runs_own_ends_the_run():
    scattered, quiet = guards(), guards()
    for version, value in enumerate(HEALTHY_SYNCS):
        scattered.after_sync(version, heard(value))
    for version in range(4):
        quiet.after_sync(version, heard(0.01))
    quiet.after_sync(4, heard(0.09))  # four values are too few for a history
    with refused(WeightSyncError, expected=("0.08", " 5 ", "0.01")):
        quiet.after_sync(5, heard(0.09))
    told = guards(max_canary_difference=0.5)
    for version in range(6):
        told.after_sync(version, heard(0.01))
    told.after_sync(6, heard(0.4))  # a configured limit replaces the automatic one
    exact = Guards(GuardsConfig(), exact=True)
    for version, value in enumerate([1e-9, 0.0, 1e-8, 1e-7, 3e-7, 7.9e-6]):
        exact.after_sync(version, heard(value))  # all these values are rounding


def test_scattered_differences_are_not_refused_in_ten_thousand_syncs():
    rng = np.random.default_rng(0)
    for spread in (0.2, 0.5):
        for _ in range(50):
            guard = guards()
            for version in range(100):
                guard.after_sync(version, heard(float(min(0.08 * np.exp(spread * rng.normal()), 0.99))))


def test_the_history_outlives_a_restart_and_the_version_that_is_scored_again():
    straight, resumed = guards(), guards()
    for version in range(6):
        straight.after_sync(version, heard(0.01 + version / 1e3))
    resumed.restore(json.loads(json.dumps(straight.state())))
    resumed.after_sync(5, heard(0.015))
    assert resumed.state() == straight.state()
    for guard in (straight, resumed):
        with refused(WeightSyncError, expected=(" 6 ",)):
            guard.after_sync(6, heard(0.2))


def test_the_counts_of_another_version_are_refused():
    with refused(CheckpointError, field="guards", got="lost, skipped", expected="canary, lost, same_version, skipped"):
        guards().restore({"skipped": 0, "lost": 0})


@pytest.mark.parametrize("change", [(0.05, 0.0), (0.2, 0.004), (0.05, math.nan)])
def test_an_update_that_a_sampler_did_not_take_is_named(change):
    """The difference itself is healthy: one update moves less than the precision of the two sides."""

    def after(change, before=(0.07, 0.06), skipped=0):
        guard = guards()
        for version, value in enumerate(before):
            guard.after_sync(version, heard(value))
        guard.skipped = skipped
        guard.after_sync(9, Heard(0.07, 0.07, "http://host:8", change=(*change, "http://host:9")))

    ours, theirs = (f"{value:.3g}" for value in change)
    with refused(WeightSyncError, version=9, sampler="http://host:9", got=(theirs,), expected=(ours,)):
        after(change)
    after((0.05, 0.02))  # it moved, if less than the trainer
    # A trainer in bfloat16 rounds anew, a sampler in float32 moves by as little as the update.
    after((3.36e-3, 5.84e-6), before=(5.35e-3, 5.35e-3))
    after((0.03, 0.0))  # less than rounding: the sampler's precision may not show it
    after(change, before=())  # what is usual is not known
    after(change, skipped=1)  # the update was skipped


# policy_kl/k3 in the demo, seed 3, with 272 to 368 tokens a step: around its largest value in 200 steps; and with one
# step off, where all tokens have lag 1.
SAME_VERSION = [
    1.2e-4, 2.8e-5, 1.3e-3, 1.7e-5, 6.9e-5, 1.7e-4, 2.1e-4, 5.5e-5, 1e-6, 5.8e-5, 1.6e-4, 1.3e-4,
    1.1e-3, 7.1e-7, 1.8e-4, 6.8e-4, 2.7e-4, 6.1e-5, 4e-5, 1.5e-4, 6.2e-5, 4e-5, 1.8e-4, 7.2e-8,
    3.9e-5, 3e-5, 4.5e-5, 2e-4, 6.9e-5, 2.3e-5, 2e-3, 1.8e-4, 5.6e-5, 4.5e-5, 1.5e-4, 3.9e-4,
    1.5e-4, 1.8e-4, 1.7e-5, 9.1e-5, 1.1e-4, 5.6e-5, 1.2e-4, 8.4e-5, 1.9e-4,
]  # fmt: skip
OLDER = [5.38e-3, 1.51e-2, 7.17e-3, 9.32e-3, 3.21e-3, 3.69e-3]


def judged(guard, values, tokens=300):
    """Return how many steps went by, with these policy KLs at lag 0, before the run ended; None if it goes on."""
    for at, value in enumerate(values):
        lags = {"policy_kl/k3_lag/0": value, "policy_kl/tokens_lag/0": tokens}
        try:
            assert guard.after_step(at, HEALTHY | lags) is None
        except PipelineError as error:
            tells(error, step=at, metric="policy_kl/k3_lag/0", got=("3 times",), expected=("median",))
            return at
    return None


def test_tokens_of_the_trainers_version_that_disagree_like_older_ones_end_the_run():
    guard = guards()
    assert judged(guard, SAME_VERSION) is None  # with single steps far above the others
    assert judged(guard, OLDER[:2]) is None and judged(guard, SAME_VERSION[:1]) is None
    assert judged(guard, OLDER) == 2
    assert judged(guards(), [6e-5, *OLDER]) == 3  # from the first update on
    assert judged(guards(), [6e-5, math.nan, math.nan, math.nan]) == 3
    assert judged(guards(same_version=False), SAME_VERSION + OLDER) is None
    assert judged(guards(), [1e-13] * 6 + [9e-7] * 6) is None  # rounding in float32
    assert guards().after_step(1, HEALTHY) is None  # a synchronous run, or a step without such tokens


def test_few_tokens_are_judged_together_and_what_is_open_outlives_a_restart():
    few, resumed = guards(), guards()
    assert judged(few, SAME_VERSION[:36], tokens=100) is None and len(few.same) == 12
    assert judged(few, OLDER * 2, tokens=100) == 8  # three times three steps
    assert judged(few := guards(), SAME_VERSION[:30] + OLDER[:2] * 4, tokens=100) is None
    resumed.restore(json.loads(json.dumps(few.state())))
    assert resumed.state() == json.loads(json.dumps(few.state())) and resumed.apart == 2 and resumed.open[0] == 200
    assert judged(resumed, OLDER[:1], tokens=100) == 0
