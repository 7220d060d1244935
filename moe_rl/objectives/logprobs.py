"""Computes logprobs of given tokens, and entropies, from full logits or one rank's part of the vocabulary, or from the
hidden states before the output matrix.

No float32 copy of all logits is made. From hidden states, even the logits are made only in chunks.

Legend: T tokens, V vocabulary of this rank: all of it, or a part under tensor parallelism, R rows of hidden states, H
their width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_rl.errors import ArgumentError, describe
from moe_rl.objectives.device import to_device
from moe_rl.types import LOGITS_AT_ONCE

# Number of logits processed at a time. Rows are independent, so this changes no logprob.
_CHUNK_ELEMENTS = LOGITS_AT_ONCE


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
        support: the ids over which each token's softmax is taken; other logits get no gradient. If one of these is NaN
            or inf, it still makes the token's values NaN. None: the whole vocabulary.
        group: the ranks that share the vocabulary. Rank r holds the ids r V .. r V + V - 1, and all ranks pass the same
            targets and support. All get the same result. Each gets the gradient of its part, provided that all compute
            the same loss. None: this rank holds the whole vocabulary.

    Returns:
        [T] float32, or float64 for float64 logits.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape or the temperature is wrong.
    """
    return token_scores(logits, targets, temperature, support=support, group=group)[0]


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
    logprobs, entropies = token_scores(logits, targets, temperature, entropy=True, support=support, group=group)
    return logprobs, entropies


