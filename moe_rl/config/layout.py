"""Computes how ranks share a model: the sizes of the parallel groups, and the layers of each pipeline stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from moe_rl.config.schema import Config
from moe_rl.config.training import ParallelConfig, PlacementConfig, TrainConfig
from moe_rl.errors import About, Problem, describe
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
    """Compute the layout. Never fails: sizes that do not divide, which `check_parallel` refuses, are rounded."""
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
        "rollout": {"engines": 1, "in_flight": None},
        "replay": {"overlap_chunks": 0},
        "report": {"profile": None},
    }
    alone = {section: getattr(config, section).model_copy(update=keys) for section, keys in changes.items()}
    return config.model_copy(update={"parallel": ParallelConfig(), "placement": PlacementConfig(), **alone})


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
    layer_runs = [range(first, end) for first, end in itertools.pairwise([0, *ends])]
    return [[run for run in layer_runs[stage :: parallel.pipeline] if run] for stage in range(parallel.pipeline)]


def stage_layers(facts: ModelFacts, parallel: ParallelConfig) -> list[list[int]]:
    """Return the 0-based layers of each pipeline stage."""
    return [[layer for run in runs for layer in run] for runs in chunk_layers(facts, parallel)]


def layout_problems(
    parallel: ParallelConfig, train: TrainConfig, facts: ModelFacts | None, world_size: int
) -> Iterator[Problem]:
    """Return every reason why the model cannot be laid out and scheduled this way on `world_size` ranks. facts None:
    not known."""
    yield from parallel.problems()
    yield from train.problems()
    yield from _rank_problems(parallel, facts, world_size)
    yield from _schedule_problems(parallel, train, facts)


def _rank_problems(parallel: ParallelConfig, facts: ModelFacts | None, world_size: int) -> Iterator[Problem]:
    least = least_ranks(parallel)
    if world_size % least:
        sizes = ", ".join(f"parallel.{dimension} = {size}" for dimension, size in parallel if size not in (1, ()))
        yield describe(
            "the number of ranks does not fit it",
            where={"key": "parallel"},
            got=f"{world_size} ranks and {sizes}",
            expected=f"a multiple of {least} ranks",
            do=f"start {least} ranks (--ranks {least}, or torchrun --nproc-per-node {least}), or change parallel",
        )
    for dimension, name, size in _divided_sizes(facts) if facts is not None else ():
        ranks = getattr(parallel, dimension)
        if size % ranks:
            yield describe(
                f"does not divide the model's {name}",
                where={"key": f"parallel.{dimension}"},
                got=ranks,
                expected=f"a divisor of {size}",
            )
    if facts is not None and not any(parallel.problems()):
        yield from _stage_problems(parallel, facts)
    if facts is not None and facts.linear_bias and parallel.expert_tensor > 1:
        yield describe(
            "megatron cannot share an expert that has biases",
            where={"key": "parallel.expert_tensor"},
            got=parallel.expert_tensor,
            expected=1,
            do="raise parallel.expert instead",
        )


def _stage_problems(parallel: ParallelConfig, facts: ModelFacts) -> Iterator[Problem]:
    runs, lengths = parallel.pipeline * parallel.virtual_pipeline, parallel.layers_per_run
    if lengths and sum(lengths) != facts.layers:
        yield describe(
            "not the layers of the model",
            where={"key": "parallel.layers_per_run"},
            got=f"{' + '.join(map(str, lengths))} = {sum(lengths)}",
            expected=f"{facts.layers} together",
        )
    elif not lengths and facts.layers % parallel.pipeline:
        yield describe(
            "does not divide the model's layers (num_hidden_layers)",
            where={"key": "parallel.pipeline"},
            got=parallel.pipeline,
            expected=f"a divisor of {facts.layers}",
            do="or set the number of layers of each run: parallel.layers_per_run",
        )
    elif not lengths and facts.layers % runs:
        yield describe(
            "does not divide the layers of a stage",
            where={"key": "parallel.virtual_pipeline"},
            got=parallel.virtual_pipeline,
            expected=f"a divisor of {facts.layers // parallel.pipeline}",
            do="or set the number of layers of each run: parallel.layers_per_run",
        )
    else:
        bare = [layers for layers in stage_layers(facts, parallel) if not set(layers) & set(facts.moe_layers)]
        if bare:
            yield describe(
                "a stage would hold dense layers only and have no routes to replay",
                where={"key": "parallel.pipeline"},
                got=f"{parallel.pipeline} stages, one of them with the layers {bare[0]}",
                do="lower parallel.pipeline, or raise parallel.virtual_pipeline to mix the layers",
            )


def _schedule_problems(parallel: ParallelConfig, train: TrainConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    if train.recompute in ("uniform", "block"):
        held = min(map(len, itertools.chain(*chunk_layers(facts, parallel)))) if facts is not None else None
        if held and train.recompute_layers > held:
            yield describe(
                "more than the layers of the shortest run of adjacent layers",
                where={"key": "train.recompute_layers"},
                got=train.recompute_layers,
                expected=f"at most {held}",
            )
    if train.packing == "load" and parallel.expert == 1:
        yield describe(
            "there are no experts on other ranks to load evenly",
            where={"key": "train.packing", "given": "parallel.expert is 1"},
            got="load",
            expected="length",
        )
    if not train.overlap_expert_parallel_comm:
        return
    where: About = {"given": "train.overlap_expert_parallel_comm is on"}
    if parallel.expert == 1:
        yield describe(
            "there is nothing to overlap", where={"key": "parallel.expert", **where}, got=1, expected="at least 2"
        )
    if train.dtype != "bfloat16":
        yield describe(
            "megatron overlaps in bfloat16 only",
            where={"key": "train.dtype", **where},
            got=train.dtype,
            expected="bfloat16",
        )
    if parallel.pipeline > 1 and parallel.virtual_pipeline == 1:
        yield describe(
            "in a pipeline megatron overlaps interleaved stages only",
            where={"key": "parallel.virtual_pipeline", **where},
            got=1,
            expected="at least 2",
            do="set it to 2, or turn one of parallel.pipeline and the overlap off",
        )


def _divided_sizes(facts: ModelFacts) -> Iterator[tuple[str, str, int]]:
    """Yield (a dimension of `parallel`, the name of a model size that it must divide, that size)."""
    yield "expert", "experts (num_experts)", facts.num_experts
    yield "expert_tensor", "experts' width (moe_intermediate_size)", facts.moe_intermediate_size
    yield "tensor", "key-value heads (num_key_value_heads)", facts.kv_heads
    yield "tensor", "vocabulary (vocab_size)", facts.vocab
    if len(facts.moe_layers) < facts.layers:
        yield "tensor", "dense layers' width (intermediate_size)", facts.intermediate_size
    if facts.shared_intermediate_size:
        yield "tensor", "shared experts' width together", facts.shared_intermediate_size
