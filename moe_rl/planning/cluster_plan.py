"""Computes all numbers that follow from a config, its model and the number of ranks. `--plan` prints them.

Sizes are in bytes, lengths in tokens. Each part has its own file in this folder, with one function per quantity that
states its formula. `plan_table` prints the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.check_cluster import has_servers
from moe_rl.config.check_files import count_prompts, together
from moe_rl.config.layout import Layout, chunk_layers, make_layout
from moe_rl.config.passed_on import not_planned
from moe_rl.config.schema import ClusterConfig, Config
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import parameter_count
from moe_rl.planning.activations import Activations, Shape, stage_activations
from moe_rl.planning.memory import DTYPE_BYTES, StageMemory, stage_memory
from moe_rl.planning.sampler_memory import Batch, SamplerMemory, Storage, make_batch, make_sampler, make_storage
from moe_rl.planning.transfer import Transfer, planned_transfer


@dataclass(frozen=True, slots=True)
class Model:
    """Describes the whole model. parameters is the sum of dense and expert parameters."""

    layers: int
    moe_layers: int
    num_experts: int
    top_k: int
    parameters: int
    dense_parameters: int
    expert_parameters: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds the memory of the fullest rank of a pipeline stage, with full microbatches and even expert load.

    route_bytes: route tables and dispatch plans of all microbatches of a step.
    """

    memory: StageMemory
    activations: Activations
    route_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.memory.model_bytes + self.activations.peak_bytes + self.route_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the numbers derived from a config.

    Attributes:
        stages: the pipeline stages from first to last.
        limit_bytes: GPU memory available to a stage. None without a cluster.
        dispatch_bytes: bytes that a rank sends to experts in a layer of a microbatch. The same number comes back.
        not_planned: keys of settings for Megatron and vLLM whose effect is not in these numbers.
        beside: the stages of the ranks that share their GPU with an engine; none if the sampler has its own GPUs.
        sleeps: whether engines give their memory back while the trainer works.
    """

    layout: Layout
    batch: Batch
    model: Model
    stages: tuple[Stage, ...]
    distributed_optimizer: bool
    recompute: str
    limit_bytes: int | None
    dispatch_bytes: int
    sampler: SamplerMemory
    storage: Storage
    transfer: Transfer
    not_planned: tuple[str, ...]
    beside: tuple[int, ...]
    sleeps: bool

    @property
    def shared_bytes(self) -> int:
        """Return the bytes on the fullest GPU that a rank shares with an engine; 0 if there is none. The trainer frees
        the memory of a step before the engine wakes."""
        stages, engine = [self.stages[stage] for stage in self.beside], self.sampler.total_bytes
        if self.sleeps:
            return max((max(one.total_bytes, one.memory.model_bytes + engine) for one in stages), default=0)
        return max((one.total_bytes + engine for one in stages), default=0)

    @property
    def fullest(self) -> Stage:
        """Return the stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)


def make_plan(config: Config, facts: ModelFacts, world_size: int, prompts: int | None = None) -> Plan:
    """Derive the numbers. Never fails: numbers that do not divide are rounded up here, and `check.problems` refuses
    them.

    prompts: number of training prompts; None to count the lines of the files.
    """
    layout = make_layout(config.parallel, facts, world_size)
    prompts = prompts or together(count_prompts(config.task.train)) or config.task.train_prompts
    batch = make_batch(config, layout, prompts)
    count = parameter_count(facts)
    stages = _stages(config, facts, layout, batch)
    rows = stages[0].activations.dispatched_rows
    storage = make_storage(config, facts, layout, batch)
    sharing = 0 if config.cluster is None or has_servers(config) else min(config.rollout.engines, world_size)
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
        stages=stages,
        distributed_optimizer=config.train.distributed_optimizer,
        recompute=config.train.recompute,
        limit_bytes=gpu_bytes(config.cluster) if config.cluster is not None else None,
        dispatch_bytes=rows * facts.hidden_size * DTYPE_BYTES[config.train.dtype],
        sampler=make_sampler(config, facts, batch, storage.weight_bucket_bytes),
        storage=storage,
        transfer=planned_transfer(config, world_size),
        not_planned=not_planned(config),
        beside=tuple(sorted({rank * layout.pipeline // world_size for rank in range(sharing)})),
        sleeps=config.rollout.sleep_level > 0,
    )


def _stages(config: Config, facts: ModelFacts, layout: Layout, batch: Batch) -> tuple[Stage, ...]:
    rows = batch.microbatch_rows // layout.context
    # Every token counts as a completion token, and every sequence as one of full length.
    longest = batch.max_sequence_tokens
    shape = Shape(rows, rows, longest, predicted=rows, dtype=config.train.dtype, copies=config.placement.copies)
    runs, memory = chunk_layers(facts, config.parallel), stage_memory(config, facts, layout)
    return tuple(
        Stage(
            memory[stage],
            stage_activations(
                facts, layout, config.train, shape, stage=stage, runs=runs[stage], microbatches=batch.max_microbatches
            ),
            route_bytes(config, facts, layout, batch, moe_layers=memory[stage].moe_layers),
        )
        for stage in range(layout.pipeline)
    )


def route_bytes(config: Config, facts: ModelFacts, layout: Layout, batch: Batch, *, moe_layers: int) -> int:
    """Return the bytes of route tables and dispatch plans that a rank of a stage holds during a step.

    For each expert of a token and layer: its number, in a plan the 4 bytes of its place, and the router's own choice in
    steps that compare the two. All are kept until the step ends.
    """
    if config.replay.mode == "off":
        return 0
    tokens = batch.sequences_per_step * batch.max_sequence_tokens // (layout.data * layout.tensor * layout.context)
    number = 1 if facts.num_experts <= 256 else 2
    each = number * (2 if config.replay.native_every else 1) + (4 if config.replay.plan is not False else 0)
    return tokens * moe_layers * facts.top_k * each


def gpu_bytes(cluster: ClusterConfig) -> int:
    """Return the GPU memory that a plan may use: all but the reserved part."""
    return int((cluster.gpu_memory_gib - cluster.reserved_gib) * 2**30)
