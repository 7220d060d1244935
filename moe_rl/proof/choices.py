"""Says how far a choice of experts is from the best one, by a router's scores.

Legend: T rows, E experts, G groups of them, K experts that a row takes.
"""

from __future__ import annotations

import torch

from moe_rl.models.hf import ModelFacts


def choice_scores(facts: ModelFacts, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the scores of which a router takes the best, float32 [T, E]: its logits, or their sigmoids with a bias.

    Args:
        logits: [T, E].
        bias: [E], for families that add one.
    """
    logits = logits.float()
    if facts.score_function == "softmax":
        return logits
    return logits.sigmoid() + (0.0 if bias is None else bias.float())


def regret(facts: ModelFacts, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return by how much the scores would have to change for a choice to be the best one, float32 [T].

    It is 0 for the best choice, small for a near tie, and infinite for experts of more groups than a row may take.

    Args:
        scores: [T, E].
        chosen: int64 [T, K], different experts.
    """
    taken = scores.gather(1, chosen).amin(-1)
    if facts.groups == 1:
        return scores.topk(facts.top_k, -1).values[:, -1] - taken
    by_group = scores.unflatten(1, (facts.groups, -1))
    values = by_group.topk(2, -1).values.sum(-1)  # [T, G], as in `of_best_groups` of the trainer's router
    used = torch.zeros_like(values, dtype=torch.bool).scatter(1, chosen // by_group.shape[-1], True)
    # Take the used groups first, then the best others up to the number of groups.
    order = values.masked_fill(used, torch.inf).topk(facts.top_groups, -1).indices
    allowed = torch.zeros_like(used).scatter(1, order, True)
    left = values.masked_fill(allowed, -torch.inf).amax(-1) - values.masked_fill(~allowed, torch.inf).amin(-1)
    within = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    best = within.topk(facts.top_k, -1).values[:, -1] - taken
    return torch.maximum(left, best).clamp(min=0).masked_fill(used.sum(-1) > facts.top_groups, torch.inf)
