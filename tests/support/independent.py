"""Runs a checkpoint in `transformers`, float32: the independent model that engines and ranks are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_rl.models.hf import ModelFacts, read_model
from moe_rl.proof.batch import batch
from moe_rl.proof.reference import reference
from tests.support.near_ties import ROWS, Computed, clear_rows, gaps_of

BIAS = "e_score_correction_bias"


@dataclass(frozen=True, eq=False)
class Seen(Computed):
    """Holds what `transformers` computed.

    Attributes:
        routers: Router logits float32 [T, L, E].
        logits: Logits of each row's next token, [T, V].
    """

    routers: np.ndarray
    logits: torch.Tensor


class Independent:
    """Runs the model of a checkpoint of any family on one sequence at a time."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.facts = read_model(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._biases = []
        # What the last pass gave: router logits [T, E] and chosen experts [T, K] of each layer.
        self._layers: list[tuple[torch.Tensor, ...]] = [()] * len(self.facts.moe_layers)
        for at, layer in enumerate(self.facts.moe_layers):
            mlp = self.model.model.layers[layer].mlp
            gate = mlp.gate if hasattr(mlp, "gate") else mlp.router
            gate.register_forward_hook(lambda gate, inputs, output, at=at: self._look(at, output))
            self._biases.append(getattr(gate, BIAS, None))

    def _look(self, at: int, output) -> None:
        logits, _, chosen = output
        self._layers[at] = logits, chosen.sort(-1).values

    def __call__(self, tokens, *, temperature: float = 1.0) -> Seen:
        """Return what the model computes for all tokens of a sequence but the last.

        Args:
            temperature: Divides the logits before the log-probabilities.
        """
        return self.continued(self, 0, tokens, temperature=temperature)

    @torch.no_grad()
    def continued(self, before: Independent, rows: int, tokens, *, temperature: float = 1.0) -> Seen:
        """Return the same for a sequence whose first `rows` rows the model `before` computes. This one goes on with its
        keys and values."""
        from transformers import DynamicCache

        fed, seen = torch.tensor([list(tokens)[:-1]]), []
        cache = {"past_key_values": DynamicCache(), "use_cache": True} if rows else {"use_cache": False}
        for model, part in ((before, fed[:, :rows]), (self, fed[:, rows:])):
            if part.shape[1]:
                logits = model.model(part, **cache).logits[0]
                routers, chosen = (torch.stack(layers, 1) for layers in zip(*model._layers, strict=True))
                seen.append((routers, chosen, model._gaps(routers), logits))
        routers, chosen, gaps, logits = (torch.cat(parts) for parts in zip(*seen, strict=True))
        logprobs = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return Seen(chosen.numpy(), gaps.numpy(), logprobs.numpy(), routers.numpy(), logits)

    def _gaps(self, routers: torch.Tensor) -> torch.Tensor:
        each = [choice_gaps(self.facts, one, bias) for one, bias in zip(routers.unbind(1), self._biases, strict=True)]
        return torch.from_numpy(np.stack(each, 1))


def clear_checkpoint(make: Callable[[int], Path], seed: int) -> Path:
    """Make a model that computes the batch of a proof without a near tie, under its own choice and under the batch's
    routes. It is for what is summed over the batch, of which no row can be left out.

    Rows of models with a near tie are counted as left out; one of three models must have none.

    Args:
        make: Makes the checkpoint of a seed.
    """
    for again in range(3):
        folder = make(seed + 1000 * again)
        facts = read_model(folder)
        sequences, routes = batch(facts)
        free = Independent(folder)
        gaps = [free(one.prompt_token_ids + one.token_ids).gaps for one in sequences]
        # Under given routes a model chooses only for the loss that balances its experts: by the scores as they are.
        gaps += [gaps_of(one, facts.top_k) for one in reference(folder, routes).routers.values()]
        if sum(len(one) for one in gaps) == sum(map(clear_rows, gaps)):
            return folder
        ROWS.left_out = ROWS.computed
    raise AssertionError("three models in a row have near ties")


def choice_gaps(facts: ModelFacts, logits: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    """Return the gaps [T] of a layer's choice: that of its last expert, or of its last group, if that is smaller.

    Args:
        logits: Router logits [T, E].
        bias: What a family adds to its scores before it chooses, [E].
    """
    scores = logits if bias is None else logits.sigmoid() + bias
    if facts.groups == 1:
        return gaps_of(scores, facts.top_k)
    by_group = scores.view(len(scores), facts.groups, -1)
    groups = by_group.topk(2, -1).values.sum(-1)
    best = groups.topk(facts.top_groups, -1).indices
    allowed = torch.zeros_like(groups, dtype=torch.bool).scatter(1, best, True)
    within = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    return np.minimum(gaps_of(within, facts.top_k), gaps_of(groups, facts.top_groups))
