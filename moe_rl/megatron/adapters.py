"""Implements the adapters of LoRA: beside a frozen matrix W, y = W x + alpha / rank * B A x (arXiv 2106.09685).

A Megatron parameter may hold several Hugging Face tensors: queries, keys and values, or gate and up. Each of these
tensors has an A and a B, as in `peft`. `lora.py` attaches adapters to a model, reads and writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor


class Adapter(torch.nn.Module):
    """Adds alpha / rank * B A x to what a linear layer returns for x.

    Ranks that share the matrix share the adapter. If they share its rows, each holds those rows of B, and all of A. If
    they share its columns, each holds those columns of A, and all of B. The experts of a layer may share A or B.

    Attributes:
        a: [tensors, rank, inputs], one A for each Hugging Face tensor in the matrix.
        b: [outputs, rank], rows as in the matrix; [2, outputs / 2, rank] for gate and up, so that a rank's rows of each
            are one range.
        on: Whether it adds anything. Off, the layer computes what the checkpoint does.
    """

    which: Tensor

    def __init__(
        self,
        matrix: torch.nn.Parameter,
        which: Tensor,
        rank: int,
        scale: float,
        axis: int | None,
        group,
        *,
        halves: bool,
    ):
        """Args:
        matrix: The frozen matrix, [outputs, inputs] on this rank. It gets the adapter as an attribute.
        which: int64 [outputs], the number of the tensor that each row belongs to.
        scale: alpha / rank.
        axis: The axis of the matrix that the ranks of `group` split; None if they do not split it.
        halves: Whether the matrix is gate above up.
        """
        super().__init__()
        (outputs, inputs), tensors = matrix.shape, int(which.max()) + 1
        self.scale, self.axis, self.group, self.on = scale, axis, group, True
        self.register_buffer("which", F.one_hot(which, tensors).to(matrix)[:, :, None], persistent=False)
        rows = (2, outputs // 2) if halves else (outputs,)
        self.a = torch.nn.Parameter(matrix.new_zeros(tensors, rank, inputs))
        self.b = torch.nn.Parameter(matrix.new_zeros(*rows, rank))
        for parameter, cut in ((self.a, axis == 1), (self.b, axis == 0)):
            parameter.allreduce = getattr(matrix, "allreduce", True)
            if cut:
                dim = 2 if parameter is self.a else int(halves)
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
        self._outer = ""
        matrix.adapter = self

    @property
    def outer(self) -> torch.nn.Parameter | None:
        """Return the one of A and B that all experts of the layer share; None if they share neither."""
        return getattr(self, self._outer) if self._outer else None

    def share(self, first: Adapter, sequence_parallel: bool) -> None:
        """Share the matrix that faces the layer's hidden states with the other experts of the layer.

        Each rank computes a part of its gradient: for the tokens of its own experts, and for its share of their
        matrices. The gradient is the sum over all ranks of the layer, which Megatron makes for dense parameters.

        Args:
            first: The adapter of this rank's first expert, which may be this one.
        """
        self._outer = "a" if self.axis == 0 else "b"
        setattr(self, self._outer, getattr(first, self._outer))
        outer = getattr(self, self._outer)
        outer.allreduce, outer.sequence_parallel = True, sequence_parallel

    def of_tokens(self, sequence_parallel: bool) -> None:
        """Mark what is whole on every rank for the sum over tensor-parallel ranks, each of which has other tokens."""
        for parameter in (self.a, self.b):
            parameter.sequence_parallel = sequence_parallel and not getattr(parameter, "tensor_model_parallel", False)

    @property
    def rows(self) -> Tensor:
        """Return B with rows as in the matrix, [outputs, rank]."""
        return self.b.flatten(0, -2)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the output, [tokens, 1, outputs], for inputs [tokens, 1, inputs] of a dense layer."""
        low = F.linear(x, self.a.flatten(0, 1))
        if self.axis == 0 and self.group.size() > 1:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
        elif self.axis == 1 and self.group.size() > 1:
            # Summed here, before B, which each rank applies to its own tokens. The sum over ranks that the layer makes
            # of its own output is made already, so B's product is counted once.
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return F.linear(low * self.scale, wide(self.rows[None], self.which)[0])

    def delta(self) -> Tensor:
        """Return alpha / rank * B A, float64 [outputs, inputs]."""
        rows = wide(self.rows[None], self.which)[0]
        return self.scale * (rows.double() @ self.a.flatten(0, 1).double())


def wide(rows: Tensor, which: Tensor) -> Tensor:
    """Return B [n, outputs, rank] as [n, outputs, tensors * rank], zero but for the columns of each row's tensor."""
    return rows if which.shape[1] == 1 else (rows[:, :, None] * which).flatten(2)


def add_to_output(layer: torch.nn.Module, given: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add what a dense layer's adapter returns: a forward hook of the layer."""
    adapter: Adapter = layer.lora
    return (output[0] + adapter(given[0]), output[1]) if adapter.on else output


def of_experts(adapters: Seq[Adapter]) -> tuple[float, Seq[Tensor], Seq[Tensor]]:
    """Return alpha / rank and the matrices of the experts' adapters: A [tensors * rank, inputs] and B [outputs, tensors
    * rank] of each.

    Ranks that share an expert's matrices compute with the same tokens. What is whole on them gets the sum of their
    gradients here; what all experts share gets it with the sum over all ranks.
    """
    first, count = adapters[0], len(adapters)
    downs = (
        first.a.expand(count, -1, -1, -1) if first._outer == "a" else torch.stack([adapter.a for adapter in adapters])
    )
    ups = first.b.expand(count, -1, -1) if first._outer == "b" else torch.stack([adapter.rows for adapter in adapters])
    if first.outer is None:
        if first.group.size() > 1 and first.axis == 0:
            downs = copy_to_tensor_model_parallel_region(downs, group=first.group)
        elif first.group.size() > 1:
            ups = copy_to_tensor_model_parallel_region(ups, group=first.group)
    return first.scale, downs.flatten(1, 2).unbind(), wide(ups, first.which).unbind()


@torch.no_grad()
def merged(parameter: Tensor) -> Tensor:
    """Return a parameter with its adapter merged into it, W + alpha / rank * B A, rounded once from float64.

    A parameter without an adapter, or with one that is off, is returned as it is.
    """
    adapter = getattr(parameter, "adapter", None)
    if adapter is None or not adapter.on:
        return parameter.data
    return (parameter.double() + adapter.delta()).to(parameter.dtype)


def adapters_of(models: Iterable[torch.nn.Module]) -> Iterator[Adapter]:
    """Yield the adapters of these models."""
    return (module for model in models for module in model.modules() if isinstance(module, Adapter))


@contextmanager
def without_adapters(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Compute and export the checkpoint's own weights until the context ends."""
    adapters = list(adapters_of(models))
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def is_replicated(parameter: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether several ranks of the group hold the same elements of an adapter's parameter."""
    return group.size() > 1 and not getattr(parameter, "tensor_model_parallel", False)
