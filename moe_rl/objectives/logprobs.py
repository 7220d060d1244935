"""Logprobs of given tokens from logits, without ever holding a float32 copy of all logits.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_rl.errors import describe

# Elements of logits worked on at a time: 64 MiB in float32. Rows are independent, so it changes no result.
_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[t, targets[t]] -> [T] float32 (float64 for float64 logits), natural log.

    logits [T, V]: any floating dtype, the whole vocabulary on this rank. targets [T]: int64 in 0..V-1.
    The softmax is computed in float32 chunk by chunk over T, and again in the backward pass, which yields gradients in
    the logits' dtype: beyond the logits and their gradient, memory is a few chunks. Differentiable once, in logits.
    Raises TypeError or ValueError for wrong dtypes, shapes or temperature.
    """
    if not logits.is_floating_point() or targets.dtype != torch.int64:
        raise TypeError(describe("wrong dtypes for token logprobs",
                                 got=f"logits {logits.dtype}, targets {targets.dtype}",
                                 expected="floating-point logits, int64 targets", do="convert the targets"))
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(describe("logits and targets do not belong together",
                                  got=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
                                  expected="[T, V] and [T]", do="flatten batch and positions, then cut both alike"))
    if not 0 < temperature < float("inf"):
        raise ValueError(describe("the temperature must be positive and finite", got=temperature, expected="> 0",
                                  do="use the temperature that the tokens were sampled at"))
    return _TokenLogprobs.apply(logits, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """Saves the logits themselves (which autograd holds anyway) instead of the float32 softmax of every chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        result = logits.new_empty(targets.shape, dtype=_working_dtype(logits))
        for rows in _chunks(logits):
            scaled = logits[rows].to(result.dtype) / temperature
            result[rows] = scaled.log_softmax(-1).gather(1, targets[rows, None])[:, 0]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            # d logp_t / d logit_v = (1[v = target] - softmax_v) / temperature
            scale = (grad[rows] / ctx.temperature)[:, None]
            scaled = logits[rows].to(grad.dtype) / ctx.temperature
            chunk = scaled.softmax(-1).mul_(-scale)
            grad_logits[rows] = chunk.scatter_add_(1, targets[rows, None], scale).to(logits.dtype)
        return grad_logits, None, None


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)