def token_scores(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    others: Tensor | None = None,
    support: Support | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `token_logprobs`, and what else is requested, in one pass over the logits.

    Args:
        entropy: also compute `token_logprobs_and_entropies`.
        others: [T, K] int64, further ids at each token, to compute the logprobs of. An id outside the support has the
            logprob -inf, whose gradient must be 0.

    Returns:
        [1 + K + entropy, T]: the logprobs of the targets, those of the others, the entropies if requested.
    """
    _check(logits, targets, temperature, support, others)
    return _TokenScores.apply(logits, None, None, targets, temperature, support, _several(group), entropy, others)


def hidden_scores(
    hidden: Tensor,
    matrix: Tensor,
    places: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    others: Tensor | None = None,
    support: Support | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `token_scores` of the logits hidden[places] matrix^T, of which only one chunk exists at a time.

    The backward pass computes each chunk of logits again, and adds the gradients of the matrix in float32. Where the
    logits of all R rows fit into one chunk, they are made at once and kept: there is nothing to save, and a product of
    all rows rounds like Megatron's output layer.

    Args:
        hidden: [R, H]. Under tensor parallelism all ranks pass the same, and each gets the gradient of its part of the
            vocabulary, to be summed over the ranks.
        matrix: [V, H].
        places: [T] int64, the row of each token.
    """
    if len(hidden) * len(matrix) <= _CHUNK_ELEMENTS:
        logits = F.linear(hidden, matrix).index_select(0, places)
        return token_scores(logits, targets, temperature, entropy=entropy, others=others, support=support, group=group)
    _check(hidden, targets, temperature, support, others, rows=places)
    return _TokenScores.apply(hidden, matrix, places, targets, temperature, support, _several(group), entropy, others)


class _TokenScores(torch.autograd.Function):
    """Saves the logits, which autograd keeps anyway, or what they are made from, instead of each chunk's softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        matrix: Tensor | None,
        places: Tensor | None,
        targets: Tensor,
        temperature: float,
        support: Support | None,
        group: dist.ProcessGroup | None,
        entropy: bool,
        others: Tensor | None,
    ) -> Tensor:
        ids = targets[:, None] if others is None else torch.cat((targets[:, None], others), 1)
        size = source.shape[1] if matrix is None else len(matrix)
        own, local = _own(ids, size, group)
        # Per token, summed over the ranks: logprobs, then the entropy.
        result = source.new_zeros((ids.shape[1] + entropy, len(targets)), dtype=_working_dtype(source))
        # Per token: the largest logit; the log of the sum of exp(logit - largest).
        shift: Any = result.new_empty((2, len(targets))) if group is not None else None
        # Per token: NaN if a logit outside its support is NaN or inf, else 0.
        hidden = result.new_zeros(len(targets))
        for rows in _chunks(len(targets), size):
            _, logits = _logits(source, matrix, places, rows)
            if support is not None:
                largest = logits.amax(-1).to(result.dtype).clamp(min=0)  # -inf is a logit of probability 0
                hidden[rows] = largest - largest
            scaled = _scaled(logits, rows, result.dtype, temperature, support, group)
            if shift is None:
                logprobs = scaled.log_softmax(-1)
            else:
                shift[:, rows] = torch.stack(_shift(scaled, group))
                logprobs = _shifted(scaled, shift[:, rows])
            result[: ids.shape[1], rows] = logprobs.gather(1, local[rows]).T
            if entropy:
                result[-1, rows] = torch.special.entr(logprobs.exp_()).sum(-1)
        if group is not None:
            result[: ids.shape[1]].masked_fill_(~own.T, 0.0)
        if support is not None:
            result += hidden
        if group is not None:
            dist.all_reduce(result, group=group)
        ctx.save_for_backward(source, matrix, places, ids, shift, result[-1] if entropy else None)
        ctx.temperature, ctx.support, ctx.group = temperature, support, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, matrix, places, ids, shift, entropies = ctx.saved_tensors
        size = source.shape[1] if matrix is None else len(matrix)
        own, local = _own(ids, size, ctx.group)
        scaled_grad = grad / ctx.temperature
        of_id = scaled_grad[: ids.shape[1]].T
        of_all = of_id.sum(1)
        if entropies is not None:
            of_all = of_all + scaled_grad[-1] * entropies
        grad_source = torch.empty_like(source) if matrix is None else torch.zeros_like(source)
        # A rank without a token has no chunk, and gives zeros too: Megatron refuses a parameter without a gradient.
        grad_matrix = torch.zeros_like(matrix, dtype=of_all.dtype) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(ids), size):
            # d logp_v / d logit_u = (1[u = v] - p_u) / temperature. `token_logprobs_and_entropies` gives the gradient
            # of H_t.
            hidden, logits = _logits(source, matrix, places, rows)
            scaled = _scaled(logits, rows, of_all.dtype, ctx.temperature, ctx.support, ctx.group)
            p = scaled.softmax(-1) if shift is None else _shifted(scaled, shift[:, rows]).exp_()
            chunk = p * -of_all[rows, None]
            if entropies is not None:
                chunk.addcmul_(torch.special.entr(p), scaled_grad[-1, rows, None])
            own_grad = torch.where(own[rows], of_id[rows], 0.0)
            grad_logits = chunk.scatter_add_(1, local[rows], own_grad).to(logits.dtype)
            if matrix is None:
                grad_source[rows] = grad_logits
                continue
            grad_source.index_copy_(0, places[rows], grad_logits @ matrix)
            if grad_matrix is not None:
                grad_matrix += grad_logits.t() @ hidden
        return grad_source, None if grad_matrix is None else grad_matrix.to(matrix.dtype), *[None] * 7


def _logits(source: Tensor, matrix: Tensor | None, places: Tensor | None, rows: slice) -> tuple[Tensor, Tensor]:
    """Return a chunk of the rows that logits are made from, and its logits."""
    if matrix is None or places is None:
        return source[rows], source[rows]
    hidden = source.index_select(0, places[rows])
    return hidden, F.linear(hidden, matrix)


def _scaled(
    logits: Tensor,
    rows: slice,
    dtype: torch.dtype,
    temperature: float,
    support: Support | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the logits of some rows in the working dtype, divided by the temperature, with -inf outside the
    support."""
    scaled = logits.to(dtype) / temperature
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
    """Return which targets are in this rank's part of the vocabulary, and their index in it (arbitrary for others)."""
    if group is None:
        return torch.ones_like(targets, dtype=torch.bool), targets
    local = targets - size * _rank(group)
    return (local >= 0) & (local < size), local.clamp(0, size - 1)


def _several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return None for a group of one rank, which needs no collective."""
    return group if group is not None and group.size() > 1 else None


def _rank(group: dist.ProcessGroup | None) -> int:
    return group.rank() if group is not None else 0


def _check(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    support: Support | None,
    others: Tensor | None,
    rows: Tensor | None = None,
) -> None:
    """Refuse arguments that do not fit. rows: the rows of logits of the targets; None means all."""
    if not logits.is_floating_point() or any(t is not None and t.dtype != torch.int64 for t in (targets, others)):
        raise TypeError(
            describe(
                "wrong dtypes for token logprobs",
                got=f"logits {logits.dtype}, targets {targets.dtype}",
                expected="floating-point logits, int64 targets",
                do="convert the targets",
                fault="dtype",
            )
        )
    if logits.ndim != 2 or targets.shape != (logits.shape[:1] if rows is None else rows.shape):
        raise ArgumentError(
            "logits and targets do not belong together",
            got=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
            expected="[T, V] and [T]",
            do="flatten batch and positions, then cut both alike",
            fault="shape",
        )
    if not 0 < temperature < float("inf"):
        raise ArgumentError(
            "must be positive and finite",
            where={"argument": "temperature"},
            got=temperature,
            expected="> 0",
            do="use the temperature of the sampler",
        )
    for name, of_tokens in (("support", support), ("others", others)):
        if of_tokens is not None and len(of_tokens) != len(targets):
            raise ArgumentError(
                "does not belong to these tokens",
                where={"argument": name},
                got=f"that of {len(of_tokens)} tokens",
                expected=len(targets),
                do=f"cut logits, targets and {name} to the same tokens",
            )


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(count: int, size: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, size))
    for start in range(0, count, step):
        yield slice(start, start + step)


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """Holds the ids from which each of T tokens was sampled, in a flat layout.

    Attributes:
        sets: [T] int64 on the host, the number of each token's set of ids.
        counts: [S] int64 on the device: n > 0 for a set that lists the n ids of the support, -n for one that lists the
            n ids outside it. 0 means the whole vocabulary.
        ids: int32 on the device, the listed ids of each set, one set after the other.
        starts: [S + 1] int64 on the host. The listed ids of set s are ids[starts[s]:starts[s + 1]].
    """

    sets: np.ndarray
    counts: Tensor
    ids: Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, sets: np.ndarray, counts: np.ndarray, ids: np.ndarray, device: torch.device) -> Support:
        """Build a Support from sets [T], counts [S] and the listed ids, of any integer dtype."""
        counts = np.asarray(counts, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.abs(counts))])
        ids = to_device(np.asarray(ids).astype(np.int32), device)
        return cls(np.asarray(sets, np.int64), to_device(counts, device), ids, starts)

    def __len__(self) -> int:
        return len(self.sets)

    def removed(self, rows: slice, first: int, size: int) -> Tensor:
        """Return bool [rows, size]: True where the id first + column is outside the token's support. Makes no host
        sync.
        """
        sets, place = np.unique(self.sets[rows], return_inverse=True)
        # Neighbouring sets are one slice: without a grammar nearly every token has its own set.
        runs = [(run[0], run[-1] + 1) for run in np.split(sets, np.flatnonzero(np.diff(sets) > 1) + 1)]
        counts = torch.cat([self.counts[begin:end] for begin, end in runs])
        ids = torch.cat([self.ids[self.starts[begin] : self.starts[end]] for begin, end in runs]).long() - first
        row = torch.repeat_interleave(counts.abs(), output_size=len(ids))
        # An extra column collects the ids of other parts of the vocabulary. Filtering them out would need a host sync.
        column = torch.where((ids >= 0) & (ids < size), ids, size)
        removed = (counts > 0)[:, None].repeat(1, size + 1)
        index = row * (size + 1) + column
        removed.view(-1).index_put_((index,), (counts < 0)[row])
        removed = removed[:, :size]
        if np.array_equal(place, np.arange(len(place))):  # each token has its own set: no copy is needed
            return removed
        return removed.index_select(0, to_device(place, counts.device))
