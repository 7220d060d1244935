"""Computes all numbers that follow from a config, its model and the number of ranks. `--plan` prints them.

Sizes are in bytes, lengths in tokens. Each part has its own file in this folder, with one function per quantity that
states its formula. `plan_table` prints the parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.check_cluster import has_servers
from moe_rl.config.check_files import count_prompts, existing_folder, together
from moe_rl.config.layout import Layout, chunk_layers, make_layout
from moe_rl.config.passed_on import needs_engine, not_planned
from moe_rl.config.schema import ClusterConfig, Config
from moe_rl.errors import About, CheckpointError, Problem, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import parameter_count
from moe_rl.planning.activations import Activations, Shape, stage_activations
from moe_rl.planning.memory import DTYPE_BYTES, StageMemory, stage_memory
from moe_rl.planning.sampler_memory import (
    Batch,
    SamplerMemory,
    Storage,
    checkpoints_to_come,
    make_batch,
    make_sampler,
    make_storage,
)
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
        samples: whether engines start. A run that replays another has none, so nothing must fit or reach them.
        served: whether the engines are servers, named or planned.
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
    samples: bool
    served: bool

    @property
    def shared_bytes(self) -> int:
        """Return the bytes on the fullest GPU that a rank shares with an engine; 0 if there is none. The trainer frees
        the memory of a step before the engine wakes."""
        stages, engine = [self.stages[stage] for stage in self.beside], self.sampler.total_bytes
        if self.sleeps:
            return max((max(stage.total_bytes, stage.memory.model_bytes + engine) for stage in stages), default=0)
        return max((stage.total_bytes + engine for stage in stages), default=0)

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
    served = has_servers(config)
    sharing = 0 if config.cluster is None or served else min(config.rollout.engines, world_size)
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
        samples=config.run.replays is None,
        served=served,
    )


def _stages(config: Config, facts: ModelFacts, layout: Layout, batch: Batch) -> tuple[Stage, ...]:
    rows = batch.microbatch_rows // layout.context
    # Every token counts as a completion token, and every sequence as one of full length.
    longest = batch.max_sequence_tokens
    # TransformerEngine's attention pads nothing. Ours gives sequences of different lengths up to twice their rows.
    padded = rows if any(needs_engine(config)) else 2 * rows
    shape = Shape(rows, padded, longest, predicted=rows, dtype=config.train.dtype, copies=config.placement.copies)
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
    choice_bytes = number * (2 if config.replay.native_every else 1) + (4 if config.replay.plan is not False else 0)
    return tokens * moe_layers * facts.top_k * choice_bytes


def gpu_bytes(cluster: ClusterConfig) -> int:
    """Return the GPU memory that a plan may use: all but the reserved part."""
    return int((cluster.gpu_memory_gib - cluster.reserved_gib) * 2**30)


def transfer_problems(plan: Plan) -> list[Problem]:
    """Say why weights cannot reach the samplers; empty when they can."""
    return [plan.transfer.problem] if plan.transfer.problem and plan.samples else []


def memory_problems(plan: Plan) -> list[Problem]:
    """Return one message for each thing that does not fit; empty when everything fits. Without a cluster only the KV
    cache of engines that the run starts is known."""
    problems = list(_misfits(plan))
    if plan.samples and plan.sampler.fitting == 0 and (plan.limit_bytes is not None or not plan.served):
        problems.append(
            describe(
                "not one sequence of full length fits",
                where={"key": "rollout.kv_cache_mib"},
                got=f"{plan.sampler.kv_tokens:,} tokens",
                expected=f"at least {plan.batch.max_sequence_tokens:,}",
                do="raise it",
            )
        )
    return problems


def _misfits(plan: Plan) -> Iterator[Problem]:
    limit = plan.limit_bytes
    if limit is None:
        return
    most = f"at most {limit / 2**30:.1f} GiB without cluster.reserved_gib"
    worst = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].total_bytes)
    if plan.stages[worst].total_bytes > limit:
        yield describe(
            "the model and its activations do not fit on a rank",
            where={"key": "cluster.gpu_memory_gib", "stage": worst},
            got=f"{plan.stages[worst].total_bytes / 2**30:.1f} GiB",
            expected=most,
            do=_remedy(plan, plan.stages[worst]),
            fault="trainer",
        )
    if not plan.samples:
        return
    if plan.sampler.total_bytes > limit:
        yield describe(
            "weights, KV cache and arriving weights do not fit on a GPU of a sampler",
            where={"key": "cluster.gpu_memory_gib"},
            got=f"{plan.sampler.weight_bytes / 2**30:.1f} + {plan.sampler.kv_cache_bytes / 2**30:.1f} + "
            f"{plan.sampler.sync_bytes / 2**30:.1f} GiB",
            expected=most,
            do="lower rollout.kv_cache_mib"
            if plan.sampler.weight_bytes < limit
            else "raise cluster.gpus_per_engine: the weights alone are too large",
            fault="sampler",
        )
    elif plan.beside and plan.stages[worst].total_bytes <= limit < plan.shared_bytes:
        yield describe(
            "a rank and an engine do not fit on the GPU that they share",
            where={"key": "cluster.gpu_memory_gib"},
            got=f"{plan.shared_bytes / 2**30:.1f} GiB",
            expected=most,
            do=("" if plan.sleeps else "set rollout.sleep_level, ")
            + "lower rollout.kv_cache_mib, use more ranks, keep less of the optimizer on the GPU "
            "(docs/howto/one_node.md), or name servers in rollout.servers",
            fault="shared",
        )


def _remedy(plan: Plan, stage: Stage) -> str:
    """Say what would lower the largest part of a rank's memory."""
    memory, activations = stage.memory, stage.activations
    parts = {
        "use more ranks, which divide the optimizer state": memory.optimizer_bytes,
        "raise parallel.expert, or parallel.pipeline": memory.parameter_bytes + memory.main_grad_bytes,
        "set objective.kl_coef to 0": memory.reference_bytes,
        "raise parallel.tensor, which divides the vocabulary, or lower train.microbatch_tokens": activations.head_bytes,
        "lower train.microbatch_tokens or raise parallel.context"
        if plan.recompute == "uniform"
        else "set train.recompute to uniform": activations.peak_bytes - activations.head_bytes,
    }
    if not plan.distributed_optimizer:
        parts["set train.distributed_optimizer"] = parts.pop("use more ranks, which divide the optimizer state")
    return max(parts, key=parts.__getitem__)


