"""Checks that the routers' gradients come from all ranks: no rank lost its own part, and the sum over ranks has all
parts.

A router is small, and whole on every rank of a pipeline stage. If one rank's part of its gradient is lost, the run
continues, with a router that learns only from the other ranks. The ranks that work on the same sequences count as one
here: the last router may have no gradient on a rank that has only tokens of prompts.

Notes what a rank's own gradients are, before they are summed over the ranks.

After the sum, a value that is not finite on one rank is so on all, and a lost part cannot be told any more. With
`overlap_grad_reduce` Megatron sums a group of buckets as soon as its gradients are there, while the backward pass goes
on. So each group notes its own right before its sum begins, whenever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_rl.errors import ReplayError, first_of
from moe_rl.megatron import world


class OwnGradients:
    """Notes the gradients of this rank's part of a chunk, in each update anew.

    Attributes:
        routers: What `check` needs of them, float64 [L, 3] for the L MoE layers of the chunk.
    """

    def __init__(self, chunk: DistributedDataParallel, layers: Seq[TransformerLayer]):
        self._groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        self._finite = torch.ones(len(self._groups), dtype=torch.bool, device=world.device())
        self.routers = torch.zeros(len(layers), 3, dtype=torch.float64, device=world.device())
        for number, group in enumerate(self._groups):
            noted = [
                (self.routers[row, part : part + 1], measure, parameter)
                for row, layer in enumerate(layers)
                for part, (measure, parameter) in enumerate(parts(layer))
                if parameter in group.params
            ]
            group.start_grad_sync = partial(self._note, number, noted, group.start_grad_sync)

    def _note(self, number: int, noted: Seq, begin: Callable, *arguments: Any, **options: Any) -> None:
        buckets = self._groups[number].buckets
        ends = torch.stack([end for bucket in buckets for end in torch.aminmax(bucket.grad_data)])
        self._finite[number] = ends.isfinite().all()
        for place, measure, parameter in noted:
            place.copy_(measure(parameter))
        begin(*arguments, **options)

    @property
    def finite(self) -> torch.Tensor:
        """Return whether all of this rank's own gradients are finite, bool []."""
        return self._finite.all()

    def check_sums(self) -> None:
        """Raise ReplayError if a gradient came after the sum of its group had begun, or not at all. Call it after the
        sums, which Megatron begins when as many gradients are there as in the first update."""
        for group in self._groups:
            counts, expected = group.per_param_grad_ready_counts, group.golden_per_param_grad_ready_counts
            if not group.ddp_config.overlap_grad_reduce or counts == expected:
                continue
            if not group.is_first_batch or len(counts) != len(group.params):
                raise ReplayError(
                    "gradients were not all there when the ranks began to sum them",
                    got=f"{sum(counts.values())} from {len(counts)} parameters",
                    expected=f"{sum(expected.values())} as in the first update" if expected else len(group.params),
                    do="set train.megatron_optimizer.overlap_grad_reduce to false",
                )


# Rounding of float32 sums over ranks, relative to the gradients' norms. A lost part is as large as its norm.
_ROUNDING = 1e-3
# The same for sums in less precision, in steps of it. Rounded to the nearest, a sum is off by 0.15 along a direction.
_STEPS = 2


