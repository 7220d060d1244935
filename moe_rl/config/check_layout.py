"""Checks the layout of ranks against the sizes of the model and the number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from moe_rl.config.layout import chunk_layers, least_ranks, stage_layers
from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.errors import About, Problem, describe
from moe_rl.models.facts import ModelFacts


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
