"""Computes logprobs of given tokens, and entropies, from full logits or one rank's part of the vocabulary.

No float32 copy of all logits is made.

Legend: T tokens, V vocabulary of this rank: all of it, or a part under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_rl.errors import describe

# Number of logits processed at a time: 64 MiB in float32. Rows are independent, so this changes no result.
_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    support: Support | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute log softmax(logits / temperature)[t, targets[t]] (natural logarithm).

    The softmax is computed in float32, chunk by chunk over T, and again in the backward pass. Beyond the logits and
    their gradient it needs memory for a few chunks. Differentiable once, with respect to the logits.

    Args:
        logits: [T, V], any floating dtype. Gradients have the same dtype.
        targets: [T] int64, ids of the whole vocabulary.
        support: the ids over which each token's softmax is taken; other logits get no gradient. None: the whole
            vocabulary.
        group: the ranks that share the vocabulary. Rank r holds the ids r V .. r V + V - 1, and all ranks pass the same
            targets and support. All get the same result. Each gets the gradient of its part, provided that all compute
            the same loss. None: this rank holds the whole vocabulary.

    Returns:
        [T] float32, or float64 for float64 logits.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape or the temperature is wrong.
    """
    _check(logits, targets, temperature, support)
    return _TokenLogprobs.apply(logits, targets, temperature, support, _several(group), False)[0]


