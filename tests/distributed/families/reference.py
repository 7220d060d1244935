"""The same batch through `transformers` in one process: its own code, only the choice of experts is replaced."""

from unittest import mock

import torch

from moe_rl.config.hf import read_model
from tests.distributed.families.data import batch


def compute(checkpoint, forced, aux=0.0, microbatches=()):
    """(logprobs {sequence: [N]}, gradients {name: tensor}) of a checkpoint, with the batch's routes or its own.

    aux: weight of the load-balancing loss, which is of the sequences that share a microbatch; its mean over the layers
    is then returned too.
    """
    from transformers import AutoModelForCausalLM

    facts = read_model(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    sequences, routes = batch(facts)
    current, topk = {}, torch.topk

    def choose(scores, k, *args, **kwargs):
        """Stands for torch.topk within a router; the one among experts is told from those among groups by its width."""
        if not forced or scores.shape[-1] != facts.num_experts:
            return topk(scores, k, *args, **kwargs)
        chosen = current["routes"][:, current["column"]]
        return scores.gather(1, chosen), chosen

    def forced_gate(gate, column):
        forward = gate.forward

        def run(hidden):
            current["column"] = column
            with mock.patch("torch.topk", choose):
                output = forward(hidden)
            logits[current["number"], column] = output[0]
            return output

        return run

    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    assert len(gates) == len(facts.moe_layers)
    for column, gate in enumerate(gates):
        gate.forward = forced_gate(gate, column)
    logprobs, logits, loss = {}, {}, 0.0
    for number, (sequence, table) in enumerate(zip(sequences, routes, strict=True)):
        tokens = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        current |= {"routes": torch.from_numpy(table.astype("int64")), "number": number}
        predicted = model(tokens[:, :-1]).logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        predicted = predicted[len(sequence.prompt_token_ids) - 1 :]
        loss = loss - (predicted * sequence.advantage).sum() / len(sequences)
        logprobs[number] = predicted.detach()
    everything = sum(sequence.forwarded for sequence in sequences)
    imbalance = 0.0
    for numbers in microbatches:
        for column in range(len(gates)):
            together = torch.cat([logits[number, column] for number in numbers])
            imbalance = imbalance + len(together) / everything * _imbalance(facts, together)
    (loss + aux * imbalance).backward()
    gradients = dict(_published(model))
    return (logprobs, gradients, imbalance.item() / len(gates)) if aux else (logprobs, gradients)


def _imbalance(facts, logits):
    """Of one microbatch in one layer: E / K * sum over experts of the fraction of tokens times the mean score."""
    scores = logits.softmax(-1) if facts.score_function == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    chosen = logits.topk(facts.top_k, -1).indices.flatten().bincount(minlength=facts.num_experts)
    return (chosen / len(logits) * scores.mean(0)).sum() * facts.num_experts / facts.top_k


def _published(model):
    """Gradients under the names of published checkpoints, in which every expert has tensors of its own."""
    for name, parameter in model.named_parameters():
        prefix = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                gate, up = both.chunk(2, 0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            yield from ((f"{prefix}.{expert}.down_proj.weight", one) for expert, one in enumerate(parameter.grad))
        else:
            yield name, parameter.grad
