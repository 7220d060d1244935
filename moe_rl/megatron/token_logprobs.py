"""Log-probabilities of the completion tokens from the model's logits, and entropies, also where tensor-parallel ranks
share the vocabulary, and context-parallel ranks the tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_rl.megatron.microbatch import Microbatch
from moe_rl.objectives.logprobs import token_logprobs, token_logprobs_and_entropies


def completion_logprobs(
    microbatch: Microbatch, logits: torch.Tensor, temperature: float, *, entropy: bool
) -> torch.Tensor:
    """[1, N] float32 from this rank's logits [1, T, V / TP], for the completion tokens only; equal on TP and CP ranks.

    entropy: [2, N], and the second row is the entropy of each token's distribution in nats. Both are over the token's
    support where the microbatch has one. A loss computed from it alike on all ranks gives each the gradient of its own
    part of the vocabulary and of its own tokens.
    """
    given = logits[0].index_select(0, microbatch.predicts), microbatch.targets, temperature
    where = {"support": microbatch.support, "group": parallel_state.get_tensor_model_parallel_group()}
    if entropy:
        values = torch.stack(token_logprobs_and_entropies(*given, **where))
    else:
        values = token_logprobs(*given, **where)[None]
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return _Gathered.apply(values, microbatch.predicted, len(microbatch.sequence_ids))


class _Gathered(torch.autograd.Function):
    """values [S, n] at `places` [n] of [S, total], whose other places the other context-parallel ranks fill."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, places: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(len(values), total).index_copy_(1, places, values)
        if total:  # zeros change no bit of what one rank has
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (places,) = ctx.saved_tensors
        # Not summed over the ranks: each computes the same loss and has the whole gradient.
        return gradient.index_select(1, places), None, None
