"""Adapters beside a checkpoint, and what `peft` and `transformers` make of them."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from torch.nn.utils import parametrize

from moe_rl.models.hf import read_model
from moe_rl.models.peft import adapter_tensors
from moe_rl.proof.batch import batch
from moe_rl.proof.reference import IndependentModel

RANK, ALPHA = 3, 4.5
FRONT = "base_model.model."


def random_adapters(checkpoint, targets, seed=0):
    """{name as peft's: A [rank, inputs] or B [outputs, rank]}, none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.05 if ".lora_B." in name else shape[1] ** -0.5)
        for name, shape in adapter_tensors(read_model(checkpoint), RANK, targets).items()
    }


def write_adapters(folder, adapters):
    folder.mkdir()
    save_file(adapters, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Experts(torch.nn.Module):
    """W + alpha / rank * B A of every expert: the few lines that stand for peft, which gives stacked gate and up
    matrices one A together."""

    def __init__(self, pairs):
        """pairs: for each expert the (A, B) of each matrix that is stacked."""
        super().__init__()
        self.pairs = pairs

    def forward(self, stacked):
        deltas = [torch.cat([b @ a for a, b in of_expert]) for of_expert in self.pairs]
        return stacked + ALPHA / RANK * torch.stack(deltas)


class AdaptedModel:
    """A checkpoint in `transformers` with adapters: dense layers by `peft`, experts by `Experts`."""

    def __init__(self, checkpoint, adapters):
        from peft import LoraConfig
        from peft.tuners.lora import Linear

        self.independent = IndependentModel(checkpoint)
        model = self.independent.model.requires_grad_(False)
        # Layer by layer: for the names of a whole model, peft would adapt stacked experts too.
        for name in {one.split(".lora_")[0].removeprefix(FRONT) for one in adapters if ".experts." not in one}:
            place, _, own = name.rpartition(".")
            layer = Linear(
                model.get_submodule(name), "default", LoraConfig(r=RANK, lora_alpha=ALPHA), r=RANK, lora_alpha=ALPHA
            )
            setattr(model.get_submodule(place), own, layer)
        self.trained = {}
        for name, value in adapters.items():
            module = name.removeprefix(FRONT).removesuffix(".weight")
            if ".experts." in name:
                self.trained[name] = value.clone().requires_grad_()
            else:
                self.trained[name] = model.get_submodule(f"{module}.default").weight
                self.trained[name].data.copy_(value)
        places = {name.split(".experts.")[0] for name in adapters if ".experts." in name}
        for place in places:
            module = model.get_submodule(place.removeprefix(FRONT) + ".experts")
            for stacked, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                pairs = [
                    [
                        tuple(self.trained[f"{place}.experts.{number}.{part}.lora_{kind}.weight"] for kind in "AB")
                        for part in parts
                    ]
                    for number in range(self.independent.facts.num_experts)
                ]
                parametrize.register_parametrization(module, stacked, Experts(pairs))

    def run(self, routes):
        """(logprobs of each sequence, gradients of the proof's loss) under these routes."""
        sequences, _ = batch(self.independent.facts)
        logprobs, loss = {}, 0
        with parametrize.cached():
            for number, sequence in enumerate(sequences):
                tokens = torch.tensor(sequence.prompt_token_ids + sequence.token_ids)
                scores = self.independent(tokens[:-1].numpy(), routes[number])
                predicted = scores.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
                predicted = predicted[len(sequence.prompt_token_ids) - 1 :]
                loss = loss - (predicted * sequence.reward).sum() / len(sequences)
                logprobs[number] = predicted.detach()
            loss.backward()
        return logprobs, {name: one.grad for name, one in self.trained.items()}
