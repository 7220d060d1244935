"""Tests the mirror of the KV cache alone: a row is returned only to its owner.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import numpy as np
import pytest

from moe_rl.errors import EngineError
from moe_rl.vllm import slots as slot_module
from moe_rl.vllm.slots import BlockTable, SlotTable
from tests.support.refusals import refused

BLOCK = 4


def table_of(slots: SlotTable, blocks: list[int], *, cached: int = 0) -> BlockTable:
    table = BlockTable()
    slots.give(blocks[cached:])
    slots.extend(table, blocks)
    return table


def write(slots: SlotTable, table: BlockTable, start: int, tokens: list[int], version: int = 0, **options) -> None:
    """Write rows of consecutive positions, with routes that encode token and position."""
    positions = np.arange(start, start + len(tokens))
    at = np.asarray(table.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    write_at(slots, at, positions, tokens, version, **options)


def write_at(slots, at, positions, tokens, version=0, may_repeat=False) -> None:
    routes = np.stack([np.stack([positions, np.asarray(tokens)], -1)] * 2, 1)
    sums = np.asarray(tokens, np.uint64) * 1000 + positions.astype(np.uint64)
    slots.write(at, positions, np.asarray(tokens), routes, sums, version, may_repeat=may_repeat)


@pytest.fixture
def slots() -> SlotTable:
    return SlotTable(8, BLOCK, (2, 2), np.dtype("u1"))


def test_rows_are_copied_to_memory_that_was_written_before(slots, monkeypatch):
    monkeypatch.setattr(slot_module, "_SMALL", 1)
    table, memory = table_of(slots, [5]), np.frombuffer(slots._copies._memory, np.uint8)
    write(slots, table, 0, [10, 11, 12])
    one, two = (slots.read(table, 0, 3, {}).routes for _ in range(2))
    assert np.shares_memory(memory, one) and np.shares_memory(memory, two) and not np.shares_memory(one, two)
    assert one.tolist() == two.tolist() == [[[0, 10]] * 2, [[1, 11]] * 2, [[2, 12]] * 2]


def test_rows_come_back_in_the_order_of_positions(slots):
    table = table_of(slots, [5, 2])
    write(slots, table, 0, [10, 11, 12, 13, 14], version=3)
    write(slots, table, 5, [15], version=4)
    rows = slots.read(table, 1, 6, {"request": "a"})
    assert rows.token_ids.tolist() == [11, 12, 13, 14, 15]
    assert rows.routes[:, 0].tolist() == [[1, 11], [2, 12], [3, 13], [4, 14], [5, 15]]
    assert rows.weight_versions.tolist() == [3, 3, 3, 3, 4]
    assert rows.sums.tolist() == [11001, 12002, 13003, 14004, 15005]


def test_a_cached_block_keeps_its_rows(slots):
    first = table_of(slots, [5, 2])
    write(slots, first, 0, [10, 11, 12, 13, 14])
    second = table_of(slots, [5, 3], cached=1)
    write(slots, second, 4, [24])
    assert slots.read(second, 0, 5, {"request": "b"}).token_ids.tolist() == [10, 11, 12, 13, 24]
    assert slots.read(first, 0, 5, {"request": "a"}).token_ids.tolist() == [10, 11, 12, 13, 14]


def test_a_block_given_away_is_never_served(slots):
    """The new owner has the same tokens at the same positions, so only the ownership differs."""
    first = table_of(slots, [5])
    write(slots, first, 0, [10, 11, 12])
    second = table_of(slots, [5])
    with refused(EngineError, fault="given away", request="a", position=0, block=5, got="no row"):
        slots.read(first, 0, 3, {"request": "a"})
    write(slots, second, 0, [10, 11, 12])
    with refused(EngineError, fault="given away", request="a", position=0, block=5):
        slots.read(first, 0, 3, {"request": "a"})
    assert slots.read(second, 0, 3, {"request": "b"}).token_ids.tolist() == [10, 11, 12]


def test_a_dropped_step_is_missed_though_the_slot_held_a_like_row(slots):
    old = table_of(slots, [5])
    write(slots, old, 0, [10, 11, 12, 13])
    new = table_of(slots, [5])
    write(slots, new, 0, [10, 11])
    write(slots, new, 3, [13])
    with refused(EngineError, fault="absent", request="b", position=2, block=5, got="no row"):
        slots.read(new, 0, 4, {"request": "b"})


def test_a_step_that_is_stored_twice_is_an_error(slots):
    table = table_of(slots, [5])
    write(slots, table, 0, [10, 11])
    with refused(EngineError, fault="twice", token=0, position=1, slot=21):
        write(slots, table, 1, [11, 12])
    with refused(EngineError, fault="twice"):
        write_at(slots, np.array([22, 22]), np.array([2, 2]), [1, 2])
    write(slots, table, 1, [21, 22], may_repeat=True)
    assert slots.read(table, 0, 3, {"request": "a"}).token_ids.tolist() == [10, 21, 22]


def test_a_wrong_offset_is_an_error(slots):
    table = table_of(slots, [5])
    with refused(EngineError, fault="slots", token=0, position=0, got=("21",)):
        write_at(slots, np.array([21, 22]), np.array([0, 1]), [10, 11])
    write_at(slots, np.array([28, 29]), np.array([0, 1]), [10, 11])  # another block: nobody's
    with refused(EngineError, fault="absent", position=0):
        slots.read(table, 0, 2, {"request": "a"})
    with refused(EngineError, fault="blocks", got=("5",), expected=("4",)):
        slots.read(table, 0, 5, {"request": "a"})


def test_a_partly_hit_block_is_copied_up_to_the_hit(slots):
    first = table_of(slots, [5])
    write(slots, first, 0, [10, 11, 12, 13])
    second = table_of(slots, [6])
    slots.copy(5, 6, 2)
    write(slots, second, 2, [22, 23])
    assert slots.read(second, 0, 4, {"request": "b"}).token_ids.tolist() == [10, 11, 22, 23]
