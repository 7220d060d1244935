"""Computes what a rank of each pipeline stage keeps of the model between steps, in bytes, exactly as megatron builds
it.
"""

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
    """Holds the memory of the fullest rank of a stage.

    Attributes:
        layers: 0-based.
        parameters: their number, without padding.
        reference_bytes: the frozen initial policy; 0 if there is none.
        checkpoint_copy_bytes: what the rank copies to host memory while a checkpoint is written.
    """

    layers: tuple[int, ...]
    moe_layers: int
    parameters: int
    parameter_bytes: int
    main_grad_bytes: int
    optimizer_bytes: int
    reference_bytes: int
    checkpoint_copy_bytes: int

    @property
    def model_bytes(self) -> int:
        """Return the sum of all parts on the device. Activations are not included."""
        return self.parameter_bytes + self.main_grad_bytes + self.optimizer_bytes + self.reference_bytes


def state_bytes(dtype: str) -> int:
    """Return the bytes of optimizer state per parameter: Adam's two moments, and a float32 copy of parameters in
    another dtype."""
    return ADAM_MOMENTS_BYTES + (4 if DTYPE_BYTES[dtype] < 4 else 0)


def buffer_elements(buffer: Buffer, train: TrainConfig) -> int:
    """Return the elements of a flat buffer, with padding where ranks share its pieces."""
    return buffer.padded_elements if train.distributed_optimizer else buffer.elements


def parameter_bytes(buffers: list[Buffer], train: TrainConfig) -> int:
    """Return the bytes of parameters: bytes of a number x elements of the buffers."""
    return DTYPE_BYTES[train.dtype] * sum(buffer_elements(buffer, train) for buffer in buffers)


def main_grad_bytes(buffers: list[Buffer], train: TrainConfig) -> int:
    """Return the bytes of gradients: 4 x elements of the buffers, because gradients are summed in float32."""
    return MAIN_GRAD_BYTES * sum(buffer_elements(buffer, train) for buffer in buffers)


def optimizer_bytes(buffers: list[Buffer], train: TrainConfig, ranks: int) -> list[int]:
    """Return the bytes of optimizer state on each of the `ranks` of a stage.

    `state_bytes` x the parameters in the rank's piece of each buffer, or in all buffers without the distributed
    optimizer.
    """
    each = state_bytes(train.dtype)
    if not train.distributed_optimizer:
        return [each * sum(buffer.elements for buffer in buffers)] * ranks
    owned = [(buffer.owned(), buffer.ranks_between) for buffer in buffers]
    return [each * sum(pieces[rank // between % len(pieces)] for pieces, between in owned) for rank in range(ranks)]


def checkpoint_copy_bytes(buffers: list[Buffer], train: TrainConfig, ranks: int) -> int:
    """Return the bytes that the fullest of the `ranks` of a stage copies to host memory to write a checkpoint.

    `state_bytes` x the parameters whose state it owns, and bytes of a number x its share of the parameters, which
    all their copies write together. Without the distributed optimizer the copies share the state too.
    """
    shares, state = sum(-(-buffer.elements // buffer.copies) for buffer in buffers), state_bytes(train.dtype)
    owned = max(optimizer_bytes(buffers, train, ranks)) if train.distributed_optimizer else shares * state
    return owned + shares * DTYPE_BYTES[train.dtype]


def stage_memory(config: Config, facts: ModelFacts, layout: Layout) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage, first to last."""
    train, found, moe_layers = config.train, [], set(facts.moe_layers)
    for runs in chunk_layers(facts, config.parallel):
        buffers = [buffer for run in runs for buffer in chunk_buffers(facts, layout, run)]
        ranks = max(1, layout.world_size // layout.pipeline)
        parameters = sum(buffer.elements for buffer in buffers)
        layers = tuple(layer for run in runs for layer in run)
        found.append(
            StageMemory(
                layers=layers,
                moe_layers=len(moe_layers.intersection(layers)),
                parameters=parameters,
                parameter_bytes=parameter_bytes(buffers, train),
                main_grad_bytes=main_grad_bytes(buffers, train),
                optimizer_bytes=max(optimizer_bytes(buffers, train, ranks)),
                # The reference model is not wrapped for training, so its buffers have no padding.
                reference_bytes=parameters * DTYPE_BYTES[train.dtype] if config.objective.kl_coef > 0 else 0,
                checkpoint_copy_bytes=checkpoint_copy_bytes(buffers, train, ranks),
            )
        )
    return tuple(found)
