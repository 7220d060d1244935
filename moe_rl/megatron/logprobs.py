"""Log-probabilities of the completion tokens from the model's logits, also where tensor-parallel ranks share the
vocabulary."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from moe_rl.megatron.microbatch import Microbatch
from moe_rl.objectives.logprobs import token_logprobs


def completion_logprobs(microbatch: Microbatch, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N] float32 from this rank's logits [1, T, V / TP], for the completion tokens only; equal on the TP ranks.

    A loss computed from it alike on all TP ranks gives each the gradient of its own part of the vocabulary. With
    TP > 1 the float32 softmax [N, V / TP] is kept for the backward pass.
    """
    logits = logits[0].index_select(0, microbatch.predicts)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return token_logprobs(logits, microbatch.targets, temperature)
    # The division makes the copy that megatron's function is going to overwrite.
    return -vocab_parallel_cross_entropy(logits.float() / temperature, microbatch.targets, tp_group=group)
