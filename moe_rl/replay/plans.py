"""Dispatch plans of microbatches whose routes are known: made once, taken by every layer's dispatcher in every pass.

Legend: M microbatches, L layers, R rows of this rank in one, K top-k, E experts, and the groups of ranks of
`planning.dispatch`: P expert-parallel ranks, T that share an expert's matrices, G = P x T, n experts on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moe_rl.planning.dispatch import DispatchGroup, count, send_order, splits
from moe_rl.replay.session import MicrobatchRoutes


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """How one microbatch goes through one layer's dispatcher. Everything but `entries` is known to the host.

    entries: int32 [R * K] on the device, see `send_order`. sent, got: rows to and from each of the P. gathered: int64
    [T]. received: int64 [G, n]. per_expert: int64 [n], where Megatron's experts look for it. See `Splits`. order: int64
    [E], the expert in each slot, as the plan takes them to lie.
    """

    entries: torch.Tensor
    order: np.ndarray
    sent: list[int]
    got: list[int]
    gathered: np.ndarray
    received: np.ndarray
    per_expert: torch.Tensor


def plan_dispatch(
    tables: list[MicrobatchRoutes],
    layers: tuple[int, ...],
    group: DispatchGroup,
    exchange: Callable[[np.ndarray], np.ndarray],
    order: np.ndarray,
) -> list[dict[int, LayerPlan] | None]:
    """Plans {layer: plan} of each microbatch. All ranks of a dispatch group call it together, for as many of them.

    None for a microbatch in which, on any rank of the group, a router chooses for rows without a route: nobody knows
    its counts beforehand, and Megatron's own dispatcher asks for them.

    exchange: int64 [M, L, E] of this rank -> [G, M, L, E] of all ranks of the group, in their order; called once, not
    at all for no microbatches. The routes come to the host in one copy, and go back to the device in one a microbatch.
    order: int64 [L, E], the expert in each slot.
    """
    if not tables:
        return []
    routes = _on_host(tables, layers)
    counts = np.stack([count(one, group.experts) for one in routes])
    counts[[table.native is not None for table in tables]] = -1
    everyone = exchange(counts)
    by_slot = np.take_along_axis(everyone, order.reshape(*[1] * (everyone.ndim - 2), *order.shape), -1)
    numbers, slots, plans = splits(by_slot, group), np.argsort(order, -1), []
    for m, table in enumerate(tables):
        if everyone[:, m].min() < 0:
            plans.append(None)
            continue
        device = table.routes[layers[0]].device
        entries = torch.from_numpy(send_order(routes[m], slots)).to(device)
        plans.append(
            {
                layer: LayerPlan(
                    entries=entries[at],
                    order=order[at],
                    sent=numbers.sent[m, at].tolist(),
                    got=numbers.got[m, at].tolist(),
                    gathered=numbers.gathered[m, at],
                    received=numbers.received[m, at],
                    per_expert=torch.from_numpy(numbers.per_expert[m, at]),
                )
                for at, layer in enumerate(layers)
            }
        )
    return plans


def peak_rows(plans: list[dict[int, LayerPlan] | None]) -> int:
    """The most rows that the experts of this rank get in a layer of a planned microbatch."""
    layers = (plan for planned in plans if planned is not None for plan in planned.values())
    return max((int(plan.received.sum()) for plan in layers), default=0)


def _on_host(tables: list[MicrobatchRoutes], layers: tuple[int, ...]) -> list[np.ndarray]:
    """[L, R, K] of each microbatch."""
    stacks = [torch.stack([table.routes[layer] for layer in layers]) for table in tables]
    whole = torch.cat([stack.flatten() for stack in stacks]).cpu().numpy()
    parts = np.split(whole, np.cumsum([stack.numel() for stack in stacks])[:-1])
    return [part.reshape(stack.shape) for part, stack in zip(parts, stacks, strict=True)]
