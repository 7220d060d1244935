"""Computes the independent reference: `transformers` in one process and float32. Only the choice of experts is
replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from moe_rl.errors import DataError, first_of
from moe_rl.models.hf import ModelFacts, expected_tensors, read_model
from moe_rl.proof.batch import batch, quiet


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Holds the results of the reference.

    Attributes:
        logprobs: {sequence: [N]}, of the completions.
        gradients: {Hugging Face name: tensor}.
        imbalance: Load-balancing loss without its coefficient, mean over the layers.
        routers: {sequence: router logits [T, L, E]}.
    """

    logprobs: dict[int, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    imbalance: float
    routers: dict[int, torch.Tensor]


class IndependentModel:
    """Runs a checkpoint in `transformers`, one sequence at a time. Its routers choose for themselves, or take given
    experts.

    Attributes:
        biases: What each MoE layer adds to its scores before it chooses, [E]; None where a family has none.
        routers: Logits of each MoE layer's router in the last pass, [T, E].
    """

    def __init__(self, checkpoint: Path, *, weights: torch.dtype | None = None, dtype: torch.dtype = torch.float32):
        """Args: `weights` is the precision that parameters are rounded to first, and `dtype` that of the passes."""
        quiet()
        from transformers import AutoModelForCausalLM

        self.facts = read_model(checkpoint)
        # transformers has no sdpa attention with sinks.
        attention = "eager" if self.facts.sinks else "sdpa"
        try:
            self.model, loaded = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
            )
        except (SafetensorError, OSError) as error:
            raise DataError("weights cannot be read", where={"folder": checkpoint}, got=error) from error
        if missing := sorted(loaded["missing_keys"]):
            raise DataError("weights are missing", where={"folder": checkpoint}, got=first_of(missing))
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(weights or dtype).to(dtype)
        self.routers: list[torch.Tensor] = [torch.empty(0)] * len(self.facts.moe_layers)
        self.biases: list[torch.Tensor | None] = []
        self._routes: torch.Tensor | None = None
        self._topk = torch.topk
        for column, layer in enumerate(self.facts.moe_layers):
            mlp = self.model.model.layers[layer].mlp
            gate = mlp.gate if hasattr(mlp, "gate") else mlp.router
            gate.forward = self._watched(gate, column)
            self.biases.append(getattr(gate, "e_score_correction_bias", None))

    def __call__(self, tokens: Seq[int] | np.ndarray, routes: np.ndarray | None = None) -> torch.Tensor:
        """Return the logits [T, V] of what follows each token.

        Args:
            tokens: [T].
            routes: [T, L, K], the experts that every token takes. Where one of these is no expert's number, and with
                None, the routers choose.
        """
        return self.model.lm_head(self.hidden(tokens, routes))

    def hidden(
        self, tokens: Seq[int] | np.ndarray, routes: np.ndarray | None = None, cache: Any = None
    ) -> torch.Tensor:
        """Return the last hidden states [T, H], from which the output matrix makes the logits.

        Args:
            tokens, routes: As above.
            cache: Keys and values of earlier tokens, a `transformers` Cache; those of these tokens are added to it.
        """
        self._routes = None if routes is None else torch.from_numpy(routes.astype(np.int64))
        options = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        return self.model.model(torch.tensor([[*map(int, tokens)]]), **options).last_hidden_state[0]

    def _watched(self, gate, column):
        forward = gate.forward

        def choose(scores, k, *args, **kwargs):
            """Replace torch.topk within a router. The top-k among experts, not among groups, is recognised by its
            width."""
            native = self._topk(scores, k, *args, **kwargs)
            if self._routes is None or scores.shape[-1] != self.facts.num_experts:
                return native
            forced = self._routes[:, column]
            known = (forced < self.facts.num_experts).all(-1, keepdim=True)
            chosen = torch.where(known, forced, native[1])
            return scores.gather(1, chosen), chosen

        def run(hidden):
            torch.topk = choose
            try:
                output = forward(hidden)
            finally:
                torch.topk = self._topk
            self.routers[column] = output[0]
            return output

        return run


def reference(
    checkpoint: Path,
    routes: list[np.ndarray] | None,
    *,
    aux: float = 0.0,
    microbatches: Iterable[Seq[int]] = (),
    dtype: torch.dtype = torch.float32,
) -> Reference:
    """Compute logprobs and the gradients of the loss

        - sum over sequences and completion tokens of reward * logprob / number of sequences  +  aux * imbalance

    Args:
        routes: One array [T, L, K] per sequence, the experts that every token takes; None means the model's own choice.
        microbatches: The sequences of each microbatch. The imbalance is computed per microbatch.
        dtype: Of the model and its passes.
    """
    model = IndependentModel(checkpoint, dtype=dtype)
    facts = model.facts
    sequences, _ = batch(facts)
    logprobs: dict[int, torch.Tensor] = {}
    logits: dict[int, list[torch.Tensor]] = {}
    loss = imbalance = torch.zeros(())
    for number, sequence in enumerate(sequences):
        tokens = torch.tensor(sequence.prompt_token_ids + sequence.token_ids)
        scores = model(tokens[:-1].numpy(), None if routes is None else routes[number])
        logits[number] = list(model.routers)
        predicted = scores.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        predicted = predicted[len(sequence.prompt_token_ids) - 1 :]
        loss = loss - (predicted * sequence.reward).sum() / len(sequences)
        logprobs[number] = predicted.detach()
    everything = sum(sequence.forwarded for sequence in sequences)
    for numbers in microbatches:
        for column in range(len(facts.moe_layers)):
            together = torch.cat([logits[number][column] for number in numbers])
            imbalance = imbalance + len(together) / everything * _imbalance(facts, together)
    (loss + aux * imbalance).backward()
    routers = {number: torch.stack([layer.detach() for layer in layers], 1) for number, layers in logits.items()}
    gradients = dict(_published(model.model, expected_tensors(facts)))
    return Reference(logprobs, gradients, float(imbalance.detach()) / len(facts.moe_layers), routers)


def _imbalance(facts: ModelFacts, logits: torch.Tensor) -> torch.Tensor:
    """Return the imbalance of one microbatch in a layer: E / K * sum over experts of token fraction times mean
    score."""
    scores = logits.softmax(-1) if facts.score_function == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    chosen = logits.topk(facts.top_k, -1).indices.flatten().bincount(minlength=facts.num_experts)
    return (chosen / len(logits) * scores.mean(0)).sum() * facts.num_experts / facts.top_k


def _published(model: torch.nn.Module, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield gradients under the names of published checkpoints, most of which have separate tensors per expert."""
    for name, parameter in model.named_parameters():
        prefix = name.rsplit(".", 1)[0]
        if name in names:
            yield name, parameter.grad
        elif name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(parameter.grad):
                gate, up = gate_up.chunk(2, 0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            yield from ((f"{prefix}.{expert}.down_proj.weight", down) for expert, down in enumerate(parameter.grad))
