"""Computes what a rank of each pipeline stage keeps of the model between steps, in bytes, exactly as megatron builds
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_rl.config.layout import Layout, chunk_layers
from moe_rl.config.schema import Config
from moe_rl.config.training import TrainConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.planning.parameters import Buffer, adapter_buffers, chunk_buffers

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Holds the memory of the fullest rank of a stage.

    Attributes:
        layers: 0-based.
        parameters: their number, without padding and adapters.
        parameter_bytes: the weights of the model.
        adapter_bytes: the adapters, which alone have gradients and optimizer state then; 0 if the weights are trained.
        host_bytes: optimizer state that is in host memory instead (`optimizer_cpu_offload`).
        reference_bytes: the frozen initial policy; 0 if there is none.
        checkpoint_copy_bytes: what the rank copies to host memory while a checkpoint is written.
    """

    layers: tuple[int, ...]
    moe_layers: int
    parameters: int
    parameter_bytes: int
    adapter_bytes: int
    main_grad_bytes: int
    optimizer_bytes: int
    host_bytes: int
    reference_bytes: int
    checkpoint_copy_bytes: int

    @property
    def model_bytes(self) -> int:
        """Return the sum of all parts on the device. Activations are not included."""
        weights = self.parameter_bytes + self.adapter_bytes + self.reference_bytes
        return weights + self.main_grad_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Holds the bytes of optimizer state per parameter: on the GPU, in host memory, and in a checkpoint."""

    gpu: float
    host: float
    stored: int


def state_bytes(train: TrainConfig) -> StateBytes:
    """Return the bytes of optimizer state per parameter: Adam's two moments, and main values of other parameters than
    float32 ones.

    Without the precision-aware optimizer, gradients below float32 are copied to float32 for Adam. With it main values
    may be the 16 bits that a parameter lacks of them. State in host memory is float32, with a copy of the gradient,
    whose pinned memory may be larger: see `host_bytes`.
    """
    # Values that may not be passed on count as Megatron's defaults: `passed_problems` refuses them.
    passed, dtype = train.megatron_optimizer, train.dtype
    whole = 4 if DTYPE_BYTES[dtype] < 4 else 0
    if passed.get("optimizer_cpu_offload"):
        away = _fraction(passed.get("optimizer_offload_fraction"))
        return StateBytes(gpu=16 * (1 - away), host=16 * away, stored=12)
    if not passed.get("use_precision_aware_optimizer"):
        return StateBytes(gpu=8 + whole + (4 if gradient_bytes(train) < 4 else 0), host=0, stored=8 + whole)
    moments = _number_bytes(passed, "exp_avg_dtype") + _number_bytes(passed, "exp_avg_sq_dtype")
    main = min(2 if passed.get("store_param_remainders", True) else 4, whole)
    return StateBytes(gpu=moments + main, host=0, stored=8 + main)


def _number_bytes(passed: Mapping[str, Any], key: str) -> int:
    return DTYPE_BYTES.get(str(passed.get(key)), DTYPE_BYTES["float32"])


def _fraction(value: Any) -> float:
    return min(1.0, max(0.0, value)) if isinstance(value, int | float) else 0.0


def gradient_bytes(train: TrainConfig) -> int:
    """Return the bytes of a main gradient."""
    return 4 if train.megatron_optimizer.get("grad_reduce_in_fp32", True) else DTYPE_BYTES[train.dtype]


def buffer_elements(buffer: Buffer, train: TrainConfig) -> int:
    """Return the elements of a flat buffer, with padding where ranks share its pieces."""
    return buffer.padded_elements if train.distributed_optimizer else buffer.elements


def parameter_bytes(buffers: list[Buffer], train: TrainConfig) -> int:
    """Return the bytes of parameters: bytes of a number x elements of the buffers."""
    return DTYPE_BYTES[train.dtype] * sum(buffer_elements(buffer, train) for buffer in buffers)


def main_grad_bytes(buffers: list[Buffer], train: TrainConfig) -> int:
    """Return the bytes of gradients: bytes of a number x elements of the buffers."""
    return gradient_bytes(train) * sum(buffer_elements(buffer, train) for buffer in buffers)


def owned_parameters(buffers: list[Buffer], train: TrainConfig, ranks: int) -> list[int]:
    """Return the number of parameters whose state each of the `ranks` of a stage holds: those in its piece of each
    buffer, or all without the distributed optimizer.
    """
    if not train.distributed_optimizer:
        return [sum(buffer.elements for buffer in buffers)] * ranks
    owned = [(buffer.owned(), buffer.ranks_between) for buffer in buffers]
    return [sum(pieces[rank // between % len(pieces)] for pieces, between in owned) for rank in range(ranks)]


def optimizer_bytes(buffers: list[Buffer], train: TrainConfig, ranks: int) -> list[int]:
    """Return the bytes of optimizer state on the GPU of each of the `ranks` of a stage."""
    bytes_each = state_bytes(train).gpu
    return [int(bytes_each * owned) for owned in owned_parameters(buffers, train, ranks)]


def host_bytes(buffers: list[Buffer], train: TrainConfig, ranks: int) -> list[int]:
    """Return the bytes of optimizer state in host memory of each of the `ranks` of a stage.

    Gradients are copied into pinned memory, a piece for each parameter, which torch rounds up to a power of two.
    """
    away, passed = state_bytes(train).host, train.megatron_optimizer
    if not away:
        return [0] * ranks
    pieces = [(buffer.pieces(), buffer.ranks_between) for buffer in buffers]
    result = []
    for rank in range(ranks):
        sizes = [size for of, between in pieces for size in of[rank // between % len(of)]]
        pinned = sum((1 << (4 * size - 1).bit_length()) - 4 * size for size in sizes)
        result.append(int(away * sum(sizes) + away / 16 * pinned * (passed.get("pin_cpu_grads") is not False)))
    return result


def checkpoint_copy_bytes(buffers: list[Buffer], train: TrainConfig, ranks: int) -> int:
    """Return the bytes that the fullest of the `ranks` of a stage copies to host memory to write a checkpoint.

    Stored `state_bytes` x the parameters whose state it owns, and bytes of a number x its share of the parameters,
    which all their copies write together. Without the distributed optimizer the copies share the state too.
    """
    shares = sum(-(-buffer.elements // buffer.copies) for buffer in buffers)
    owned = max(owned_parameters(buffers, train, ranks)) if train.distributed_optimizer else shares
    return owned * state_bytes(train).stored + shares * DTYPE_BYTES[train.dtype]


def stage_memory(config: Config, facts: ModelFacts, layout: Layout) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage, first to last."""
    train, stages, moe_layers = config.train, [], set(facts.moe_layers)
    for runs in chunk_layers(facts, config.parallel):
        weights = [buffer for run in runs for buffer in chunk_buffers(facts, layout, run)]
        buffers, lora = weights, train.lora
        if lora is not None:
            buffers = [buffer for run in runs for buffer in adapter_buffers(facts, layout, run, lora)]
        ranks = max(1, layout.world_size // layout.pipeline)
        parameters = sum(buffer.elements for buffer in weights)
        bare = parameters * DTYPE_BYTES[train.dtype]
        layers = tuple(layer for run in runs for layer in run)
        stages.append(
            StageMemory(
                layers=layers,
                moe_layers=len(moe_layers.intersection(layers)),
                parameters=parameters,
                # Weights that are not trained are in no buffer, so they have no padding.
                parameter_bytes=parameter_bytes(weights, train) if lora is None else bare,
                adapter_bytes=0 if lora is None else parameter_bytes(buffers, train),
                main_grad_bytes=main_grad_bytes(buffers, train),
                optimizer_bytes=max(optimizer_bytes(buffers, train, ranks)),
                host_bytes=max(host_bytes(buffers, train, ranks)),
                # The reference model is not wrapped for training, so its buffers have no padding.
                reference_bytes=bare if config.objective.kl_coef > 0 and lora is None else 0,
                checkpoint_copy_bytes=checkpoint_copy_bytes(buffers, train, ranks),
            )
        )
    return tuple(stages)
