"""Computes how ranks share a model: the sizes of the parallel groups, and the layers of each pipeline stage."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from moe_rl.config.schema import Config
from moe_rl.config.training import ParallelConfig
from moe_rl.models.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Layout:
    """Holds the sizes of the parallel groups of `world_size` ranks.

    data: number of data-parallel groups, each with its own sequences. expert_data: number of copies of one expert.
    experts_per_rank: number of experts of a layer that a rank holds, whole or in part.
    """

    world_size: int
    pipeline: int
    virtual_pipeline: int
    tensor: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int
    experts_per_rank: int

    @property
    def dense_copies(self) -> int:
        """Return the number of ranks with the same dense parameters. They share the optimizer state."""
        return self.data * self.context


def make_layout(parallel: ParallelConfig, facts: ModelFacts, world_size: int) -> Layout:
    """Compute the layout. Never fails: sizes that do not divide, which `check_layout` refuses, are rounded."""
    stage_size = world_size // parallel.pipeline
    return Layout(
        world_size=world_size,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        tensor=parallel.tensor,
        context=parallel.context,
        data=max(1, stage_size // (parallel.tensor * parallel.context)),
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        expert_data=max(1, stage_size // (parallel.expert * parallel.expert_tensor)),
        experts_per_rank=-(-facts.num_experts // parallel.expert),
    )


def on_one_rank(config: Config) -> Config:
    """Return the config for a single rank, without the settings that need several, such as overlap and placement."""
    changes: dict[str, dict[str, object]] = {
        "train": {"overlap_expert_parallel_comm": False, "delay_wgrad_compute": False, "packing": "length"},
        "rollout": {"engines": 1},
        "replay": {"overlap_chunks": 0},
        "placement": {"experts": "natural", "copies": 0},
    }
    alone = {section: getattr(config, section).model_copy(update=keys) for section, keys in changes.items()}
    return config.model_copy(update={"parallel": ParallelConfig(), **alone})


def least_ranks(parallel: ParallelConfig) -> int:
    """Return the smallest number of ranks for this layout. A multiple of it adds data parallelism."""
    dense, experts = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return parallel.pipeline * math.lcm(dense, experts)


def chunk_layers(facts: ModelFacts, parallel: ParallelConfig) -> list[list[range]]:
    """Return the 0-based layers of each run of adjacent layers, as [stage][run].

    Stage s holds run s, run s + `pipeline`, and so on.
    """
    runs = parallel.pipeline * parallel.virtual_pipeline
    lengths = parallel.layers_per_run or (-(-facts.layers // runs),) * runs
    ends = [min(end, facts.layers) for end in itertools.accumulate(lengths)]
    found = [range(first, end) for first, end in itertools.pairwise([0, *ends])]
    return [[run for run in found[stage :: parallel.pipeline] if run] for stage in range(parallel.pipeline)]


def stage_layers(facts: ModelFacts, parallel: ParallelConfig) -> list[list[int]]:
    """Return the 0-based layers of each pipeline stage."""
    return [[layer for run in runs for layer in run] for runs in chunk_layers(facts, parallel)]
