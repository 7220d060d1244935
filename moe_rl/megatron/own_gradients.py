"""Notes what a rank's own gradients are, before they are summed over the ranks.

After the sum, a value that is not finite on one rank is so on all, and a lost part cannot be told any more. With
`overlap_grad_reduce` Megatron sums a group of buckets as soon as its gradients are there, while the backward pass goes
on. So each group notes its own right before its sum begins, whenever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_rl.errors import ReplayError
from moe_rl.megatron import router_gradients, world


class OwnGradients:
    """Notes the gradients of this rank's part of a chunk, in each update anew.

    Attributes:
        routers: What `router_gradients.check` needs of them, float64 [L, 3] for the L MoE layers of the chunk.
    """

    def __init__(self, chunk: DistributedDataParallel, layers: Seq[TransformerLayer]):
        self._groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        self._finite = torch.ones(len(self._groups), dtype=torch.bool, device=world.device())
        self.routers = torch.zeros(len(layers), 3, dtype=torch.float64, device=world.device())
        for number, group in enumerate(self._groups):
            noted = [
                (self.routers[row, part : part + 1], measure, parameter)
                for row, layer in enumerate(layers)
                for part, (measure, parameter) in enumerate(router_gradients.parts(layer))
                if parameter in group.params
            ]
            group.start_grad_sync = partial(self._note, number, noted, group.start_grad_sync)

    def _note(self, number: int, noted: Seq, begin: Callable, *given: Any, **options: Any) -> None:
        buckets = self._groups[number].buckets
        ends = torch.stack([end for bucket in buckets for end in torch.aminmax(bucket.grad_data)])
        self._finite[number] = ends.isfinite().all()
        for place, measure, parameter in noted:
            place.copy_(measure(parameter))
        begin(*given, **options)

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
