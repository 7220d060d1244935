"""Tests the zig-zag: every row is on one rank, each rank has the same causal work, and the chunks match megatron's."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from moe_rl.planning.packing import (
    PAD_MULTIPLE,
    padded_lengths,
    padding_experts,
    positions_of,
    row_multiple,
    rows_of,
)

TOKENS = st.lists(st.integers(1, 70), max_size=8)


@given(TOKENS, st.integers(1, 6), st.sampled_from([1, 2, 4, 8]))
def test_every_row_is_on_one_rank(tokens, context, tensor):
    lengths = padded_lengths(tokens, context)
    total = sum(lengths)
    parts = [rows_of(lengths, rank, context) for rank in range(context)]
    assert {len(part) for part in parts} == {total // context} and total % (context * PAD_MULTIPLE) == 0
    # sequence parallelism cuts a context-parallel rank's rows once more, evenly
    pieces = [piece for part in parts for piece in np.split(part, tensor)]
    assert sorted(np.concatenate(pieces).tolist()) == list(range(total))


@given(TOKENS, st.integers(2, 6))
def test_a_sequence_is_padded_to_chunks_that_cost_the_same(tokens, context):
    lengths = padded_lengths(tokens, context)
    assert all(0 <= padded - count < 2 * context for padded, count in zip(lengths, tokens, strict=False))
    assert len(lengths) - len(tokens) in (0, 1) and all(n and n % (2 * context) == 0 for n in lengths)
    for length in lengths:
        seen = {int((positions_of(length, rank, context) + 1).sum()) for rank in range(context)}
        assert len(seen) == 1


def test_float8_gets_16_rows_on_each_rank():
    train, parallel = SimpleNamespace(megatron={"fp8": "hybrid"}), SimpleNamespace(tensor=2)
    assert row_multiple(train, parallel) == 32 and padded_lengths([60, 40], 2, 32) == (60, 40, 28)
    assert row_multiple(SimpleNamespace(megatron={"fp8": None}), parallel) == 8


def test_one_rank_pads_no_sequence():
    assert padded_lengths([3, 5]) == (3, 5) and padded_lengths([3, 4]) == (3, 4, 1) and padded_lengths([]) == (8,)
    assert rows_of((3, 4, 1), 0, 1).tolist() == list(range(8))


@given(st.integers(1, 9), st.integers(2, 6))
def test_the_chunks_are_those_that_megatron_rotates(chunk, context):
    length = 2 * chunk * context
    for rank in range(context):
        local = torch.empty(length // context)
        expected = _get_thd_freqs_on_this_cp_rank(rank, context, local, torch.arange(length))
        assert positions_of(length, rank, context).tolist() == expected.tolist()


def test_padding_goes_to_the_experts_of_all_ranks_alike():
    experts = padding_experts(4, 8, 2, 4)
    assert all(len(set(row)) == 2 for row in experts.tolist())
    assert np.bincount(experts.ravel() // 2, minlength=4).tolist() == [2, 2, 2, 2]
    assert np.bincount(padding_experts(1, 8, 2, 4).ravel() // 2, minlength=4).max() == 1
