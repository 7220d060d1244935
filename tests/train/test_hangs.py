"""Tests when ranks that live count as hanging, and which of them is late."""

import threading

import pytest

from moe_rl.train import hangs
from moe_rl.train.hangs import START, Stillness, late, report

TRAIN = ("train", "update")


def spent(stillness, seconds, place=TRAIN, marks=0):
    """Look every half second while nothing moves. Returns when it counts as hanging; None: not within `seconds`."""
    for half in range(1, int(2 * seconds) + 1):
        if stillness.look(place, marks, 0.5) is not None:
            return half / 2
    return None


def moved(stillness, longest, place=TRAIN):
    """Let some rank move twice, the second time after `longest` seconds."""
    stillness.look(place, "first", 0.5)
    assert spent(stillness, longest - 0.5, place, "first") is None
    stillness.look(place, "second", 0.5)


@pytest.mark.parametrize(("slowest", "most"), [(5, 600), (199, 600), (300, 900)])
def test_three_times_the_slowest_so_far_and_at_least_ten_minutes(slowest, most):
    stillness = Stillness(600.0)
    moved(stillness, slowest)
    assert spent(stillness, 2 * most, marks="second") == pytest.approx(most, abs=1)


def test_a_part_without_a_measure_gets_six_times_as_long():
    stillness = Stillness(600.0)
    moved(stillness, 300)
    assert spent(stillness, 5000, ("sync", "sync"), "other") == pytest.approx(3600, abs=1)


def test_waiting_for_samplers_is_no_hang_and_no_measure():
    stillness = Stillness(10.0)
    assert spent(stillness, 1000, ("rollout", "sample")) is None
    moved(stillness, 2)
    assert spent(stillness, 1000, marks="second") == pytest.approx(10, abs=1)


def test_of_a_start_only_the_wait_for_the_sampler_is_no_hang():
    """Reading goes on piece by piece: however large a checkpoint is, each piece has the whole time."""
    stillness = Stillness(10.0)
    assert spent(stillness, 1000, START) is None
    assert spent(stillness, 100, ("start", "restore"), "planned") == pytest.approx(60, abs=1)
    stillness = Stillness(10.0)
    assert all(stillness.look(("start", "restore"), piece, 8.0) is None for piece in range(100))


def test_a_record_that_cannot_be_read_leaves_the_stacks(tmp_path):
    def broken():
        raise ValueError("planted")

    assert report(tmp_path, 3, broken) == {}
    assert "test_hangs.py" in (tmp_path / "hang/rank00003.stacks").read_text()


def test_the_main_thread_is_first_among_the_stacks_of_many_threads(tmp_path):
    ends, test = threading.Event(), "test_the_main_thread_is_first_among_the_stacks_of_many_threads"
    threads = [threading.Thread(target=ends.wait) for _ in range(120)]
    for thread in threads:
        thread.start()
    report(tmp_path, 3, lambda: ({}, b""))
    ends.set()
    stacks = (tmp_path / "hang/rank00003.stacks").read_text().split("\n\n")
    assert stacks[0].startswith("Thread MainThread ") and f" in {test}" in stacks[0] and len(stacks) > 120
    for thread in threads:
        thread.join()


def test_a_record_that_never_comes_leaves_the_stacks(tmp_path, monkeypatch):
    """Torch may wait for a lock that the hang itself holds."""
    monkeypatch.setattr(hangs, "_EVIDENCE_SECONDS", 0.05)
    never = threading.Event()
    assert report(tmp_path, 3, never.wait) == {}
    assert "test_hangs.py" in (tmp_path / "hang/rank00003.stacks").read_text()
    never.set()


@pytest.mark.parametrize(
    ("told", "rank", "why"),
    [
        # Rank 2 never began the third collective of the world; rank 3 waits for it in a group of two.
        ([({"all": 3}, 10), ({"all": 3}, 11), ({"all": 2}, 12), ({"all": 2, "pair": 7}, 11)], 2, "begun 2"),
        ([({"all": 3}, 10), ({"all": 3}, 30)], 1, "stopped first"),
        ([({}, 1.0), ({}, 2.0)], 1, "stopped first"),
    ],
)
def test_the_late_rank_has_begun_fewer_collectives_and_stopped_first(told, rank, why):
    states = {at: {"begun": begun, "still": still} for at, (begun, still) in enumerate(told)}
    found, reason = late(states)
    assert found == rank and why in reason
