"""Sends the weights of experts to their copies on other ranks, and gradients back.

A plan (`planning.copy_choice`) says which ranks compute some of an expert's rows. Right before the experts run, its
owner sends its weights there; in the backward pass the gradients of the copies come back, and the owner adds them to
its own. So an update sees one gradient of the expert, and a copy is neither a parameter nor in a checkpoint: it lives
from the forward pass of its microbatch and layer to the backward pass.

All ranks of a group exchange copies at the same place between the exchanges of rows, even those that send and receive
none. Rows pass through the exchange's node, so autograd runs its backward on every rank.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


def receive_copies(
    rows: torch.Tensor, copies: np.ndarray, matrices: list[list[torch.nn.Parameter]], group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Send the matrices of copied experts to their copies. All ranks of the group call this together.

    Args:
        rows: Rows that the experts compute.
        copies: int64 [P, c], see `ChunkPlan`.
        matrices: For each matrix of an expert, those of this rank's n experts.
        group: The P ranks.

    Returns:
        The rows, which the experts must use instead of the given ones, and for each matrix those of the copies on this
        rank, in the order of their slots.
    """
    exchange = _CopyExchange(copies, len(matrices[0]), group)
    by_expert = (matrix for of_expert in zip(*matrices, strict=True) for matrix in of_expert)
    rows, *received = _Copy.apply(rows, exchange, *by_expert)
    return rows, [received[kind :: len(matrices)] for kind in range(len(matrices))]


class _CopyExchange:
    """Sends weights of experts to their copies, and gradients back, among the ranks of a group.

    Args:
        copies: int64 [P, c], see `ChunkPlan`.
        own: n, the number of experts of a rank.
        group: The P ranks.
    """

    def __init__(self, copies: np.ndarray, own: int, group: dist.ProcessGroup):
        self.own, self._group, rank = own, group, group.rank()
        owner = np.where(copies >= 0, copies // own, -1)
        # My experts in the order in which I send them: by receiving rank, then by its slot for copies.
        self.sent = (copies[owner == rank] - rank * own).tolist()
        self._to = (owner == rank).sum(1).tolist()
        here = owner[rank]
        self._from = [int((here == other).sum()) for other in range(len(copies))]
        # Copies arrive ordered by owner. For each of my copies, in the order of my slots: its place among the arrivals.
        self.arrival = np.argsort(np.argsort(here[here >= 0], kind="stable"), kind="stable").tolist()

    def there(self, weights: torch.Tensor) -> torch.Tensor:
        """Send weights [copies sent, elements] to the copies; return [copies here, elements] by owner."""
        return self._all_to_all(weights, self._from, self._to)

    def back(self, gradients: torch.Tensor) -> torch.Tensor:
        """Send gradients back to the owners."""
        return self._all_to_all(gradients, self._to, self._from)

    def _all_to_all(self, rows: torch.Tensor, got: list[int], sent: list[int]) -> torch.Tensor:
        arrived = rows.new_empty(sum(got), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), got, sent, group=self._group)
        return arrived


class _Copy(torch.autograd.Function):
    """Returns the rows as they are, and the parameters of each copy on this rank, in the order of its slots."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, exchange: _CopyExchange, *parameters: torch.nn.Parameter):
        """Args: `parameters`, those of each of this rank's experts, expert by expert."""
        ctx.exchange, ctx.each = exchange, len(parameters) // exchange.own
        ctx.shapes = [parameter.shape for parameter in parameters[: ctx.each]]
        ctx.sizes = [shape.numel() for shape in ctx.shapes]
        sent = [parameters[expert * ctx.each :][: ctx.each] for expert in exchange.sent]
        arrived = exchange.there(_rows_of(sent, rows, ctx.sizes))
        copies = (_cut(arrived[place], ctx.sizes, ctx.shapes) for place in exchange.arrival)
        return rows.view_as(rows), *(weight for copy in copies for weight in copy)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, *of_copies: torch.Tensor):
        exchange, per_expert = ctx.exchange, ctx.each
        here = [of_copies[number * per_expert :][:per_expert] for number in np.argsort(exchange.arrival)]
        arrived = exchange.back(_rows_of(here, gradient, ctx.sizes))
        sums: list[torch.Tensor | None] = [None] * (exchange.own * per_expert)
        for expert, row in zip(exchange.sent, arrived, strict=True):
            for index, part in enumerate(_cut(row, ctx.sizes, ctx.shapes), expert * per_expert):
                held = sums[index]
                sums[index] = part if held is None else held + part
        return gradient, None, *sums


def _rows_of(experts: list[tuple[torch.Tensor, ...]], like: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the tensors of each expert as one row [experts, elements]."""
    dtype = experts[0][0].dtype if experts else like.dtype
    empty = like.new_empty(0, sum(sizes), dtype=dtype)
    return torch.cat([empty, *(torch.cat([part.reshape(-1) for part in expert])[None] for expert in experts)])


def _cut(row: torch.Tensor, sizes: list[int], shapes: list[torch.Size]) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
