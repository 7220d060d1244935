"""Every number that follows from a config, the model it names and the number of ranks; `--plan` prints it.

Sizes are bytes, lengths are tokens. Each part has a file of its own here, in which one function gives one quantity and
says its formula; `plan_table` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.hf import parameter_count
from moe_rl.config.layout import Layout, make_layout
from moe_rl.config.model_facts import ModelFacts
from moe_rl.config.prompt_file import count_prompts
from moe_rl.config.schema import Config
from moe_rl.planning.batch import Batch, make_batch
from moe_rl.planning.memory import StageMemory, stage_memory
from moe_rl.planning.sampler import Sampler, make_sampler
from moe_rl.planning.storage import Storage, make_storage


@dataclass(frozen=True, slots=True)
class Model:
    """The whole model. parameters: dense ones and those of the experts."""

    layers: int
    moe_layers: int
    num_experts: int
    top_k: int
    parameters: int
    dense_parameters: int
    expert_parameters: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers derived from a config. stages: a rank's memory, for each pipeline stage from first to last."""

    layout: Layout
    batch: Batch
    model: Model
    stages: tuple[StageMemory, ...]
    distributed_optimizer: bool
    sampler: Sampler
    storage: Storage

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks hold the most."""
        return max(self.stages, key=lambda stage: stage.model_bytes)


def make_plan(config: Config, facts: ModelFacts, world_size: int) -> Plan:
    """Derive the numbers. Never fails: what does not divide is rounded up here and refused by `check.problems`."""
    layout = make_layout(config.parallel, facts, world_size)
    batch = make_batch(config, layout, count_prompts(config.task.train))
    count = parameter_count(facts)
    return Plan(
        layout=layout,
        batch=batch,
        model=Model(
            layers=facts.layers,
            moe_layers=len(facts.moe_layers),
            num_experts=facts.num_experts,
            top_k=facts.top_k,
            parameters=count.total,
            dense_parameters=count.dense,
            expert_parameters=count.expert,
        ),
        stages=stage_memory(config, facts, layout),
        distributed_optimizer=config.train.distributed_optimizer,
        sampler=make_sampler(config, facts, batch),
        storage=make_storage(config, facts, batch),
    )
