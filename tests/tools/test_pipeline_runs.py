"""Tests what the measurement of the pipeline computes from time lines, and the times of its slow verifier."""

import statistics

import pytest

from moe_rl.report.timeline import Interval, windows


@pytest.fixture(scope="module")
def runs(benchmark):
    return benchmark("pipeline_runs")


def steps_of(*seconds, sampling, training):
    """Steps that end with a transfer of weights of a second. Sampling begins with a step, and training ends before
    the transfer.
    """
    begin, found = 1000.0, []
    for step, length in enumerate(seconds, start=1):
        sent = begin + length - 1
        found += [
            Interval("sampler", "sample", begin, begin + sampling, step),
            Interval("trainer", "train", sent - training, sent, step),
            *(Interval(side, "sync", sent, sent + 1, step) for side in ("sampler", "trainer")),
        ]
        begin += length
    return windows(found)


def test_speeds_ratios_and_their_quartiles(runs):
    sync = runs.speed([steps_of(10, 10, sampling=4, training=5), steps_of(10, sampling=4, training=5)], 8)
    ahead = runs.speed([steps_of(5, 8, sampling=4, training=2), steps_of(7, sampling=4, training=2)], 8)
    assert sync.groups_per_second == pytest.approx(0.8) and ahead.groups_per_second == pytest.approx(1.2)
    assert (sync.sampler_idle, sync.trainer_idle) == pytest.approx((0.5, 0.4))
    assert (ahead.sampler_idle, ahead.trainer_idle) == pytest.approx((0.25, 0.55))
    found = runs.ratios(
        {("", "sync"): sync, ("", "async"): ahead, ("_latency", "sync"): ahead, ("_latency", "x"): sync}
    )
    assert found["ratio_async_to_sync"] == pytest.approx(1.5)
    assert found["ratio_async_to_sync_quartiles"] == pytest.approx(
        statistics.quantiles([10 / 5, 10 / 8, 10 / 7], n=4, method="inclusive")[::2]
    )
    assert found["ratio_x_to_sync_latency"] == pytest.approx(2 / 3)
    assert len(found) == 4


def test_every_mode_is_compared_under_both_conditions(runs):
    one = runs.speed([steps_of(10, 10, sampling=4, training=5)], 8)
    found = runs.ratios({(end, mode): one for end in runs.CONDITIONS for mode in runs.MODES})
    names = {f"ratio_{mode}_to_sync{end}" for mode in ("one_step_off", "async") for end in ("", "_latency")}
    assert set(found) == names | {f"{name}_quartiles" for name in names}
    assert all(found[name] == 1 for name in names)


def test_slow_verifications_have_the_median_and_the_tail_that_they_say(benchmark):
    slow = benchmark("slow_verifier")
    took = [slow.seconds("2+2=", str(n)) for n in range(20_000)]
    assert statistics.median(took) == pytest.approx(0.3, rel=0.05)
    assert max(took) == 5.0 and sum(one == 5.0 for one in took) / len(took) == pytest.approx(0.01, rel=0.3)
    assert took[:3] == [slow.seconds("2+2=", str(n)) for n in range(3)] and len(set(took[:100])) == 100
    assert slow.seconds("2+3=", "0") != took[0]
