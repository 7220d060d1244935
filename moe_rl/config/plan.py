"""Every number that follows from a config, the model it names and the number of ranks; `--plan` prints it.

Sizes are bytes, lengths are tokens. Upper bounds assume that every sequence is as long as the config allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from moe_rl.config.hf import ModelFacts, parameter_count, stage_parameter_counts
from moe_rl.config.schema import Config, ParallelConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MAIN_GRAD_BYTES = 4
ADAM_MOMENTS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers derived from a config. Those named `_per_rank` are of the fullest rank.

    data_parallel: parts of the ranks, each with sequences of its own; times context_parallel, replicas of the dense
    parameters. expert_data_parallel: replicas of one expert. max_sequence_tokens: longest prompt and longest completion
    together. routes_*: raw ids, one row a forwarded token. kv_tokens: tokens the sampler's KV cache holds.
    prompts_per_epoch: lines of task.train, None when it cannot be read. epochs: at one sampling round a step.
    reference_bytes_per_rank: parameters of the frozen initial policy, 0 without one.
    """

    world_size: int
    pipeline_parallel: int
    virtual_pipeline_parallel: int
    tensor_parallel: int
    context_parallel: int
    data_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int
    expert_data_parallel: int
    experts_per_rank: int

    sequences_per_step: int
    groups_per_update: int
    sequences_per_update: int
    updates: int
    max_sequence_tokens: int
    max_tokens_per_step: int
    max_microbatches_per_update: int

    layers: int
    moe_layers: int
    num_experts: int
    top_k: int
    parameters: int
    dense_parameters: int
    expert_parameters: int
    parameters_per_rank: int
    parameter_bytes_per_rank: int
    main_grad_bytes_per_rank: int
    distributed_optimizer: bool
    optimizer_bytes_per_rank: int
    reference_bytes_per_rank: int
    checkpoint_bytes: int
    weight_sync_bytes: int

    routes_bytes_per_token: int
    max_routes_bytes_per_step: int

    kv_bytes_per_token: int
    kv_tokens: int
    max_concurrent_sequences: int
    kv_fits_max_concurrent: bool

    steps: int
    prompts_per_epoch: int | None
    sampling_rounds: int
    epochs: float | None

    @property
    def training_bytes_per_rank(self) -> int:
        """Parameters, main gradients, optimizer state and reference; activations come on top."""
        return (
            self.parameter_bytes_per_rank
            + self.main_grad_bytes_per_rank
            + self.optimizer_bytes_per_rank
            + self.reference_bytes_per_rank
        )


def least_ranks(parallel: ParallelConfig) -> int:
    """The smallest number of ranks that this layout runs on; any multiple of it adds data parallelism."""
    dense, experts = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return parallel.pipeline * math.lcm(dense, experts)


