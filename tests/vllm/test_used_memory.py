"""Tests which memory a copy of rows gets, and that nobody gets memory that somebody still reads."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moe_rl.vllm import slots
from moe_rl.vllm.slots import UsedMemory

ROW = np.dtype("u2")


@pytest.fixture
def small_too(monkeypatch):
    """Lends small arrays as it does large ones."""
    monkeypatch.setattr(slots, "_SMALL", 1)


def lent(memory: UsedMemory, array: np.ndarray) -> bool:
    return np.shares_memory(np.frombuffer(memory._memory, np.uint8), array)


def test_small_arrays_are_not_lent():
    memory = UsedMemory(1 << 16)
    assert not lent(memory, memory.array((1 << 14,), np.dtype("u1")))
    assert lent(memory, memory.array((1 << 15,), np.dtype("u1")))


@pytest.mark.usefixtures("small_too")
def test_memory_that_came_back_is_lent_again():
    memory = UsedMemory(128)
    one, two = (memory.array((4, 8), ROW) for _ in range(2))
    assert lent(memory, one) and lent(memory, two) and not np.shares_memory(one, two)
    place, view = one.ctypes.data, one[1:3]
    del one
    assert not lent(memory, memory.array((4, 8), ROW))  # the view still reads the only other place
    del view
    again = memory.array((2, 16), ROW)
    assert again.ctypes.data == place and again.shape == (2, 16)


@pytest.mark.usefixtures("small_too")
def test_no_two_arrays_share_memory():
    rng, kept, found = random.Random(0), {}, []
    memory = UsedMemory(1 << 12)
    for number in range(1000):
        if kept and (len(kept) > 6 or rng.random() < 0.5):
            del kept[rng.choice([*kept])]
        array = memory.array((rng.randrange(40), 16), ROW)
        array[:] = number
        kept[number] = array[: rng.randrange(41)]
        found.append(lent(memory, array))
        del array
        assert all((one == at).all() for at, one in kept.items())
    assert 100 < sum(found) < 1000  # some found no room
    kept.clear()
    assert lent(memory, memory.array((1 << 11,), ROW))
