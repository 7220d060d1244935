"""The independent reference: `transformers`, one process, one sequence at a time, float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from moe_rl.config.hf import read_model
from moe_rl.proof.batch import batch


def reference(
    checkpoint: Path, routes: list[np.ndarray] | None
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities {sequence: [N]} of the completions and gradients {Hugging Face name: tensor} of the loss

        - sum over sequences and completion tokens of advantage * logprob / number of sequences

    routes: one array [T, L, K] for each sequence, the experts that every token takes; None: the model's own choice.
    """
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    sequences, _ = batch(read_model(checkpoint))
    current: list[torch.Tensor] = []

    def gate(self, hidden):
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        probs = torch.softmax(logits.float(), -1)
        chosen = probs.topk(self.top_k, -1)[1] if routes is None else current[0][:, self.number]
        weights = probs.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.number = number
        layer.mlp.gate.forward = gate.__get__(layer.mlp.gate)
    logprobs = {}
    for number, sequence in enumerate(sequences):
        tokens = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        current[:] = [] if routes is None else [torch.from_numpy(routes[number].astype("int64"))]
        predicted = model(tokens[:, :-1]).logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        predicted = predicted[len(sequence.prompt_token_ids) - 1 :]
        (-(predicted * sequence.advantage).sum() / len(sequences)).backward()
        logprobs[number] = predicted.detach()
    return logprobs, dict(_by_expert(model))


def _by_expert(model):
    """Gradients under the names of published checkpoints: `transformers` keeps the experts of a layer in one tensor."""
    for name, parameter in model.named_parameters():
        prefix = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                gate, up = both.chunk(2, 0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(parameter.grad):
                yield f"{prefix}.{expert}.down_proj.weight", one
        else:
            yield name, parameter.grad