def make_plan(config: Config, facts: ModelFacts, world_size: int) -> Plan:
    """Derive the numbers. Never fails: what does not divide is rounded up here and refused by `check.problems`."""
    rollout, train, parallel = config.rollout, config.train, config.parallel
    stage_size = world_size // parallel.pipeline
    data_parallel = max(1, stage_size // (parallel.tensor * parallel.context))
    expert_data_parallel = max(1, stage_size // (parallel.expert * parallel.expert_tensor))
    experts_per_rank = _ceil(facts.num_experts, parallel.expert)

    sequences_per_step = rollout.prompts_per_step * rollout.group_size
    groups_per_update = _ceil(rollout.prompts_per_step, train.updates_per_step)
    sequences_per_update = groups_per_update * rollout.group_size
    max_sequence_tokens = rollout.max_prompt_tokens + rollout.max_completion_tokens
    sequences_per_microbatch = max(1, train.microbatch_tokens // max_sequence_tokens)

    count = parameter_count(facts)
    dense_per_rank, expert_per_rank = _fullest_rank(facts, parallel, experts_per_rank)
    parameter_bytes = DTYPE_BYTES[train.dtype]
    # A float32 parameter is its own master copy.
    state_bytes = ADAM_MOMENTS_BYTES + (4 if parameter_bytes < 4 else 0)
    per_rank = dense_per_rank + expert_per_rank

    routes_bytes = len(facts.moe_layers) * facts.top_k * (1 if facts.num_experts <= 256 else 2)
    kv_bytes = facts.layers * facts.cache_width * DTYPE_BYTES[rollout.dtype]
    kv_tokens = (rollout.kv_cache_mib << 20) // kv_bytes
    concurrent = min(rollout.max_concurrent, sequences_per_step)
    prompts = count_prompts(config.task.train)
    return Plan(
        world_size=world_size,
        pipeline_parallel=parallel.pipeline,
        virtual_pipeline_parallel=parallel.virtual_pipeline,
        tensor_parallel=parallel.tensor,
        context_parallel=parallel.context,
        data_parallel=data_parallel,
        expert_parallel=parallel.expert,
        expert_tensor_parallel=parallel.expert_tensor,
        expert_data_parallel=expert_data_parallel,
        experts_per_rank=experts_per_rank,
        sequences_per_step=sequences_per_step,
        groups_per_update=groups_per_update,
        sequences_per_update=sequences_per_update,
        updates=config.run.steps * train.updates_per_step,
        max_sequence_tokens=max_sequence_tokens,
        max_tokens_per_step=sequences_per_step * max_sequence_tokens,
        max_microbatches_per_update=_ceil(_ceil(sequences_per_update, data_parallel), sequences_per_microbatch),
        layers=facts.layers,
        moe_layers=len(facts.moe_layers),
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        parameters=count.total,
        dense_parameters=count.dense,
        expert_parameters=count.expert,
        parameters_per_rank=per_rank,
        parameter_bytes_per_rank=per_rank * parameter_bytes,
        main_grad_bytes_per_rank=per_rank * MAIN_GRAD_BYTES,
        distributed_optimizer=train.distributed_optimizer,
        optimizer_bytes_per_rank=state_bytes
        * (
            _ceil(dense_per_rank, data_parallel * parallel.context) + _ceil(expert_per_rank, expert_data_parallel)
            if train.distributed_optimizer
            else per_rank
        ),
        reference_bytes_per_rank=per_rank * parameter_bytes if config.objective.kl_coef > 0 else 0,
        checkpoint_bytes=count.total * (parameter_bytes + state_bytes),
        weight_sync_bytes=count.total * DTYPE_BYTES[rollout.dtype],
        routes_bytes_per_token=routes_bytes,
        max_routes_bytes_per_step=rollout.dynamic_sampling_rounds
        * sequences_per_step
        * (max_sequence_tokens - 1)
        * routes_bytes,
        kv_bytes_per_token=kv_bytes,
        kv_tokens=kv_tokens,
        max_concurrent_sequences=concurrent,
        kv_fits_max_concurrent=concurrent * max_sequence_tokens <= kv_tokens,
        steps=config.run.steps,
        prompts_per_epoch=prompts,
        sampling_rounds=rollout.dynamic_sampling_rounds,
        epochs=config.run.steps * rollout.prompts_per_step / prompts if prompts else None,
    )


def stage_layers(facts: ModelFacts, parallel: ParallelConfig) -> list[list[int]]:
    """0-based layers of each pipeline stage, which holds every `pipeline`-th run of them."""
    run = _ceil(facts.layers, parallel.pipeline * parallel.virtual_pipeline)
    stages: list[list[int]] = [[] for _ in range(parallel.pipeline)]
    for layer in range(facts.layers):
        stages[layer // run % parallel.pipeline].append(layer)
    return stages


def _fullest_rank(facts: ModelFacts, parallel: ParallelConfig, experts_per_rank: int) -> tuple[int, int]:
    """Parameters outside the experts, and in them, on a rank of the stage that has the most."""
    ranks = [
        (
            count.dense - count.cut + _ceil(count.cut, parallel.tensor),
            _ceil(count.expert * experts_per_rank, facts.num_experts * parallel.expert_tensor),
        )
        for count in stage_parameter_counts(facts, stage_layers(facts, parallel))
    ]
    return max(ranks, key=sum)


def count_prompts(path: Path) -> int | None:
    """Lines of a JSONL file that are not blank; None when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return sum(1 for line in stream if line.strip())
    except OSError:
        return None


def render(plan: Plan) -> str:
    """The plan as an aligned table for people."""
    fits = "fit" if plan.kv_fits_max_concurrent else "do not all fit at full length: the sampler will preempt"
    epochs = "unknown: task.train cannot be read" if plan.epochs is None else f"{plan.epochs:.2f}"
    sections: dict[str, list[tuple[str, str, str]]] = {
        "ranks": [
            ("world size", f"{plan.world_size:,}", ""),
            (
                "pipeline stages",
                f"{plan.pipeline_parallel:,}",
                f"{plan.virtual_pipeline_parallel:,} runs of layers each",
            ),
            ("tensor parallel", f"{plan.tensor_parallel:,}", "ranks that share dense matrices and a sequence's tokens"),
            ("context parallel", f"{plan.context_parallel:,}", "ranks that share a sequence's tokens alone"),
            ("data parallel", f"{plan.data_parallel:,}", "each with sequences of its own"),
            ("expert parallel", f"{plan.expert_parallel:,}", "ranks that share the experts"),
            ("expert tensor parallel", f"{plan.expert_tensor_parallel:,}", "ranks that share each expert's matrices"),
            ("copies of each expert", f"{plan.expert_data_parallel:,}", ""),
            ("experts per rank", f"{plan.experts_per_rank:,}", f"of {plan.num_experts:,}, top {plan.top_k}"),
        ],
        "a step": [
            ("sequences", f"{plan.sequences_per_step:,}", ""),
            ("tokens", f"{plan.max_tokens_per_step:,}", "at most"),
            ("longest sequence", f"{plan.max_sequence_tokens:,}", "tokens, prompt and completion"),
            ("groups per update", f"{plan.groups_per_update:,}", f"{plan.sequences_per_update:,} sequences"),
            ("microbatches", f"{plan.max_microbatches_per_update:,}", "per rank and update, if all are full length"),
        ],
        "the run": [
            ("steps", f"{plan.steps:,}", ""),
            ("optimizer updates", f"{plan.updates:,}", ""),
            ("prompts per epoch", "unknown" if plan.prompts_per_epoch is None else f"{plan.prompts_per_epoch:,}", ""),
            ("epochs", epochs, f"to {plan.sampling_rounds} times that" if plan.sampling_rounds > 1 else ""),
        ],
        "the model": [
            ("parameters", _millions(plan.parameters), f"{_millions(plan.expert_parameters)} in experts"),
            ("MoE layers", f"{plan.moe_layers:,}", f"of {plan.layers:,}"),
            ("parameters per rank", _millions(plan.parameters_per_rank), ""),
        ],
        "memory per rank": [
            ("parameters", bytes_text(plan.parameter_bytes_per_rank), ""),
            ("main gradients", bytes_text(plan.main_grad_bytes_per_rank), "float32"),
            (
                "optimizer state",
                bytes_text(plan.optimizer_bytes_per_rank),
                "float32, " + ("sharded over its data-parallel group" if plan.distributed_optimizer else "not sharded"),
            ),
            (
                "reference model",
                bytes_text(plan.reference_bytes_per_rank),
                "frozen" if plan.reference_bytes_per_rank else "none",
            ),
            ("together", bytes_text(plan.training_bytes_per_rank), "activations come on top"),
        ],
        "the sampler": [
            ("KV cache", f"{plan.kv_tokens:,}", f"tokens of {plan.kv_bytes_per_token:,} B"),
            ("sequences at once", f"{plan.max_concurrent_sequences:,}", fits),
            ("weight sync", bytes_text(plan.weight_sync_bytes), "each time"),
        ],
        "storage": [
            ("routes per token", f"{plan.routes_bytes_per_token:,} B", "raw"),
            ("routes per step", bytes_text(plan.max_routes_bytes_per_step), "raw, at most"),
            ("one checkpoint", bytes_text(plan.checkpoint_bytes), ""),
        ],
    }
    rows = [row for section in sections.values() for row in section]
    labels, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = []
    for title, section in sections.items():
        lines.append(title)
        lines += [f"  {label:<{labels}}  {value:>{values}}  {note}".rstrip() for label, value, note in section]
    return "\n".join(lines)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def bytes_text(count: int) -> str:
    """Bytes in the binary unit that keeps at least one digit before the point."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} B" if unit == "B" else f"{value:,.1f} {unit}"


def _millions(count: int) -> str:
    return f"{count / 1e9:,.2f} bn" if count >= 1e9 else f"{count / 1e6:,.2f} M" if count >= 1e5 else f"{count:,}"
