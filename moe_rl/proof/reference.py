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


def reference(
    checkpoint: Path, routes: list[np.ndarray] | None, *, aux: float = 0.0, microbatches: Iterable[Seq[int]] = ()
) -> Reference:
    """Compute logprobs and the gradients of the loss

        - sum over sequences and completion tokens of reward * logprob / number of sequences  +  aux * imbalance

    Args:
        routes: One array [T, L, K] per sequence, the experts that every token takes; None means the model's own choice.
        microbatches: The sequences of each microbatch. The imbalance is computed per microbatch.
    """
    quiet()
    from transformers import AutoModelForCausalLM

    facts = read_model(checkpoint)
    # transformers has no sdpa attention with sinks.
    attention = "eager" if facts.sinks else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation=attention)
    sequences, _ = batch(facts)
    current: dict[str, Any] = {}
    topk = torch.topk

    def choose(scores, k, *args, **kwargs):
        """Replace torch.topk within a router. The top-k among experts, not among groups, is recognised by its width."""
        if routes is None or scores.shape[-1] != facts.num_experts:
            return topk(scores, k, *args, **kwargs)
        chosen = current["routes"][:, current["column"]]
        return scores.gather(1, chosen), chosen

    def forced_gate(gate, column):
        forward = gate.forward

        def run(hidden):
            current["column"], torch.topk = column, choose
            try:
                output = forward(hidden)
            finally:
                torch.topk = topk
            logits[current["number"], column] = output[0]
            return output

        return run

    mlps = [model.model.layers[layer].mlp for layer in facts.moe_layers]
    gates = [mlp.gate if hasattr(mlp, "gate") else mlp.router for mlp in mlps]
    for column, gate in enumerate(gates):
        gate.forward = forced_gate(gate, column)
    logprobs: dict[int, torch.Tensor] = {}
    logits: dict[tuple[int, int], torch.Tensor] = {}
    loss = imbalance = torch.zeros(())
    for number, sequence in enumerate(sequences):
        tokens = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        current["number"] = number
        if routes is not None:
            current["routes"] = torch.from_numpy(routes[number].astype(np.int64))
        predicted = model(tokens[:, :-1]).logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        predicted = predicted[len(sequence.prompt_token_ids) - 1 :]
        loss = loss - (predicted * sequence.reward).sum() / len(sequences)
        logprobs[number] = predicted.detach()
    everything = sum(sequence.forwarded for sequence in sequences)
    for numbers in microbatches:
        for column in range(len(gates)):
            together = torch.cat([logits[number, column] for number in numbers])
            imbalance = imbalance + len(together) / everything * _imbalance(facts, together)
    (loss + aux * imbalance).backward()
    routers = {
        number: torch.stack([logits[number, column].detach() for column in range(len(gates))], 1)
        for number in range(len(sequences))
    }
    gradients = dict(_published(model, expected_tensors(facts)))
    return Reference(logprobs, gradients, float(imbalance.detach()) / len(gates), routers)


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
            for expert, both in enumerate(parameter.grad):
                gate, up = both.chunk(2, 0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            yield from ((f"{prefix}.{expert}.down_proj.weight", one) for expert, one in enumerate(parameter.grad))
