"""Gives, counts and sets the state of Adam that Megatron keeps in host memory (`optimizer_cpu_offload`).

Its HybridDeviceOptimizer holds the state of all parameters, and one Adam for each memory updates it in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def is_offloaded(optimizer: MegatronOptimizer) -> bool:
    """Return whether some of the optimizer's state may be in host memory."""
    return isinstance(optimizer.optimizer, HybridDeviceOptimizer)


@torch.no_grad()
def begin(optimizer: MegatronOptimizer) -> None:
    """Give Adam its moments, zeros, if it has made no step yet. Megatron's own way would take a step."""
    hybrid = optimizer.optimizer
    if not is_offloaded(optimizer):
        optimizer.init_state_fn(hybrid, optimizer.config)
        return
    for adam in hybrid.sub_optimizers:
        for values in (one for group in adam.param_groups for one in group["params"]):
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
    """Set the number of steps that an offloaded optimizer has made."""
    for adam in optimizer.optimizer.sub_optimizers:
        for group in adam.param_groups:
            if not isinstance(adam, torch.optim.AdamW):
                group["step"] = made
        for state in adam.state.values():
            if "step" in state:
                state["step"].fill_(made)
