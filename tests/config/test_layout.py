"""Tests which layers a pipeline stage holds."""

from types import SimpleNamespace

import pytest

from moe_rl.config.layout import chunk_layers, stage_layers
from moe_rl.config.training import ParallelConfig


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ({"pipeline": 2}, [[range(4)], [range(4, 8)]]),
        ({"pipeline": 2, "virtual_pipeline": 2}, [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "layers_per_run": (1, 2, 2, 3)},
            [[range(1), range(3, 5)], [range(1, 3), range(5, 8)]],
        ),
        ({"pipeline": 4, "layers_per_run": (3, 2, 2, 1)}, [[range(3)], [range(3, 5)], [range(5, 7)], [range(7, 8)]]),
    ],
)
def test_interleaved_stages_hold_runs_that_lie_apart(sizes, runs):
    """Return the layers as Megatron assigns them."""
    facts, parallel = SimpleNamespace(layers=8), ParallelConfig(**sizes)
    assert chunk_layers(facts, parallel) == runs
    assert stage_layers(facts, parallel) == [[layer for run in stage for layer in run] for stage in runs]
