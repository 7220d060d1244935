"""Makes passes for the alignment test from real models: every family, under weights that training has moved.

Each model is a tiny one of its family, run by `transformers`. The sampler is the model in bfloat16, and the trainer
the one in float32. A policy gradient with AdamW moves the weights; the record is of the weights some updates ago.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alarm_parts.zoo import Pass, Shape
from moe_rl.replay.claims import PASSES
from tests.support.families import MODELS, write_checkpoint

RATES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
STALENESS = (0, 1, 2, 4, 8)
FAMILIES = ("qwen-mixed", "glm-groups", "glm-plain", "deepseek", "moonlight", "gpt-oss")
_PROMPTS, _SIBLINGS, PROMPT, _COMPLETION = 8, 8, 8, 24
BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Setting:
    """Says how a rollout was made.

    Attributes:
        rate: Learning rate of the updates.
        staleness: Updates between the weights of the record and those of the trainer.
        trained: The model was trained for some updates before, so that its text is no longer random.
    """

    family: str
    rate: float
    staleness: int
    trained: bool


def settings() -> list[Setting]:
    """Return the settings of all chains: each family with each rate twice, and each rate with each staleness. The first
    few differ in family and rate."""
    return [  # 6 and 5 have no common divisor, so 30 in turn have every pair
        Setting(
            FAMILIES[number % 6],
            RATES[number % 5],
            STALENESS[(number % 6 + number % 5 + number // 30 * 2) % 5],
            trained=(number + number // 6) % 2 == 0,
        )
        for number in range(60)
    ]


def rollouts(setting: Setting, seed: int) -> Iterator[Pass]:
    """Yield a chain of passes: sample completions, update the weights, and score the rows under the new ones."""
    model = load(setting, seed)
    for step in range(PASSES):
        sampler = copy.deepcopy(model).bfloat16()
        tokens = sample(sampler, seed + 1 + step)
        train(model, tokens, updates=setting.staleness, rate=setting.rate)
        _, record = Routers(sampler).run(tokens)
        scores, witness = Routers(model).run(tokens)
        layers, rows = record.shape[:2]
        shape = Shape(
            layers=layers,
            experts=scores.shape[2],
            top_k=record.shape[2],
            groups=getattr(model.config, "n_group", None) or 1,
            prompts=_PROMPTS,
            siblings=_SIBLINGS,
            prompt_tokens=PROMPT,
            completion_tokens=_COMPLETION,
            vocabulary=model.config.vocab_size,
        )
        lag = np.full(rows, setting.staleness)
        yield Pass(shape, [*tokens.numpy()], [PROMPT] * len(tokens), scores, witness, record, lag, setting.rate)


def load(setting: Setting, seed: int) -> Any:
    """Make the model, in float32, and train it for some updates if the setting says so."""
    import transformers

    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(setting.family, Path(folder), seed)
        kind = getattr(transformers, f"{MODELS[setting.family][0]}ForCausalLM")
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    if setting.trained:
        train(model, sample(model, seed), updates=8, rate=1e-3)
    return model


@torch.no_grad()
def sample(model: Any, seed: int) -> Tensor:
    """Return the tokens [N, T] of some completions of each prompt."""
    rng = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, model.config.vocab_size, (_PROMPTS, PROMPT), generator=rng)
    tokens = prompts.repeat_interleave(_SIBLINGS, 0)
    for _ in range(_COMPLETION):
        chances = model(tokens, use_cache=False).logits[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=rng)], 1)
    return tokens


def train(model: Any, tokens: Tensor, updates: int, rate: float) -> None:
    """Raise the chance of even tokens, with a policy gradient."""
    rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
    advantages = (rewards - rewards.mean()) / rewards.std().clamp(min=1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(updates):
        logits = model(tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]
        optimizer.zero_grad()
        (-(advantages[:, None] * chosen).mean()).backward()
        optimizer.step()


class Routers:
    """Keeps what the routers of a model compute.

    Attributes:
        gates: The routers.
        logits: Of the last run, float32 [N, E] each.
    """

    def __init__(self, model: Any):
        self._model, self._seen = model, []
        self.gates, self.logits = [], list[np.ndarray]()
        for layer in model.model.layers:
            gate = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
            if gate is not None and hasattr(layer.mlp, "experts"):
                self.gates.append(gate)

    def _look(self, gate: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        logits, _, chosen = output
        bias = getattr(gate, BIAS, None)
        self.logits.append(logits.float().numpy())
        self._seen.append((logits.float() if bias is None else logits.float().sigmoid() + bias.float(), chosen))

    @torch.no_grad()
    def run(self, tokens: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what the routers rank by, float32 [L, N, E], and their choice, int64 [L, N, K]."""
        self._seen.clear()
        self.logits.clear()
        hooks = [gate.register_forward_hook(self._look) for gate in self.gates]
        self._model(tokens, use_cache=False)
        for hook in hooks:
            hook.remove()
        scores, chosen = zip(*self._seen, strict=True)
        return torch.stack(scores).numpy(), torch.stack(chosen).sort(-1).values.numpy()