def token_logprobs_and_entropies(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    support: Support | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` and the entropy of each token's distribution: H_t = -sum_v p_v log p_v, [T], in nats.

    p = softmax(logits / temperature) over the token's support. Gradient of H_t: -p_v (log p_v + H_t) / temperature.
    """
    _check(logits, targets, temperature, support)
    return _TokenLogprobs.apply(logits, targets, temperature, support, _several(group), True)


class _TokenLogprobs(torch.autograd.Function):
    """Saves the logits, which autograd keeps anyway, instead of the float32 softmax of every chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        support: Support | None,
        group: dist.ProcessGroup | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        own, local = _own(targets, logits.shape[1], group)
        # Per token: logprob and entropy, summed over the ranks; the largest logit; the log of the sum of exp(logit -
        # largest).
        result = logits.new_zeros((2 if entropy else 1, len(targets)), dtype=_working_dtype(logits))
        shift: Any = result.new_empty((2, len(targets))) if group is not None else None
        for rows in _chunks(logits):
            scaled = _scaled(logits, rows, result.dtype, temperature, support, group)
            if shift is None:
                logprobs = scaled.log_softmax(-1)
            else:
                shift[:, rows] = torch.stack(_shift(scaled, group))
                logprobs = _shifted(scaled, shift[:, rows])
            result[0, rows] = logprobs.gather(1, local[rows, None])[:, 0]
            if entropy:
                result[1, rows] = torch.special.entr(logprobs.exp_()).sum(-1)
        if group is not None:
            result[0].masked_fill_(~own, 0.0)
            dist.all_reduce(result, group=group)
        entropies = result[1] if entropy else None
        ctx.save_for_backward(logits, targets, shift, entropies)
        ctx.temperature, ctx.support, ctx.group = temperature, support, group
        ctx.set_materialize_grads(False)
        return result[0], entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, shift, entropies = ctx.saved_tensors
        if grad is None and grad_entropy is None:
            return (None,) * 6
        own, local = _own(targets, logits.shape[1], ctx.group)
        of_token = torch.zeros_like(grad_entropy) if grad is None else grad / ctx.temperature
        of_all = of_token
        if grad_entropy is not None:
            of_entropy = grad_entropy / ctx.temperature
            of_all = of_token + of_entropy * entropies
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            # d logp_t / d logit_v = (1[v = target] - p_v) / temperature. `token_logprobs_and_entropies` gives the
            # gradient of H_t.
            scaled = _scaled(logits, rows, of_all.dtype, ctx.temperature, ctx.support, ctx.group)
            p = scaled.softmax(-1) if shift is None else _shifted(scaled, shift[:, rows]).exp_()
            chunk = p * -of_all[rows, None]
            if grad_entropy is not None:
                chunk.addcmul_(torch.special.entr(p), of_entropy[rows, None])
            ours = torch.where(own[rows], of_token[rows], 0.0)
            grad_logits[rows] = chunk.scatter_add_(1, local[rows, None], ours[:, None]).to(logits.dtype)
        return grad_logits, None, None, None, None, None


def _scaled(
    logits: Tensor,
    rows: slice,
    dtype: torch.dtype,
    temperature: float,
    support: Support | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return a chunk of logits in the working dtype, divided by the temperature, with -inf outside the support."""
    scaled = logits[rows].to(dtype) / temperature
    if support is not None:
        size = logits.shape[1]
        scaled.masked_fill_(support.removed(rows, size * _rank(group), size), -torch.inf)
    return scaled


def _shift(scaled: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return, over all parts of the vocabulary, the largest logit and the log of the sum of exp(logit - largest), each
    [T].
    """
    top = scaled.amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    total = (scaled - top[:, None]).exp_().sum(-1)
    dist.all_reduce(total, group=group)
    return top, total.log_()


def _shifted(scaled: Tensor, shift: Tensor) -> Tensor:
    # The order matters: with large logits, adding the two first would lose the differences between tokens.
    return (scaled - shift[0, :, None]).sub_(shift[1, :, None])


def _own(targets: Tensor, size: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return which targets lie in this rank's part of the vocabulary, and their index in it (arbitrary for the
    others).
    """
    if group is None:
        return torch.ones_like(targets, dtype=torch.bool), targets
    local = targets - size * _rank(group)
    return (local >= 0) & (local < size), local.clamp(0, size - 1)


def _several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return None for a group of one rank, which needs no collective."""
    return group if group is not None and group.size() > 1 else None


def _rank(group: dist.ProcessGroup | None) -> int:
    return group.rank() if group is not None else 0


def _check(logits: Tensor, targets: Tensor, temperature: float, support: Support | None) -> None:
    if not logits.is_floating_point() or targets.dtype != torch.int64:
        raise TypeError(
            describe(
                "wrong dtypes for token logprobs",
                got=f"logits {logits.dtype}, targets {targets.dtype}",
                expected="floating-point logits, int64 targets",
                do="convert the targets",
                fault="dtype",
            )
        )
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            describe(
                "logits and targets do not belong together",
                got=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
                expected="[T, V] and [T]",
                do="flatten batch and positions, then cut both alike",
                fault="shape",
            )
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(
            describe(
                "must be positive and finite",
                where={"argument": "temperature"},
                got=temperature,
                expected="> 0",
                do="use the temperature of the sampler",
            )
        )
    if support is not None and len(support) != len(targets):
        raise ValueError(
            describe(
                "not of these tokens",
                where={"argument": "support"},
                got=f"that of {len(support)} tokens",
                expected=len(targets),
                do="cut logits, targets and support to the same tokens",
            )
        )


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """Holds the ids from which each of T tokens was sampled, in a flat layout.

    Attributes:
        counts: [T] int64 on the device, the number of ids of each token. 0 means the whole vocabulary.
        ids: [sum of counts] int32 on the device, the ids of each token, one token after the other.
        starts: [T + 1] int64 on the host. The ids of token t are ids[starts[t]:starts[t + 1]].
    """

    counts: Tensor
    ids: Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, ids: np.ndarray, device: torch.device) -> Self:
        """Build a Support from counts [T] and ids [sum of counts], of any integer dtype."""
        counts = np.asarray(counts, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return cls(
            torch.from_numpy(counts).to(device), torch.from_numpy(np.asarray(ids).astype(np.int32)).to(device), starts
        )

    def __len__(self) -> int:
        return len(self.counts)

    def removed(self, rows: slice, first: int, size: int) -> Tensor:
        """Return bool [rows, size]: True where the id first + column is outside the token's support. Makes no host
        sync.
        """
        counts, begin = self.counts[rows], self.starts[rows.start]
        ids = self.ids[begin : self.starts[min(rows.stop, len(self))]].long() - first
        row = torch.repeat_interleave(counts, output_size=len(ids))
        # An extra column collects the ids of other parts of the vocabulary. Filtering them out would need a host sync.
        column = torch.where((ids >= 0) & (ids < size), ids, size)
        removed = (counts > 0)[:, None].repeat(1, size + 1)
        removed.view(-1).index_fill_(0, row * (size + 1) + column, False)
        return removed[:, :size]
