"""What a rank of each pipeline stage keeps of the model from step to step, in bytes: what megatron builds, exactly."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.layout import Layout, chunk_layers
from moe_rl.config.schema import Config
from moe_rl.config.training import TrainConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.planning.parameters import Buffer, chunk_buffers

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MAIN_GRAD_BYTES = 4
ADAM_MOMENTS_BYTES = 8


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the fullest rank of a stage holds. layers: 0-based. parameters: how many, without padding. reference_bytes:
    the frozen initial policy's, 0 without one."""

    layers: tuple[int, ...]
    moe_layers: int
    parameters: int
    parameter_bytes: int
    main_grad_bytes: int
    optimizer_bytes: int
    reference_bytes: int

    @property
    def model_bytes(self) -> int:
        """All of these; activations come on top."""
        return self.parameter_bytes + self.main_grad_bytes + self.optimizer_bytes + self.reference_bytes


def state_bytes(dtype: str) -> int:
    """Optimizer state of one parameter: Adam's two moments, and a float32 copy unless it is float32 itself."""
    return ADAM_MOMENTS_BYTES + (4 if DTYPE_BYTES[dtype] < 4 else 0)


def buffer_elements(buffer: Buffer, train: TrainConfig) -> int:
    """Elements of a flat buffer: padded where its pieces are shared among ranks."""
    return buffer.padded_elements if train.distributed_optimizer else buffer.elements


def parameter_bytes(buffers: list[Buffer], train: TrainConfig) -> int:
    """Bytes of a number x elements of the buffers."""
    return DTYPE_BYTES[train.dtype] * sum(buffer_elements(buffer, train) for buffer in buffers)


def main_grad_bytes(buffers: list[Buffer], train: TrainConfig) -> int:
    """4, as gradients are summed in float32, x elements of the buffers."""
    return MAIN_GRAD_BYTES * sum(buffer_elements(buffer, train) for buffer in buffers)


def optimizer_bytes(buffers: list[Buffer], train: TrainConfig, ranks: int) -> list[int]:
    """For each of the `ranks` of a stage `state_bytes` x parameters in its piece of each buffer, and in all of them
    without the distributed optimizer."""
    each = state_bytes(train.dtype)
    if not train.distributed_optimizer:
        return [each * sum(buffer.elements for buffer in buffers)] * ranks
    owned = [(buffer.owned(), buffer.ranks_between) for buffer in buffers]
    return [each * sum(pieces[rank // between % len(pieces)] for pieces, between in owned) for rank in range(ranks)]


def stage_memory(config: Config, facts: ModelFacts, layout: Layout) -> tuple[StageMemory, ...]:
    """One for each pipeline stage, first to last."""
    train, found, moe_layers = config.train, [], set(facts.moe_layers)
    for runs in chunk_layers(facts, config.parallel):
        buffers = [buffer for run in runs for buffer in chunk_buffers(facts, layout, run)]
        parameters = sum(buffer.elements for buffer in buffers)
        layers = tuple(layer for run in runs for layer in run)
        found.append(
            StageMemory(
                layers=layers,
                moe_layers=len(moe_layers.intersection(layers)),
                parameters=parameters,
                parameter_bytes=parameter_bytes(buffers, train),
                main_grad_bytes=main_grad_bytes(buffers, train),
                optimizer_bytes=max(optimizer_bytes(buffers, train, max(1, layout.world_size // layout.pipeline))),
                # Not wrapped for training, so not padded.
                reference_bytes=parameters * DTYPE_BYTES[train.dtype] if config.objective.kl_coef > 0 else 0,
            )
        )
    return tuple(found)
