"""Tests which layers a pipeline stage holds, and what of a config one rank can do."""

from types import SimpleNamespace

import pytest

from moe_rl.config.check import config_problems
from moe_rl.config.layout import chunk_layers, on_one_rank, stage_layers
from moe_rl.config.load import load_config
from moe_rl.config.training import ParallelConfig
from moe_rl.models.hf import read_model


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


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement={experts: traced, copies: 1, least_copied_rows: 8, node_ranks: 2}"],
        [
            "report.profile={steps: [1], ranks: [0, 1]}",
            "rollout.engines=2",
            "rollout.in_flight=64",
            "replay.overlap_chunks=2",
        ],
        ["train.overlap_expert_parallel_comm=true", "train.dtype=bfloat16", "train.packing=load"],
    ],
)
def test_one_rank_is_asked_for_nothing_that_needs_several(overrides):
    config = load_config("configs/tiny_moe_cpu.yaml", overrides)
    facts = read_model(config.model.path)
    assert config_problems(config, facts, 2) == config_problems(on_one_rank(config), facts, 1) == []
