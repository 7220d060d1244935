"""Describes a rank's slice of the distributed optimizer's state, so that it is saved and loaded without other ranks.

The distributed optimizer cuts flat buffers into one slice per data-parallel rank. So a slice may begin and end anywhere
in a tensor. Successive elements of a tensor form a few boxes: the rest of a row, whole rows, the beginning of a row.
torch's format stores a tensor as boxes of any size. So each rank writes and reads only its own boxes of whole tensors,
which have the same names and shapes in every layout.

The main parameter of a float32 parameter is a slice of the parameter itself, in the same memory. It is stored once, as
part of the weights. Main parameters of other precisions are stored as "param": their float32 values, or the 16 bits
that the parameter lacks of them (`store_param_remainders`).

Megatron's own formats do one of two things: they gather all data-parallel slices on a rank (`fully_reshardable`, whose
names are used here), or they can be loaded only by the layout that wrote them, apart from its data-parallel size
(`dp_reshardable`).

Also gives, counts and sets the state of Adam that Megatron keeps in host memory (`optimizer_cpu_offload`).

Its HybridDeviceOptimizer holds the state of all parameters, and one Adam for each memory updates it in place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def is_offloaded(optimizer: MegatronOptimizer) -> bool:
    """Return whether some of the optimizer's state may be in host memory."""
    return isinstance(optimizer.optimizer, HybridDeviceOptimizer)


@torch.no_grad()
def begin(optimizer: MegatronOptimizer) -> None:
    """Give Adam its moments, zeros, if it has made no step yet. Megatron's own way would take a step."""
    hybrid = optimizer.optimizer
    if not is_offloaded(optimizer):
        if optimizer.config.use_precision_aware_optimizer:  # Megatron leaves out an argument of TransformerEngine's
            for values in (parameter for group in hybrid.param_groups for parameter in group["params"]):
                if not hybrid.state[values]:
                    remainders = hybrid.store_param_remainders and values.dtype is torch.bfloat16
                    hybrid.initialize_state(values, remainders)
        else:
            optimizer.init_state_fn(hybrid, optimizer.config)
        return
    for adam in hybrid.sub_optimizers:
        for values in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[values]:
                adam.state[values] |= {kind: torch.zeros_like(values) for kind in ("exp_avg", "exp_avg_sq")}
                if isinstance(adam, torch.optim.AdamW):
                    adam.state[values]["step"] = torch.zeros([], device=values.device)
    hybrid._sync_sub_optimizers_state_to_hdo()


def steps(optimizers: Iterable[MegatronOptimizer]) -> int:
    """Return the number of steps that Adam has made. Torch's Adam counts them with the state of each parameter."""
    made = [0]
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if is_offloaded(optimizer):
            groups = [group for adam in optimizer.optimizer.sub_optimizers for group in adam.param_groups]
            made += [int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state]
        # TransformerEngine's Adam does not count steps in a group without parameters.
        made += [int(group.get("step", 0)) for group in groups]
    return max(made)


def set_steps(optimizer: MegatronOptimizer, made: int) -> None:
    """Set the number of steps that an optimizer has made which is offloaded or precision-aware."""
    for adam in optimizer.optimizer.sub_optimizers if is_offloaded(optimizer) else [optimizer.optimizer]:
        for group in adam.param_groups:
            if not isinstance(adam, torch.optim.AdamW):
                group["step"] = made
        for state in adam.state.values():
            if "step" in state:
                state["step"].fill_(made)


KINDS = ("param", "exp_avg", "exp_avg_sq")
"""What the optimizer keeps of each parameter: the main values and Adam's two moments."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a box in a tensor, along each axis."""


