"""Where experts lie: moving them between expert-parallel ranks, and checkpoints that do not depend on it.

Everywhere outside of the dispatcher an expert has its logical number: in routes, routers, biases, Hugging Face names,
checkpoints. A dispatcher's `order` says which expert lies in which slot; the weights in that slot must be its. Both
change together, here.

Moved is what training has of an expert, bit for bit: the weights, and in float32 what the optimizer updates and Adam's
two moments. Where the distributed optimizer shares these among ranks with the same experts, they first put together
what leaves; then ranks send it to each other. One matrix of one layer after the other, so that a rank never holds more
than one matrix of each of a layer's experts that it had or gets besides its own.
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

# Experts one module each (SequentialMLP), and in one module (TransformerEngine's grouped linear).
_SLOT = re.compile(r"local_experts\.(\d+)\.|(\d+)$")
_KEPT = ("param", "exp_avg", "exp_avg_sq")


def expert_weights(moe: MoELayer) -> list[dict[str, torch.nn.Parameter]]:
    """{name in the expert, such as linear_fc1.weight: parameter} of each local slot."""
    found: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(moe.num_local_experts)]
    for name, parameter in moe.experts.named_parameters():
        slot = _SLOT.search(name)
        assert slot is not None  # both modules number the parameters of their experts
        found[int(slot[1] or slot[2])][name.replace(slot[0], "")] = parameter
    return found


@torch.no_grad()
def move(moe: MoELayer, order: np.ndarray, optimizers: list[MegatronOptimizer]) -> None:
    """Bring the experts of a layer, and the optimizers' state of them, into the slots that `order` int64 [E] says.

    All ranks that hold the layer's experts call it together, with the same order; Adam has its moments by then.
    """
    dispatcher, local, first = moe.token_dispatcher, moe.num_local_experts, moe.ep_group.rank() * moe.num_local_experts
    before, was, will = dispatcher.order, np.argsort(dispatcher.order), np.argsort(order)
    changed = [slot for slot in range(first, first + local) if before[slot] != order[slot]]
    # Either side goes by the other's rank and, of one rank, by the new slot.
    leaving = sorted((int(will[before[slot]]), slot) for slot in changed)
    arriving = sorted((int(was[order[slot]]) // local, slot) for slot in changed)
    sent = [sum(slot // local == rank for slot, _ in leaving) for rank in range(moe.ep_group.size())]
    got = [sum(source == rank for source, _ in arriving) for rank in range(moe.ep_group.size())]

    def exchanged(rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)  # as many come as go
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
            held, own = _held(weight, optimizers)
            for part, whole in zip(held, state, strict=bool(held)):
                part.copy_(whole[own].view_as(part))
    dispatcher.place(order)


@torch.no_grad()
def checksum(moe: MoELayer) -> torch.Tensor:
    """int64: a layer's weights under the logical numbers of the experts that the dispatcher takes them for, of all
    ranks that share its experts. Moving experts does not change it; weights in a slot of another expert do."""
    order, first = moe.token_dispatcher.order, moe.ep_group.rank() * moe.num_local_experts
    total = torch.zeros(1, dtype=torch.int64, device=next(moe.experts.parameters()).device)
    for slot, weights in enumerate(expert_weights(moe)):
        for number, name in enumerate(sorted(weights)):
            # A power of an odd number: distinct for distinct experts, and wrapped around like the sums.
            salt = pow(0x9E3779B97F4A7C15, len(weights) * int(order[first + slot]) + number + 1, 1 << 64)
            total += weights[name].reshape(-1).view(torch.int16).sum(dtype=torch.int64) * (salt - (salt >> 63 << 64))
    dist.all_reduce(total, group=moe.ep_group)
    return total


def relocated(entries: dict, order: np.ndarray, axis: int) -> dict:
    """A sharded state dict of experts, which counts slots along `axis`, with logical numbers there instead."""
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
    raise TypeError(f"experts have an entry {type(entry).__name__} in the sharded state dict")


def _weights(weights: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """[weights, elements]"""
    return torch.cat([like.new_empty(0, like.numel()), *(weight.view(1, -1) for weight in weights)])


def _state(weights: list[torch.Tensor], like: torch.Tensor, optimizers: list[MegatronOptimizer]) -> torch.Tensor:
    """float32 [weights, 3, elements]: what the optimizers keep of them, whole."""
    states = torch.zeros(len(weights), len(_KEPT), like.numel(), dtype=torch.float32, device=like.device)
    for state, weight in zip(states, weights, strict=True):
        held, own = _held(weight, optimizers)
        for whole, part in zip(state, held, strict=bool(held)):
            whole[own] = part.view(-1)
    if weights and isinstance(optimizer := _of(like, optimizers), DistributedOptimizer):
        # Each of its ranks has some of the elements, and zeros here. The sum of integers is exact, also for -0.0.
        dist.all_reduce(states.view(torch.int32), group=optimizer.data_parallel_group)
    return states


def _held(weight: torch.Tensor, optimizers: list[MegatronOptimizer]) -> tuple[list[torch.Tensor], slice]:
    """What this rank's optimizer has of a weight, in the order of `_KEPT`, and of which of its elements; or nothing."""
    optimizer = _of(weight, optimizers)
    if not isinstance(optimizer, DistributedOptimizer):
        main = getattr(weight, "main_param", weight)
        state = {"param": main, **optimizer.optimizer.state[main]}
        return [state[name] for name in _KEPT], slice(0, weight.numel())
    if weight not in optimizer.model_param_gbuf_map:
        return [], slice(0, 0)
    ranges = optimizer._get_model_param_range_map(weight)
    state = optimizer._get_main_param_and_optimizer_states(weight)
    return [state[name] for name in _KEPT], slice(ranges["param"].start, ranges["param"].end)


def _of(weight: torch.Tensor, optimizers: list[MegatronOptimizer]) -> MegatronOptimizer:
    """The optimizer that updates a weight."""
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            mine = any(weight in buffer.param_index_map for buffer in optimizer.buffers)
        else:
            mine = getattr(weight, "main_param", weight) in optimizer.optimizer.state
        if mine:
            return optimizer
    raise KeyError("no optimizer updates this weight")
