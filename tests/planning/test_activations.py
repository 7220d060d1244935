"""Compares planned activations with measured peaks, and by hand where one rank cannot show them."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from moe_rl.config.layout import make_layout
from moe_rl.config.training import ParallelConfig
from moe_rl.planning.activations import Shape, dispatched_rows, head_bytes, in_flight, layer_bytes
from tests.planning.activation_cases import cases
from tests.planning.meta_cases import ROOT

WITHIN = 0.1


@pytest.fixture(scope="module")
def peaks():
    """Return (measured, planned) bytes for each case, all from one process."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.planning.activation_worker"], cwd=ROOT, text=True, timeout=280, check=False,
        capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [case.name for case in cases()])
def test_the_planned_peak_is_near_the_measured_one(peaks, name):
    measured, planned = peaks[name]
    assert abs(planned - measured) < WITHIN * measured, f"{planned / measured - 1:+.1%}"


@pytest.fixture
def facts():
    return cases()[0].facts


def of(facts, rows=512, **sizes):
    layout = make_layout(ParallelConfig(**sizes), facts, 8)
    here = rows // layout.context
    return layout, Shape(rows=here, padded_rows=here, longest=128, predicted=here, dtype="bfloat16")


def test_ranks_that_share_matrices_or_tokens_share_activations(facts):
    whole, half, context = (
        layer_bytes(facts, *of(facts, **sizes), has_experts=True) for sizes in ({}, {"tensor": 2}, {"context": 2})
    )
    assert half > whole / 2 > 0.9 * half  # cosines and sines are whole on both
    # keys and values of all ranks, and a mask of a byte
    extra = 256 * 2 * 2 * 32 + 256 * 128
    assert context == whole // 2 + extra
    assert head_bytes(facts, *of(facts, tensor=2)) == pytest.approx(head_bytes(facts, *of(facts)) / 2, rel=1e-9)


def test_beyond_a_chunk_of_logits_more_rows_add_only_hidden_states(facts):
    facts = dataclasses.replace(facts, vocab=1 << 16)
    few, more = (head_bytes(facts, *of(facts, rows=rows)) for rows in (512, 1024))
    norm, hidden = 2 * 2 * 64 + 4, 2 * 2 * 64
    assert more - few == 512 * (norm + hidden)
    chunk, matrix = 1 << 24, 64 << 16
    assert few == 512 * (norm + hidden) + max(24 * chunk + 4 * matrix, 16 * chunk + 6 * matrix)


def test_dispatched_rows_by_hand(facts):
    """512 rows of 2 experts each; tensor ranks send a part each; those that share an expert see all of its rows."""
    assert dispatched_rows(facts, *of(facts, expert=4)) == 1024
    assert dispatched_rows(facts, *of(facts, tensor=2, expert=4)) == 512
    assert dispatched_rows(facts, *of(facts, tensor=2, expert=2, expert_tensor=2)) == 1024


@pytest.mark.parametrize(
    ("sizes", "microbatches", "expected"),
    [
        ({"pipeline": 4}, 8, [4, 3, 2, 1]),
        ({"pipeline": 4}, 2, [2, 2, 2, 1]),
        # of 2 runs each: 2 x 3 + 4 + 1 = 11 passes of half the layers, then 9, 7, 5
        ({"pipeline": 4, "virtual_pipeline": 2}, 8, [5.5, 4.5, 3.5, 2.5]),
        ({}, 8, [1]),
    ],
)
def test_microbatches_in_flight(facts, sizes, microbatches, expected):
    layout = make_layout(ParallelConfig(**sizes), facts, 4)
    assert [in_flight(layout, stage, microbatches) for stage in range(layout.pipeline)] == expected
