"""What is wrong with how pipeline stages share the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

from moe_rl.config.layout import stage_layers
from moe_rl.config.schema import ParallelConfig
from moe_rl.errors import describe
from moe_rl.models.facts import ModelFacts


def stage_problems(parallel: ParallelConfig, facts: ModelFacts | None) -> Iterator[str]:
    """One message each. facts: None when the model could not be read."""
    runs, lengths = parallel.pipeline * parallel.virtual_pipeline, parallel.layers_per_run
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield describe(
            "parallel.virtual_pipeline: there is no pipeline to interleave",
            got=parallel.virtual_pipeline,
            expected="1 while parallel.pipeline is 1",
        )
        return
    if lengths and runs == 1:
        yield describe(
            "parallel.layers_per_run: there is no pipeline that shares the layers",
            got=list(lengths),
            expected="none while parallel.pipeline is 1",
        )
        return
    if lengths and len(lengths) != runs:
        yield describe(
            "parallel.layers_per_run: not one number for each run of layers",
            got=f"{len(lengths)} numbers",
            expected=f"{runs} (parallel.pipeline x parallel.virtual_pipeline)",
        )
        return
    if facts is None:
        return
    if lengths and sum(lengths) != facts.layers:
        yield describe(
            "parallel.layers_per_run: not the layers of the model",
            got=f"{' + '.join(map(str, lengths))} = {sum(lengths)}",
            expected=f"{facts.layers} together",
        )
    elif not lengths and facts.layers % parallel.pipeline:
        yield describe(
            "parallel.pipeline: does not divide the model's layers (num_hidden_layers)",
            got=parallel.pipeline,
            expected=f"a divisor of {facts.layers}",
            do="or say how many layers each run has: parallel.layers_per_run",
        )
    elif not lengths and facts.layers % runs:
        yield describe(
            "parallel.virtual_pipeline: does not divide the layers of a stage",
            got=parallel.virtual_pipeline,
            expected=f"a divisor of {facts.layers // parallel.pipeline}",
            do="or say how many layers each run has: parallel.layers_per_run",
        )
    else:
        bare = [layers for layers in stage_layers(facts, parallel) if not set(layers) & set(facts.moe_layers)]
        if bare:
            yield describe(
                "parallel.pipeline: a stage would hold dense layers only and have no routes to replay",
                got=f"{parallel.pipeline} stages, one of them with the layers {bare[0]}",
                do="lower parallel.pipeline, or raise parallel.virtual_pipeline to mix the layers",
            )