def disk_problems(
    config: Config, plan: Plan, run: Path | None = None, step: int | Literal["best"] | None = None
) -> Iterator[Problem]:
    """Yield a problem if the disk of the run is too full for the checkpoints that it keeps.

    Args:
        run: the folder of a resumed run, wherever it is now. None: a new run, in run.runs_dir.
        step: of the checkpoint that is resumed, as in `checkpoint_folder.find`. 0: none.
    """
    folder = run or config.run.runs_dir
    try:
        free = shutil.disk_usage(existing_folder(folder)).free
        done, replaced, removed_bytes = (0, 0, 0) if run is None else _left_by(run / checkpoints.FOLDER, step)
    except OSError:
        return  # such as a link to nowhere, which check_files tells
    count = checkpoints_to_come(config, done, replaced)
    free, needed = free + removed_bytes, count * plan.storage.checkpoint_bytes
    if free < needed:
        where: About = {"key": "run.runs_dir"} if run is None else {"option": "--resume"}
        yield describe(
            "not enough free disk for the checkpoints that are kept, and the one that is written",
            where={**where, "folder": folder},
            got=f"{free:,} bytes",
            expected=f"at least {needed:,}, for {count} more",
            do=f"free some space, {'set run.runs_dir' if run is None else 'move the folder'} or lower checkpoint.keep",
        )


def _left_by(folder: Path, step: int | Literal["best"] | None) -> tuple[int, int, int]:
    """Return the step that a resume begins after, how many checkpoints in `folder` new ones will replace, and the bytes
    of unfinished ones, which it removes. It puts those aside that are newer than its own."""
    removed_bytes = sum(file.stat().st_size for file in folder.glob(".step-*.tmp/**/*"))
    if step == 0:
        return 0, 0, removed_bytes
    try:
        resumed = checkpoints.step_of(checkpoints.find(folder, step))
    except CheckpointError:  # start_checks tells it
        return 0, 0, removed_bytes
    return resumed, sum(done <= resumed for done, _ in checkpoints.complete(folder)), removed_bytes
