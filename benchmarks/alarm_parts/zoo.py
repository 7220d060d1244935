"""Makes passes for the alignment test: healthy ones of many shapes, for benchmarks/alarms.py.

Hidden states are functions of the tokens up to a row, so rows with the same tokens are equal. The witness's scores are
hidden states times a router, plus a bias. The record is the choice by the same scores after what a sampler adds to
them: rounding of a row that its layers share, rounding of a layer, and the drift of older weights, which all rows
share.

A pass is a step of a chain. The steps of a chain share the model, but no texts and no rounding of rows.

Legend: L MoE layers, N rows of all sequences end to end, E experts, K top-k, D width of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from moe_rl.errors import RouteValidationError
from moe_rl.replay.alignment import Alignment, AlignmentTest
from moe_rl.replay.claims import History
from moe_rl.replay.row_places import RowPlaces
from moe_rl.trace.variety import check_variety

_WIDTH = 48


@dataclass(frozen=True)
class Shape:
    """Describes a pass.

    Attributes:
        layers, experts, top_k, groups: Of the model. groups: of experts, of which a token chooses from half.
        text: "random" tokens, "zipf" frequencies, "one" or "two" tokens repeated, "mostly" one token, "cycle": a few
            tokens in turn.
        prompts, siblings, prompt_tokens, completion_tokens: Number of prompts, of completions of each, and lengths.
        vocabulary: Number of tokens.
        shared: Share of a completion, from its beginning, that its siblings have too.
        context: How much of a row comes from the tokens before it.
        bias: Size of the routers' biases, in standard deviations of their scores.
        trained: Tokens come in a few kinds whose rows are alike.
        averaging: Rows are means of all tokens so far, as attention with random weights gives.
        sharp: Standard deviation of the log of the layers' score sizes.
        noise, outliers: Rounding in standard deviations, and the share of rows where it is ten times as large.
        trainer_noise: Rounding of the trainer / that of the sampler.
        drift, offset: How far older weights move the routers, and their biases.
        lags: The sequences have lags of 0 to 2.
        updates: The weights change within sequences until no lag is left. Later rows attend to the older keys.
        microbatches: Number of microbatches.
        cells: At most so many scores [L, N, E] a pass: larger ones get fewer or shorter sequences.
    """

    layers: int = 8
    experts: int = 32
    top_k: int = 4
    groups: int = 1
    text: str = "zipf"
    prompts: int = 8
    siblings: int = 4
    prompt_tokens: int = 20
    completion_tokens: int = 40
    vocabulary: int = 500
    shared: float = 0.0
    context: float = 1.0
    bias: float = 0.5
    trained: bool = True
    averaging: bool = False
    sharp: float = 0.1
    noise: float = 0.01
    outliers: float = 0.0
    trainer_noise: float = 1.0
    drift: float = 0.0
    offset: float = 0.0
    lags: bool = False
    updates: bool = False
    microbatches: int = 2
    cells: int = 1_500_000


_MODEL = {"prompts": 8, "siblings": 4, "prompt_tokens": 20, "completion_tokens": 40, "vocabulary": 5000, "noise": 0.02,
          "cells": 15_000_000}  # fmt: skip
MODELS = {
    "qwen3_30b_a3b": Shape(layers=48, experts=128, top_k=8, **_MODEL),
    "glm_4_5_air": Shape(layers=45, experts=128, top_k=8, **_MODEL),
    "deepseek_v3": Shape(layers=58, experts=256, top_k=8, groups=8, **_MODEL),
    "moonlight_16b_a3b": Shape(layers=26, experts=64, top_k=6, **_MODEL),
    "gpt_oss_120b": Shape(layers=36, experts=128, top_k=4, **_MODEL),
}
"""Shapes of the configs of real models on a rank, with about a thousand rows: fewer than a real batch has."""

SHIPPED = {
    "tiny_moe_cpu": Shape(text="random", prompts=32, siblings=8, prompt_tokens=8, completion_tokens=6, vocabulary=14),
    "tool_use_cpu": Shape(layers=4, experts=16, prompts=8, siblings=8, prompt_tokens=160, completion_tokens=40,
                          vocabulary=290),
} | MODELS  # fmt: skip
"""Shapes of the shipped configs on a rank."""

NAMED = {
    "shared 20 of 60, 32 completions": Shape(prompts=1, siblings=32, completion_tokens=60, shared=0.33, noise=0.02),
    "shared 30%, 8 prompts x 8": Shape(layers=16, siblings=8, shared=0.3, noise=0.05),
    "shared 95%, 64 completions": Shape(prompts=1, siblings=64, shared=0.95, noise=0.05),
    "one token everywhere": Shape(text="one", noise=0.05, context=0.5),
    "two tokens in turn": Shape(text="two", vocabulary=2, noise=0.1, context=0.5),
    "two thirds one token": Shape(text="mostly", completion_tokens=60, noise=0.15, drift=0.3, context=0.5),
    "bias-dominated, 8 experts": Shape(experts=8, top_k=2, bias=3.0, noise=0.1, drift=0.1),
    "bias-dominated, drift": Shape(layers=32, experts=8, bias=6.0, noise=0.05, drift=0.3, offset=0.3),
    "one layer, top-1, 8 experts": Shape(layers=1, experts=8, top_k=1, siblings=8, noise=0.2, drift=0.8, offset=0.5),
    "staleness 2, high rate": Shape(siblings=8, completion_tokens=12, vocabulary=40, drift=0.5, offset=0.5),
    "lags 0, 1, 2 mixed": Shape(prompts=16, drift=0.15, offset=0.15, lags=True),
    "updates in flight": Shape(prompts=16, drift=0.15, offset=0.15, lags=True, updates=True),
    "small DeepSeek, random weights": Shape(layers=2, experts=8, top_k=2, groups=2, vocabulary=40, trained=False),
    "averaging attention, 8 experts": Shape(layers=2, experts=8, top_k=2, groups=2, averaging=True, trained=False,
                                            completion_tokens=120, vocabulary=40, noise=0.001),
    "float8 sampler": Shape(layers=28, experts=64, top_k=6, vocabulary=5000, noise=0.06, outliers=0.1),
} | SHIPPED  # fmt: skip
"""Shapes that tell something by themselves: ordinary ones, and those on which an earlier test gave false alarms."""

_DRAWN: dict[str, tuple[Any, ...]] = {
    "layers": (1, 2, 4, 8, 16, 28, 48, 60),
    "experts": (8, 16, 32, 64, 128, 256),
    "top_k": (1, 2, 4, 6, 8, 10),
    "groups": (1, 1, 1, 2),
    "text": ("random", "random", "zipf", "zipf", "one", "two", "mostly", "cycle"),
    "prompts": (1, 2, 4, 8, 16),
    "siblings": (1, 2, 8, 16, 32, 64),
    "prompt_tokens": (4, 20, 60, 200),
    "completion_tokens": (4, 12, 40, 120),
    "vocabulary": (12, 40, 500, 5000),
    "shared": (0.0, 0.0, 0.1, 0.3, 0.5, 0.8, 0.95),
    "context": (0.1, 0.5, 1.0, 2.0),
    "bias": (0.0, 0.0, 0.5, 2.0, 6.0),
    "trained": (True, False),
    "averaging": (False, False, False, True),
    "sharp": (0.1, 0.1, 0.1, 0.8),
    "noise": (1e-4, 1e-3, 0.01, 0.03, 0.1),
    "outliers": (0.0, 0.0, 0.02, 0.1),
    "trainer_noise": (0.0, 0.1, 1.0),
    "drift": (0.0, 0.0, 0.0, 0.02, 0.1, 0.3),
    "offset": (0.0, 0.0, 0.0, 0.02, 0.1, 0.3),
    "lags": (False, False, False, True),
    "microbatches": (1, 2, 3, 4),
    "updates": (False, True),
}


def drawn(seed: int) -> Shape:
    """Draw a shape."""
    rng = np.random.default_rng(seed)
    shape = Shape(**{name: values[rng.integers(len(values))] for name, values in _DRAWN.items()})
    return replace(shape, top_k=min(shape.top_k, shape.experts // 2), cells=600_000)


@dataclass
class Pass:
    """Holds a pass.

    Attributes:
        shape: As it was asked for; `tokens` may be fewer.
        tokens, prompts: Token ids of each sequence, and its prompt's length.
        scores: float32 [L, N, E], of the witness.
        witness, record: int64 [L, N, K].
        lag: int64 [N], of the oldest weights behind each row.
        moves: Largest distance that a weight moves from one version to the next.
    """

    shape: Shape
    tokens: list[np.ndarray]
    prompts: list[int]
    scores: np.ndarray
    witness: np.ndarray
    record: np.ndarray
    lag: np.ndarray
    moves: float = 0.0
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.cumsum([0, *map(len, self.tokens)])

    def varied(self) -> bool:
        """Return whether the record of each sequence passes the rules of trace/variety.py."""
        sorted_routes = np.sort(self.record, 2).astype(np.uint16).transpose(1, 0, 2)
        try:
            for ids, start in zip(self.tokens, self.starts, strict=False):
                check_variety(
                    sorted_routes[start : start + len(ids)],
                    ids,
                    num_experts=self.scores.shape[2],
                    layers=range(len(self.record)),
                    where={},
                )
        except RouteValidationError:
            return False
        return True

    def canary(self, rows: int = 256) -> list[str]:
        """Return what the canary's comparison finds in the first rows."""
        from moe_rl.train.canary import compare_routes  # loads Megatron

        fed = [ids[: max(0, rows - start)] for ids, start in zip(self.tokens, self.starts, strict=False)]
        own = (values[:, :rows] for values in (self.record, self.witness, self.scores))
        return compare_routes(*own, [ids for ids in fed if len(ids)], range(len(self.record)))[0]

    def judge(self, record: np.ndarray | None = None, history: History | None = None) -> Alignment:
        """Run the alignment test, on this record or on another one [L, N, K]."""
        record = self.record if record is None else record
        cuts = np.array_split(np.arange(len(self.tokens)), min(self.shape.microbatches, len(self.tokens)))
        rows = [slice(self.starts[cut[0]], self.starts[cut[-1] + 1]) for cut in cuts]
        places = [
            RowPlaces.of(
                [self.tokens[i] for i in cut],
                [self.prompts[i] for i in cut],
                np.ones(here.stop - here.start, bool),
                slice(None),
                self.lag[here],
            )
            for cut, here in zip(cuts, rows, strict=True)
        ]
        layers = range(len(record))
        given = {"groups": self.shape.groups, "moves": self.moves, "history": history}
        test = AlignmentTest(layers, places, torch.device("cpu"), **given)
        for number, here in enumerate(rows):
            for layer in layers:
                of_layer = (record[layer, here], self.witness[layer, here], self.scores[layer, here])
                test.observe(number, layer, *(torch.from_numpy(np.ascontiguousarray(one)) for one in of_layer))
            test.compared(number, [f"s{i}" for i in cuts[number]])
        found = test.verdict()
        assert found is not None
        return found


