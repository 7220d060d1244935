"""Moves experts between expert-parallel ranks, and keeps checkpoints independent of where experts are.

Outside the dispatcher, an expert always has its logical number: in routes, routers, biases, Hugging Face names and
checkpoints. A dispatcher's `order` says which expert is in which slot, and the weights in a slot must be those of its
expert. The functions here change both together.

Moving an expert moves all its training state, bit for bit: its weights, the float32 copy that the optimizer updates,
and Adam's two moments. If the distributed optimizer splits these over ranks with the same experts, the ranks first
gather the parts of the experts that leave. Then ranks exchange them. One matrix of one layer is moved at a time. So
besides its own weights, a rank holds at most one matrix of each expert that it sends or receives.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer

from moe_rl.megatron.optimizer_slices import KINDS

# Experts as one module each (SequentialMLP), or all in one module (TransformerEngine's grouped linear).
_SLOT = re.compile(r"local_experts\.(\d+)\.|(\d+)$")


def expert_weights(moe: MoELayer) -> list[dict[str, torch.nn.Parameter]]:
    """Return {name within the expert, such as linear_fc1.weight: parameter} for each local slot."""
    by_slot: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(moe.num_local_experts)]
    for name, parameter in moe.experts.named_parameters():
        slot = _SLOT.search(name)
        assert slot is not None  # both modules number the parameters of their experts
        by_slot[int(slot[1] or slot[2])][name[: slot.start()] + name[slot.end() :]] = parameter
    return by_slot


@torch.no_grad()
def move(moe: MoELayer, order: np.ndarray, optimizers: list[MegatronOptimizer]) -> None:
    """Move the experts of a layer, with their optimizer state, into the slots given by `order` int64 [E].

    All ranks that hold the layer's experts call this together with the same order. Adam must have its moments by then.
    """
    dispatcher, local, first = moe.token_dispatcher, moe.num_local_experts, moe.ep_group.rank() * moe.num_local_experts
    before, was, will = dispatcher.order, np.argsort(dispatcher.order), np.argsort(order)
    changed = [slot for slot in range(first, first + local) if before[slot] != order[slot]]
    # Order the sent and the received experts by the other rank, then by the new slot.
    leaving = sorted((int(will[before[slot]]), slot) for slot in changed)
    arriving = sorted((int(was[order[slot]]) // local, slot) for slot in changed)
    sent = [sum(slot // local == rank for slot, _ in leaving) for rank in range(moe.ep_group.size())]
    got = [sum(source == rank for source, _ in arriving) for rank in range(moe.ep_group.size())]

    def exchanged(rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)  # a rank sends and receives the same number of experts
        dist.all_to_all_single(received, rows, got, sent, group=moe.ep_group)
        return received

    experts = expert_weights(moe)
    for name in sorted(experts[0]):
        weights = [expert[name] for expert in experts]
        out = [weights[slot - first] for _, slot in leaving]
        arrived = exchanged(_weights(out, weights[0])), exchanged(_state(out, weights[0], optimizers))
        for value, state, (_, slot) in zip(*arrived, arriving, strict=True):
            weight = weights[slot - first]
            weight.copy_(value.view_as(weight))
            held, covered = _held(weight, optimizers)
            for part, whole in zip(held, state, strict=bool(held)):
                part.copy_(whole[covered].view_as(part))
    dispatcher.place(order)


@torch.no_grad()
def checksum(moe: MoELayer) -> torch.Tensor:
    """Return the checksum int64 of a layer's expert weights, over all ranks that share its experts.

    Weights are summed under the logical number that the dispatcher gives their slot. Moving experts does not change the
    checksum, but weights in the slot of another expert do.
    """
    order, first = moe.token_dispatcher.order, moe.ep_group.rank() * moe.num_local_experts
    total = torch.zeros(1, dtype=torch.int64, device=next(moe.experts.parameters()).device)
    for slot, weights in enumerate(expert_weights(moe)):
        for number, name in enumerate(sorted(weights)):
            # A power of an odd number: different for different experts, and wrapped around like the sums.
            salt = pow(0x9E3779B97F4A7C15, len(weights) * int(order[first + slot]) + number + 1, 1 << 64)
            total += weights[name].reshape(-1).view(torch.int16).sum(dtype=torch.int64) * (salt - (salt >> 63 << 64))
    dist.all_reduce(total, group=moe.ep_group)
    return total


def relocated(entries: dict, order: np.ndarray, axis: int) -> dict:
    """Change the slots along `axis` of the experts' sharded state dict to logical expert numbers."""
    return {name: _relocated(entry, order, axis) for name, entry in entries.items()}


def _relocated(entry, order: np.ndarray, axis: int):
    if isinstance(entry, ShardedTensorFactory):

        def build(*arguments):
            return [_relocated(part, order, axis) for part in entry.build_fn(*arguments)]

        return replace(entry, build_fn=build)
    if isinstance(entry, ShardedTensor | ShardedObject):
        offset = list(entry.global_offset)
        offset[axis] = int(order[offset[axis]])
        return replace(entry, global_offset=tuple(offset))
    raise TypeError(f"cannot renumber an entry of type {type(entry).__name__} in the experts' sharded state dict")


def _weights(weights: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the weights as one tensor [weights, elements]."""
    return torch.cat([like.new_empty(0, like.numel()), *(weight.view(1, -1) for weight in weights)])


def _state(weights: list[torch.Tensor], like: torch.Tensor, optimizers: list[MegatronOptimizer]) -> torch.Tensor:
    """Return the whole optimizer state of these weights, float32 [weights, 3, elements]."""
    states = torch.zeros(len(weights), len(KINDS), like.numel(), dtype=torch.float32, device=like.device)
    for state, weight in zip(states, weights, strict=True):
        held, covered = _held(weight, optimizers)
        for whole, part in zip(state, held, strict=bool(held)):
            whole[covered] = part.view(-1)
    if weights and isinstance(optimizer := _of(like, optimizers), DistributedOptimizer):
        # Each rank fills in some of the elements; the others are zeros. The sum of integers is exact, also for -0.0.
        dist.all_reduce(states.view(torch.int32), group=optimizer.data_parallel_group)
    return states


def _held(weight: torch.Tensor, optimizers: list[MegatronOptimizer]) -> tuple[list[torch.Tensor], slice]:
    """Return this rank's optimizer state of a weight, in the order of `KINDS`, and the range of elements that it
    covers. Both are empty if this rank's optimizer holds no part of the weight."""
    optimizer = _of(weight, optimizers)
    if not isinstance(optimizer, DistributedOptimizer):
        main = getattr(weight, "main_param", weight)
        state = {"param": main, **optimizer.optimizer.state[main]}
        return [state[name] for name in KINDS], slice(0, weight.numel())
    if weight not in optimizer.model_param_gbuf_map:
        return [], slice(0, 0)
    ranges = optimizer._get_model_param_range_map(weight)
    state = optimizer._get_main_param_and_optimizer_states(weight)
    return [state[name] for name in KINDS], slice(ranges["param"].start, ranges["param"].end)


def _of(weight: torch.Tensor, optimizers: list[MegatronOptimizer]) -> MegatronOptimizer:
    """Return the optimizer that updates a weight."""
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            mine = any(weight in buffer.param_index_map for buffer in optimizer.buffers)
        else:
            mine = getattr(weight, "main_param", weight) in optimizer.optimizer.state
        if mine:
            return optimizer
    raise KeyError("no optimizer updates this weight")
