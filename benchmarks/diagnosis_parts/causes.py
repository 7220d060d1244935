"""Plants causes into one of two sides of a batch, and says which causes `moe_rl.bisect` finds.

A random model samples the tokens. The side with a planted cause computes its log-probabilities under other settings
than it declares; both sides declare the same. Normal noise of NOISE nats stands for what two engines round otherwise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moe_rl.comparison.bisection import Bisection, Computation, bisect
from moe_rl.comparison.third_engine import PARTS, ThirdEngine
from moe_rl.proof.choices import choice_scores
from moe_rl.proof.reference import IndependentModel
from tests.support.families import write_checkpoint

NOISE = 1e-4
PROMPT, LENGTHS = 4, (16, 28)

# What a side really has in place of what it declares.
PLANTED: dict[str, dict[str, str | float]] = {
    "weights of another version": {"weights": "before"},
    "weights rounded to float8": {"weight format": "fp8_e4m3"},
    "a prefix cache from before an update": {"prompt cache": "before"},
    "replay that does nothing": {"routes": "own"},
    "gate weights not renormalised": {"gate weights": "all"},
    **{f"{part} in bfloat16": {part: "bfloat16"} for part in PARTS if part != "router"},
    "log-softmax in bfloat16": {"log-softmax": "bfloat16"},
    "temperature left out": {"temperature": 0.8},
    "support left out": {"support": "top_p=0.9"},
    "weights and routes": {"weights": "before", "routes": "own"},
    "gate weights and temperature": {"gate weights": "all", "temperature": 0.9},
    "temperature and log-softmax": {"temperature": 1.1, "log-softmax": "bfloat16"},
}
# Bfloat16 moves this router's log-probabilities less than NOISE; it is planted without noise.
QUIET: dict[str, dict[str, str | float]] = {"router in bfloat16": {"router": "bfloat16"}}


class Batch:
    """Holds sequences that a random model sampled, with routes of which a twentieth are not the router's choice.

    Args:
        sequences: Their number.
    """

    def __init__(self, folder: Path, seed: int, sequences: int = 24):
        now, before = (write_checkpoint("qwen-mixed", folder / name, seed) for name in ("now", "before"))
        rng, drawn = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        tensors = load_file(before / "model.safetensors")
        for tensor in tensors.values():
            tensor *= 1 + 0.02 * torch.randn(tensor.shape, generator=drawn)
        save_file(tensors, before / "model.safetensors", metadata={"format": "pt"})
        model, tokens, routes = IndependentModel(now), [], []
        for length in rng.integers(*LENGTHS, sequences):
            one = list(rng.integers(2, model.facts.vocab, PROMPT))
            with torch.no_grad():
                while len(one) < length:
                    one.append(int(torch.multinomial(model(one)[-1].softmax(-1), 1, generator=drawn)))
                model(one[:-1])
            scores = [choice_scores(model.facts, *pair) for pair in zip(model.routers, model.biases, strict=True)]
            taken = np.stack([layer.topk(model.facts.top_k, -1).indices.numpy() for layer in scores], 1)
            others = rng.permuted(np.broadcast_to(np.arange(model.facts.num_experts), (*taken.shape[:2], 16)), axis=-1)
            swapped = rng.random(taken.shape[:2]) < 0.05
            taken[swapped] = others[swapped, : taken.shape[-1]]
            tokens.append(one)
            routes.append(taken)
        self.engine = ThirdEngine(
            tokens, [PROMPT] * sequences, routes, weights={"now": now, "before": before}, block=PROMPT - 1
        )
        self.noise = [rng.normal(0, 1, len(one) - PROMPT) for one in tokens]

    def bisected(self, planted: dict[str, str | float], side: str, noise: float = NOISE) -> Bisection:
        """Return what is found where one side really has these settings."""
        declared, suspects = self.engine.settings, self.engine.suspects()
        really = [one + noise * n for one, n in zip(self.engine(declared | planted), self.noise, strict=True)]
        sides = {
            name: Computation(declared, self.engine, really if name == side else self.engine(declared), suspects)
            for name in ("sampler", "trainer")
        }
        return bisect(sides["sampler"], sides["trainer"])


def found(bisection: Bisection) -> dict[str, dict[str, str | float]]:
    """Return {side: settings} of the causes that carry the KL. One that is not told apart from others does not
    count."""
    sides: dict[str, dict[str, str | float]] = {}
    for one in bisection.causes:
        for atom in one.swap:
            sides.setdefault(atom.side, {})[atom.cause] = atom.value if one.verdict == "carries" else "not told apart"
    return sides