def healthy(shape: Shape, seed: int, step: int = 0) -> Pass:
    """Make a healthy pass. seed: of the chain."""
    model, rng = np.random.default_rng(seed), np.random.default_rng([seed, step])
    tokens, prompts = _texts(_bounded(shape), rng)
    hidden = _hidden(shape, tokens, model)
    rows = len(hidden)
    lags = rng.integers(0, 3, len(tokens)) if shape.lags else np.full(len(tokens), int(shape.drift + shape.offset > 0))
    lag = np.repeat(lags, [len(ids) for ids in tokens])
    moved = np.concatenate([_moved(*of, shape, rng) for of in zip(tokens, prompts, lags, strict=True)])[:, None]
    size = np.full((rows, 1), shape.noise * rng.uniform(0.8, 1.25), np.float32)
    size[rng.random(rows) < shape.outliers] *= 10

    def noise(*sizes: int, of: np.random.Generator = rng) -> np.ndarray:
        return of.standard_normal(sizes, np.float32)

    shared = noise(rows, _WIDTH)
    if model.integers(2):  # with a prefix cache, rows of the same tokens are computed once
        prefixes = [ids[: end + 1].tobytes() for ids in tokens for end in range(len(ids))]
        first: dict[bytes, int] = {}
        shared = shared[[first.setdefault(prefix, len(first)) for prefix in prefixes]]
    turn = np.linalg.qr(noise(_WIDTH, _WIDTH, of=model))[0]
    scores, sampled = np.empty((2, shape.layers, rows, shape.experts), np.float32)
    for layer in range(shape.layers):
        hidden = 0.8 * hidden + 0.6 * np.tanh(hidden @ turn)
        hidden /= np.sqrt((hidden**2).mean(1, keepdims=True))
        router, older, rounded = noise(3, _WIDTH, shape.experts, of=model) / np.float32(np.sqrt(_WIDTH))
        bias, offset = noise(2, shape.experts, of=model)
        bias *= shape.bias
        scale = np.exp(shape.sharp * noise(1, of=model))
        own = hidden + 0.3
        seen = own + 0.7 * size * (shared + noise(*hidden.shape))
        if shape.trainer_noise:
            own = own + shape.trainer_noise * size * noise(*hidden.shape)
        sampler = router + min(shape.noise, 0.05) * rounded
        scores[layer] = scale * (own @ router) + bias
        sampled[layer] = scale * (seen @ sampler) + bias
        if lag.any():
            drift = shape.drift * (seen @ older) + 1.5 * shape.offset * offset
            sampled[layer] += scale * moved * drift
    witness, record = (_top(values, shape) for values in (scores, sampled))
    return Pass(shape, tokens, prompts, scores, witness, record, lag)


