"""Counts the bytes of the logits and of what the loss makes of them, forward and backward, without computing them."""

from __future__ import annotations

import torch
from live_bytes import LiveBytes
from scale_parts.target import Target

from moe_rl.objectives import logprobs


def measured(target: Target) -> dict[str, float]:
    """Return the GiB that a microbatch of full size adds on a rank of the last stage, where all its tokens are scored.

    Tensors of the device `meta` have sizes and no values, so the size is the real one.
    """
    parallel, facts = target.config.parallel, target.facts
    rows, vocabulary = target.config.train.microbatch_tokens // parallel.context, facts.vocab // parallel.tensor
    with torch.device("meta"):
        hidden = torch.empty(rows, facts.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        matrix = torch.empty(vocabulary, facts.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        places, targets = (torch.empty(rows, dtype=torch.int64) for _ in range(2))
    with LiveBytes() as counter:
        if hasattr(logprobs, "hidden_scores"):
            scores = logprobs.hidden_scores(hidden, matrix, places, targets, 1.0)
        else:  # Megatron's output layer and its wrapper, which makes every output float32
            logits = torch.nn.functional.linear(hidden, matrix).float()
            scores = logprobs.token_scores(logits.index_select(0, places), targets, 1.0)
            del logits
        scores.sum().backward()
    return {"logits_gib": counter.peak / 2**30}
