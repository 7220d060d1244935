"""Log-probabilities of the completion tokens from the model's logits, also where tensor-parallel ranks share the
vocabulary, and context-parallel ranks the tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from moe_rl.megatron.microbatch import Microbatch
from moe_rl.objectives.logprobs import token_logprobs


def completion_logprobs(microbatch: Microbatch, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N] float32 from this rank's logits [1, T, V / TP], for the completion tokens only; equal on TP and CP ranks.

    A loss computed from it alike on all of them gives each the gradient of its own part of the vocabulary and of its
    own tokens. With TP > 1 the float32 softmax [n, V / TP] is kept for the backward pass.
    """
    logits = logits[0].index_select(0, microbatch.predicts)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        values = token_logprobs(logits, microbatch.targets, temperature)
    else:
        # The division makes the copy that megatron's function is going to overwrite.
        values = -vocab_parallel_cross_entropy(logits.float() / temperature, microbatch.targets, tp_group=group)
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return _Gathered.apply(values, microbatch.predicted, len(microbatch.sequence_ids))


class _Gathered(torch.autograd.Function):
    """values [n] at `places` [n] of [total], whose other places the other context-parallel ranks fill."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, places: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(total).index_copy_(0, places, values)
        if total:  # zeros change no bit of what one rank has
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (places,) = ctx.saved_tensors
        # Not summed over the ranks: each computes the same loss and has the whole gradient.
        return gradient.index_select(0, places), None, None