def _moved(ids: np.ndarray, prompt: int, lag: int, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return how far the weights behind each row lag, float32 [T]: half of it in the row itself, half in its keys."""
    own, places = np.full(len(ids), lag, np.float32), np.arange(len(ids))
    if shape.updates:
        own -= (places[:, None] >= rng.integers(prompt, len(ids) + 1, lag)).sum(1)
    return (own + np.cumsum(own) / (places + 1)).astype(np.float32) / 2


def _bounded(shape: Shape) -> Shape:
    """Make the batch smaller until its scores fit."""
    names = ("siblings", "prompts", "prompt_tokens", "completion_tokens")
    while True:
        sizes = {name: getattr(shape, name) for name in names}
        rows = shape.prompts * shape.siblings * (shape.prompt_tokens + shape.completion_tokens)
        largest = max(sizes, key=lambda name: sizes[name])
        if rows * shape.layers * shape.experts <= shape.cells or sizes[largest] == 1:
            return shape
        shape = replace(shape, **{largest: sizes[largest] // 2})


def _texts(shape: Shape, rng: np.random.Generator) -> tuple[list[np.ndarray], list[int]]:
    def draw(count: int) -> np.ndarray:
        anything = rng.integers(0, shape.vocabulary, count)
        match shape.text:
            case "one":
                return np.full(count, 7 % shape.vocabulary)
            case "two":
                return np.arange(count) % 2
            case "mostly":  # two thirds of the text are one token, in one run
                start = int(rng.integers(0, count // 3 + 1))
                anything[start : start + 2 * count // 3] = 3 % shape.vocabulary
                return anything
            case "cycle":
                period = max(2, count // 12)
                return rng.integers(0, shape.vocabulary, period)[np.arange(count) % period]
            case "zipf":
                return np.minimum(rng.zipf(1.3, count) - 1, shape.vocabulary - 1)
        return anything

    def about(count: int) -> int:
        return max(1, count + int(rng.integers(-count // 4 - 1, count // 4 + 1)))

    tail = rng.integers(0, shape.vocabulary, 3)  # a chat template ends every prompt alike
    tokens, prompts = [], []
    for _ in range(shape.prompts):
        prompt, common = draw(about(shape.prompt_tokens)), draw(shape.completion_tokens)
        if len(prompt) > 6:
            prompt[-3:] = tail
        for _ in range(shape.siblings):
            completion = draw(about(shape.completion_tokens))
            same = min(int(shape.shared * shape.completion_tokens), len(completion))
            completion[:same] = common[:same]
            tokens.append(np.concatenate([prompt, completion]).astype(np.int64))
            prompts.append(len(prompt))
    return tokens, prompts


def _hidden(shape: Shape, tokens: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return the hidden states [N, D] before the first MoE layer."""
    own, previous, past = rng.standard_normal((3, shape.vocabulary, _WIDTH), np.float32)
    if shape.trained:
        kinds = rng.standard_normal((max(3, shape.vocabulary // 8), _WIDTH), np.float32)
        own = 0.8 * kinds[rng.integers(0, len(kinds), shape.vocabulary)] + 0.6 * own
    place = rng.standard_normal((2, _WIDTH), np.float32)
    parts = []
    for ids in tokens:
        if shape.averaging:
            mean = np.cumsum(own[ids], 0) / np.arange(1, len(ids) + 1, dtype=np.float32)[:, None]
            parts.append(mean / np.sqrt((mean**2).mean(1, keepdims=True)) + 0.1 * own[ids])
            continue
        memory, so_far = np.zeros(_WIDTH, np.float32), np.empty((len(ids), _WIDTH), np.float32)
        for at, token in enumerate(ids):
            memory = 0.85 * memory + 0.53 * past[token]
            so_far[at] = memory
        angle = np.arange(len(ids), dtype=np.float32) / 9
        where = np.stack([np.sin(angle), np.cos(angle)], 1) @ place
        parts.append(own[ids] + shape.context * (0.6 * previous[np.r_[ids[:1], ids[:-1]]] + 0.6 * so_far + 0.2 * where))
    return np.concatenate(parts)


def _top(scores: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the choice [L, N, K]; with groups, those of the groups whose two best experts are best."""
    if shape.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], shape.groups, -1)
        best = np.sort(grouped, -1)[..., -2:].sum(-1)
        allowed = max(1, shape.groups // 2)
        while shape.experts // shape.groups * allowed < min(2 * shape.top_k, shape.experts):
            allowed += 1  # real models leave more experts than a token takes, or the groups alone would choose
        left = np.ones_like(best, bool)
        np.put_along_axis(left, np.argsort(-best, -1)[..., :allowed], False, -1)
        scores = np.where(left[..., None], -np.inf, grouped).reshape(scores.shape)
    return torch.from_numpy(scores).topk(shape.top_k, -1).indices.numpy()