@torch.no_grad()
def sharded_slices(optimizer: DistributedOptimizer, model: dict, *, loading: bool, there: Collection[str] = ()) -> dict:
    """Return the boxes of this rank's state: {number of the parameter: {"param", "exp_avg", ...: [box, ...]}}.

    A parameter whose slice the optimizer updates in place has no "param": the weights hold it.

    Args:
        model: The sharded state dict of the model, with the parameters themselves. It says where each is stored.
        loading: Leave the boxes without data, to be filled in. Otherwise they share memory with the optimizer's state.
            Moments below float32 are copied to the host instead, in float32.
        there: Names of the tensors in the checkpoint that is loaded. Older checkpoints have "param" of every parameter.
    """
    kinds = ShardedTensor | ShardedTensorFactory
    stored = {entry.data: entry for entry in nested_values(model) if isinstance(entry, kinds)}
    slices: dict[int, dict[str, list[ShardedTensor]]] = {}
    for number, parameter in enumerate(optimizer.model_param_gbuf_map):
        span = optimizer._get_model_param_range_map(parameter)["param"]
        boxes = list(_stored_boxes(stored[parameter], parameter, span.start, span.end))
        slices[number] = {}
        held = optimizer._get_main_param_and_optimizer_states(parameter)
        for kind, state in ((kind, held[kind]) for kind in KINDS):
            in_place = state.data_ptr() == parameter.data_ptr() + span.start * parameter.element_size()
            if in_place and not any(_key(kind, box) in there for box in boxes):
                continue
            values = state.detach().split([math.prod(box.local_shape) for box in boxes])
            if not loading and optimizer._get_state_key_dtype(kind) is not torch.float32:
                # The GPU has no room for new float32 tensors of all parameters.
                values = [value.cpu() for value in values]
            slices[number][kind] = [
                replace(
                    box,
                    key=_key(kind, box),
                    data=None if loading else value.view(box.local_shape),
                    dtype=state.dtype,
                    replica_id=(*box.replica_id[:2], optimizer.distributed_optimizer_instance_id),
                )
                for box, value in zip(boxes, values, strict=True)
            ]
    return slices


@torch.no_grad()
def set_slices(optimizer: DistributedOptimizer, loaded: dict) -> None:
    """Copy into the optimizer what was loaded for `sharded_slices`: the same dict, with tensors as boxes.

    Load the weights first: they set the main parameters for which nothing was loaded.
    """
    for number, parameter in enumerate(optimizer.model_param_gbuf_map):
        state = {kind: torch.cat([box.flatten() for box in boxes]) for kind, boxes in loaded[number].items()}
        if is_offloaded(optimizer):  # Megatron's function would replace tensors that Adam updates in place
            held = optimizer._get_main_param_and_optimizer_states(parameter)
            for kind, values in state.items():
                held[kind].copy_(values)
            continue
        state.setdefault("param", None)  # Megatron's function leaves it as it is
        optimizer._set_main_param_and_optimizer_states(parameter, state)


def _key(kind: str, box: ShardedTensor) -> str:
    return f"optimizer.state.{kind}.{box.key}"


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yield the boxes that elements `start` to `end` of a row-major tensor make up, in the order of the elements."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # both ends are in one row
        parts = [(last, start - last * row, end - last * row)]
    else:
        parts = [(first - 1, row - (first * row - start), row), (last, 0, end - last * row)]
    for number, low, high in parts[:1]:
        yield from (((number, *offset), (1, *size)) for offset, size in boxes(shape[1:], low, high))
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for number, low, high in parts[1:]:
        yield from (((number, *offset), (1, *size)) for offset, size in boxes(shape[1:], low, high))


def _stored_boxes(
    entry: ShardedTensor | ShardedTensorFactory, parameter: torch.Tensor, start: int, end: int
) -> Iterator[ShardedTensor]:
    """Yield the boxes of stored tensors that elements `start` to `end` of a parameter make up, without data."""
    for tensor, first in _stored_tensors(entry, parameter):
        low, high = max(start - first, 0), min(end - first, tensor.data.numel())
        ahead = (0,) * tensor.prepend_axis_num
        for offset, size in boxes(tuple(tensor.local_shape), low, high):
            yield replace(
                tensor,
                data=None,
                local_shape=(*(1 for _ in ahead), *size),
                global_offset=tuple(map(sum, zip(tensor.global_offset, (*ahead, *offset), strict=True))),
                axis_fragmentations=None,
                prepend_axis_num=0,
            )


def _stored_tensors(
    entry: ShardedTensor | ShardedTensorFactory, parameter: torch.Tensor
) -> list[tuple[ShardedTensor, int]]:
    """Return (stored tensor, its first element in the parameter), in the order of the elements.

    A factory stores a parameter as several tensors. Each must be a run of the parameter's elements.
    """
    tensors = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    begin, storage = parameter.data_ptr(), parameter.untyped_storage().data_ptr()
    placed = sorted(
        ((tensor, (tensor.data.data_ptr() - begin) // parameter.element_size()) for tensor in tensors),
        key=lambda pair: pair[1],
    )
    position = 0
    for tensor, first in placed:
        in_place = tensor.data.untyped_storage().data_ptr() == storage and tensor.data.is_contiguous()
        if not in_place or first != position:
            raise TypeError(f"{tensor.key} is not stored in the order of its parameter's elements")
        position += tensor.data.numel()
    return placed
