"""The time line of a run: written, rewound, cut into steps, drawn."""

import time
from itertools import pairwise
from statistics import median

import pytest

from moe_rl.report.timeline import FILE, Interval, Timeline, idle_share, read_timeline, windows
from moe_rl.report.timeline_plots import panels
from tests.report.conftest import intervals


def at(side, what, begin, end, step):
    return Interval(side, what, begin, end, step)


def both(begin, end, step):
    return [at(side, "sync", begin, end, step) for side in ("sampler", "trainer")]


def test_parts_become_intervals_of_their_sides_and_a_resume_leaves_none_twice(tmp_path):
    line = Timeline(tmp_path)
    for step in (1, 2):
        line.step = step
        for n, part in enumerate(("step", "sample", "train", "sync", "routes")):
            begin = 10.0 * step + n
            line.add(part, begin, begin + (0.0001 if part == "routes" else 0.5))
    found = read_timeline(tmp_path)
    once = [("sampler", "sample"), ("trainer", "train"), ("sampler", "sync"), ("trainer", "sync")]
    assert [(one.side, one.what, one.step) for one in found] == [(*one, step) for step in (1, 2) for one in once]
    assert all(one.end - one.begin == pytest.approx(0.5, abs=1e-5) for one in found)
    assert found[1].begin - found[0].begin == pytest.approx(1, abs=1e-5)
    with (tmp_path / FILE).open("ab") as stream:
        stream.write(b'{"side": "sampl')  # cut short by a kill
    line = Timeline(tmp_path)  # as another process does
    line.rewind(2)
    line.add("sample", time.perf_counter() - 3, time.perf_counter())
    kept = read_timeline(tmp_path)
    assert kept[:-1] == found[:4] and (kept[-1].what, kept[-1].step) == ("sample", 2)
    assert kept[-1].end == pytest.approx(time.time(), abs=60)


def test_shares_are_of_the_time_of_the_steps_alone():
    found = [
        at("sampler", "sample", 100, 106, 1),
        at("verifier", "reward", 101, 102, 1),
        at("verifier", "reward", 105, 107, 1),
        at("verifier", "reward", 106, 108, 1),  # the next batch: an overlap counts once
        at("trainer", "train", 107, 109, 1),
        *both(109, 110, 1),
        at("sampler", "sample", 1000, 1004, 2),  # a restart: the time before it belongs to no step
        at("sampler", "sample", 1004, 1009, 3),  # one step ahead
        at("trainer", "train", 1004, 1006, 2),
        *both(1009, 1010, 2),
        at("trainer", "train", 1010, 1014, 3),
        *both(1014, 1015, 3),
        at("sampler", "eval", 1015, 1020, 4),  # no step any more
    ]
    steps = windows(found)
    assert [(one.step, one.begin, one.end) for one in steps] == [(1, 100, 110), (2, 1000, 1010), (3, 1010, 1015)]
    assert [one.busy for one in steps] == [
        {"sampler": 7, "verifier": 4, "trainer": 3},
        {"sampler": 10, "verifier": 0, "trainer": 3},
        {"sampler": 1, "verifier": 0, "trainer": 5},
    ]
    assert [round(one.idle("trainer"), 6) for one in steps] == [0.7, 0.7, 0.0]
    assert idle_share(steps, "sampler") == pytest.approx(7 / 25)
    assert idle_share(steps, "trainer") == pytest.approx(14 / 25)


@pytest.mark.parametrize("steps", [10, 1000])
def test_the_plot_shows_the_last_steps_and_says_the_shares_of_all(steps):
    found = intervals(steps)
    for side in ("sampler", "trainer"):
        own = [one for one in found if one.side == side]
        assert all(one.end <= after.begin for one, after in pairwise(own))
    line, idle = panels(found)
    assert f"Over all {steps} steps" in line.reading and "The last 8 steps are shown." in line.reading
    whole = windows(found)
    for side in ("sampler", "trainer"):
        assert f"{side}s waited {100 * idle_share(whole, side):.0f}%" in line.reading
        assert f"{side}s {100 * median(one.idle(side) for one in whole):.0f}%" in idle.reading
    numbers = [text.get_text() for text in line.figure.axes[0].texts]
    assert numbers == [str(step) for step in range(steps - 7, steps + 1)]
    drawn = {text.get_text() for text in line.figure.axes[0].get_legend().get_texts()}
    assert {"sample", "train", "weights"} <= drawn
    assert len(line.svg) < 60_000  # a thousand steps make no larger plot
