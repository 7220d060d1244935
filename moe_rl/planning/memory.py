"""What a rank of each pipeline stage keeps of the model from step to step, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.hf import stage_parameter_counts
from moe_rl.config.layout import Layout, stage_layers
from moe_rl.config.model_facts import ModelFacts
from moe_rl.config.schema import Config

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MAIN_GRAD_BYTES = 4
ADAM_MOMENTS_BYTES = 8


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of the fullest rank of a pipeline stage. layers: 0-based. parameters: how many. reference_bytes: the frozen
    initial policy's, 0 without one."""

    layers: tuple[int, ...]
    parameters: int
    parameter_bytes: int
    main_grad_bytes: int
    optimizer_bytes: int
    reference_bytes: int

    @property
    def total_bytes(self) -> int:
        """Activations come on top."""
        return self.parameter_bytes + self.main_grad_bytes + self.optimizer_bytes + self.reference_bytes


def state_bytes(dtype: str) -> int:
    """Optimizer state of one parameter: Adam's two moments, and a float32 copy unless it is float32 itself."""
    return ADAM_MOMENTS_BYTES + (4 if DTYPE_BYTES[dtype] < 4 else 0)


def stage_memory(config: Config, facts: ModelFacts, layout: Layout) -> tuple[StageMemory, ...]:
    """One for each pipeline stage, first to last."""
    train, stages = config.train, stage_layers(facts, config.parallel)
    found = []
    for layers, count in zip(stages, stage_parameter_counts(facts, stages), strict=True):
        dense = count.dense - count.cut + -(-count.cut // layout.tensor)
        expert = -(-count.expert * layout.experts_per_rank // (facts.num_experts * layout.expert_tensor))
        shared = -(-dense // layout.dense_copies) + -(-expert // layout.expert_data)
        bytes_each = DTYPE_BYTES[train.dtype]
        found.append(
            StageMemory(
                layers=tuple(layers),
                parameters=dense + expert,
                parameter_bytes=(dense + expert) * bytes_each,
                main_grad_bytes=(dense + expert) * MAIN_GRAD_BYTES,
                optimizer_bytes=state_bytes(train.dtype) * (shared if train.distributed_optimizer else dense + expert),
                reference_bytes=(dense + expert) * bytes_each if config.objective.kl_coef > 0 else 0,
            )
        )
    return tuple(found)