@lru_cache(maxsize=4)
def _direction(size: int, device: torch.device) -> torch.Tensor:
    """Return a fixed direction [size], random because the gradients of a router add up to 0 over its experts."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device)


def parts(layer: TransformerLayer) -> list[tuple[Callable[[torch.nn.Parameter], torch.Tensor], torch.nn.Parameter]]:
    """Return what `check` needs of a rank's own gradients of a MoE layer, before the sum over ranks, as functions and
    the parameter that each measures: the component along a direction, the norm, and the norm of the gradient of the
    layer norm before the router."""
    router = layer.mlp.router.weight
    return [(partial(_along, optimizers=()), router), (_norm, router), (_norm, layer.pre_mlp_layernorm.weight)]


def _norm(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.main_grad.norm()


def check(
    all_layers: Seq[int],
    routers: Mapping[int, torch.nn.Parameter],
    own: torch.Tensor,
    optimizers: Seq[MegatronOptimizer],
    *,
    sequence_parallel: bool,
    summed_in: torch.dtype,
) -> None:
    """Compare the routers' gradients, summed over the ranks, with the ranks' own parts. All ranks call this together.

    Args:
        all_layers: Global numbers of all MoE layers of the model.
        routers: Weights of this rank's routers, by the global number of their layer.
        own: What `parts` measured of these before the sum, float64 [L, 3].
        summed_in: Precision in which the gradients are summed over the ranks.

    Raises:
        ReplayError: A router has no gradient on ranks whose experts have one, or the sum lacks a part. Raised on all
            ranks, naming the layers.
    """
    count, (share, shares) = len(all_layers), world.data_parallel()
    mine, norms, summed = (np.zeros(count) for _ in range(3))
    by_share = np.zeros((2, count, shares))  # norms of the routers' gradients, and of those before the routers
    after = torch.stack([_along(router, optimizers) for router in routers.values()]).tolist() if routers else []
    for layer, (along, norm, of_input), total in zip(routers, own.tolist(), after, strict=True):
        row = all_layers.index(layer)
        mine[row], norms[row], summed[row] = along, norm, total
        by_share[:, row, share] = norm, of_input
    reduced = np.array(world.all_reduce([*mine, *norms, *summed, *by_share.flatten()]))
    mine, norms, summed = reduced[: 3 * count].reshape(3, count)
    of_routers, of_inputs = reduced[3 * count :].reshape(2, count, shares)
    lost = (of_routers == 0) & (of_inputs > 0) & (of_routers > 0).any(1, keepdims=True)
    if lost.any():
        problems = [f"layer {all_layers[row]} on share {which} of {shares}" for row, which in np.argwhere(lost)]
        raise _lost(all_layers[int(np.argwhere(lost)[0, 0])], f"none: {first_of(problems)}", "one, as its experts have")
    copies = 1 if _distributed(optimizers) else parallel_state.get_data_parallel_world_size(True)
    if sequence_parallel:
        copies *= parallel_state.get_tensor_model_parallel_world_size()
    finite = np.isfinite(norms) & np.isfinite(summed)  # other values are reported when the update is skipped
    rounding = max(_ROUNDING, _STEPS * torch.finfo(summed_in).eps)
    wrong = np.flatnonzero(finite & ~(np.abs(summed - copies * mine) <= rounding * copies * norms))
    if len(wrong):
        problems = [f"layer {all_layers[row]}: {summed[row]:.4g} instead of {copies * mine[row]:.4g}" for row in wrong]
        raise _lost(all_layers[int(wrong[0])], first_of(problems), "the sum of what the ranks computed")


def _along(router: torch.nn.Parameter, optimizers: Seq[MegatronOptimizer]) -> torch.Tensor:
    """Return the component of a router's gradient along a fixed direction; with a distributed optimizer, of the slice
    that this rank updates."""
    gradient = router.main_grad.flatten()
    direction = _direction(len(gradient), gradient.device)
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            if router not in optimizer.model_param_gbuf_map:
                continue
            span = optimizer._get_model_param_range_map(router)["param"]
            mine = slice(span.start, span.end)
            return (gradient[mine].double() * direction[mine]).sum()
    if _distributed(optimizers):
        return gradient.new_zeros((), dtype=torch.float64)
    return (gradient.double() * direction).sum()


def _lost(layer: int, got: str, expected: str) -> ReplayError:
    return ReplayError(
        "a rank's part of a router's gradient is lost",
        where={"layer": layer},
        got=got,
        expected=expected,
        do="look for a hook or a collective that changes gradients of one rank; weights are as they were",
        fault="router gradient",
    )


def _distributed(optimizers: Seq[MegatronOptimizer]) -> bool:
    return any(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers)
