"""Computes a batch's log-probabilities in `transformers` under the settings of a sampler or a trainer.

Only one sequence is computed at a time, on the CPU. Settings, by the name of their cause:

    weights          a name of the given folders
    weight format    exact, or fp8_e4m3: matrices rounded as by rollout.weights
    routes           recorded, or own: the routers choose
    gate weights     of the chosen experts: sum to 1 (chosen), are shares of all experts (all), or are given (recorded)
    attention, router, experts, logits head, other layers
                     the precision of each part: float32 or bfloat16
    log-softmax      the precision in which logits become log-probabilities
    temperature      by which logits are divided
    support          of the distribution: all, or such as "top_k=20, top_p=0.95, min_p=0.1"
    prompt cache     fresh, or the name of the weights that computed the keys and values of the prompts' whole blocks: a
                     prefix cache that was not emptied when the weights changed

Legend: T tokens of a sequence, N of them sampled, L MoE layers, K top-k, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moe_rl.comparison.bisection import Settings
from moe_rl.errors import DataError
from moe_rl.models.hf import read_model
from moe_rl.proof.reference import IndependentModel
from moe_rl.weights.sender import fp8_rounded, is_rounded

PARTS = ("attention", "router", "experts", "logits head", "other layers")
_MODEL = ("weights", "weight format", "prompt cache", "routes", "gate weights")
_CAUSES = (*_MODEL, *PARTS, "log-softmax", "temperature", "support")
# What is done to the last hidden states: they are computed once for all of these.
_AFTER = ("logits head", "log-softmax", "temperature", "support")
_PRECISIONS = ("float32", "bfloat16")


class ThirdEngine:
    """Is the `run` of a `Computation`. Holds the model in float32, and the last hidden states of every setting.

    Args:
        token_ids: [T] of each sequence, prompt and completion.
        prompts: The number of prompt tokens of each sequence, at least 1.
        routes: [T - 1 or T, L, K] of each sequence, the experts that the sampler took; None: there is no record.
        weights: {name: Hugging Face folder}.
        gate_weights: The weights of these experts, as `routes`.
        block: Tokens of a block of the prefix cache.

    Raises:
        DataError: The arrays do not fit together.
    """

    def __init__(
        self,
        token_ids: Seq[Seq[int] | np.ndarray],
        prompts: Seq[int],
        routes: Seq[np.ndarray] | None = None,
        *,
        weights: Mapping[str, Path],
        gate_weights: Seq[np.ndarray] | None = None,
        block: int = 16,
    ):
        self._tokens = [np.asarray(tokens, np.int64) for tokens in token_ids]
        self._prompts, self._folders = list(prompts), dict(weights)
        self.facts = read_model(next(iter(self._folders.values())))
        self._routes = self._of_rows("routes", routes)
        self._gates = self._of_rows("gate_weights", gate_weights)
        fits = [0 < prompt < len(tokens) for prompt, tokens in zip(self._prompts, self._tokens, strict=True)]
        if not all(fits):
            raise DataError(
                "needs a prompt and a completion",
                where={"sequence": fits.index(False)},
                got=f"{self._prompts[fits.index(False)]} prompt tokens of {len(self._tokens[fits.index(False)])}",
            )
        self._model: IndependentModel | None = None
        self._loaded: tuple = ()
        self._parts: dict[str, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
        self._at: dict[str, torch.dtype] = {}
        self._heads: dict[Any, torch.Tensor] = {}
        self._hidden: dict[tuple, list[torch.Tensor]] = {}
        self._settings: Settings = {}
        self._sequence = self._first = 0
        self._cached = [(prompt - 1) // block * block for prompt in self._prompts]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the model itself in float32, with the recorded routes where there are any."""
        gates = "chosen" if self.facts.norm_topk_prob else "all"
        first = {"weights": next(iter(self._folders)), "weight format": "exact", "prompt cache": "fresh"}
        first |= {"routes": "own" if self._routes is None else "recorded", "gate weights": gates}
        return first | dict.fromkeys((*PARTS, "log-softmax"), "float32") | {"temperature": 1.0, "support": "all"}

    def suspects(self) -> dict[str | tuple[str, ...], list]:
        """Return for each cause the values that this batch can be computed with, for `Computation.suspects`."""
        recorded = [] if self._gates is None else ["recorded"]
        routes = [] if self._routes is None else ["recorded", "own"]
        dtypes: list = [(dtype,) * len(PARTS) for dtype in _PRECISIONS]
        return {
            "weights": list(self._folders),
            "weight format": ["exact", "fp8_e4m3"],
            "prompt cache": ["fresh", *(self._folders if any(self._cached) else ())],
            "routes": routes,
            "gate weights": ["chosen", "all", *recorded],
            PARTS: dtypes,
            **dict.fromkeys((*PARTS, "log-softmax"), list(_PRECISIONS)),
            "temperature": [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2],
            "support": ["all", "top_k=20", "top_k=50", "top_p=0.8", "top_p=0.9", "top_p=0.95", "min_p=0.05"],
        }

    @torch.no_grad()
    def __call__(self, settings: Settings) -> list[np.ndarray]:
        """Return the log-probabilities [N] of each sequence's completion.

        Raises:
            DataError: A setting is unknown.
        """
        self._check(settings)
        body = tuple((cause, settings[cause]) for cause in _CAUSES if cause not in _AFTER)
        if body not in self._hidden:
            self._hidden[body] = self._last_hidden(settings)
        head = self._heads[settings["weights"]].to(getattr(torch, str(settings["logits head"])))
        scores = []
        for hidden, tokens, prompt in zip(self._hidden[body], self._tokens, self._prompts, strict=True):
            logits = F.linear(hidden.to(head.dtype), head).float() / float(settings["temperature"])
            sampled = torch.from_numpy(tokens[prompt:, None])
            logits = logits.masked_fill(~_kept(logits, sampled, str(settings["support"])), -torch.inf)
            logprobs = logits.to(getattr(torch, str(settings["log-softmax"]))).log_softmax(-1)
            scores.append(logprobs.float().gather(1, sampled)[:, 0].numpy())
        return scores

    def _of_rows(self, name: str, arrays: Seq[np.ndarray] | None) -> list[np.ndarray] | None:
        """Return arrays [T - 1, L, K] of all sequences, without a row of the last token."""
        if arrays is None:
            return None
        shape = len(self.facts.moe_layers), self.facts.top_k
        for number, (array, tokens) in enumerate(zip(arrays, self._tokens, strict=True)):
            if array.shape[1:] != shape or len(array) not in (len(tokens) - 1, len(tokens)):
                raise DataError(
                    "does not have a row for each token",
                    where={"argument": name, "sequence": number},
                    got=array.shape,
                    expected=(len(tokens) - 1, *shape),
                )
        return [array[: len(tokens) - 1] for array, tokens in zip(arrays, self._tokens, strict=True)]

    def _check(self, settings: Settings) -> None:
        if set(settings) != set(_CAUSES):
            wrong = ", ".join(sorted(set(settings) ^ set(_CAUSES)))
            raise DataError("the settings do not name each cause once", got=wrong, expected=", ".join(_CAUSES))
        suspects = self.suspects()
        for cause in set(_CAUSES) - {"temperature", "support"}:
            known = suspects[cause] or ["own"]
            if settings[cause] not in known:
                raise DataError(f"{cause}: unknown setting", got=settings[cause], expected=", ".join(map(str, known)))

    def _load(self, settings: Settings) -> IndependentModel:
        """Return the model with these weights."""
        wanted = settings["weights"], settings["weight format"]
        if self._model is None or self._loaded != wanted:
            self._model, self._loaded, self._parts = None, (), {}  # free the memory first
            model = IndependentModel(self._folders[str(wanted[0])])
            self._heads[wanted[0]] = model.model.lm_head.weight.clone()
            if wanted[1] != "exact":
                self._round(model)
            self._parts = {part: self._hooked(part, ones) for part, ones in self._modules(model).items()}
            self._at = dict.fromkeys(PARTS, torch.float32)
            self._model, self._loaded = model, wanted
        return self._model

    def _round(self, model: IndependentModel) -> None:
        """Round the matrices that a sampler with rollout.weights=fp8_e4m3 gets rounded."""
        for name, parameter in model.model.named_parameters():
            if is_rounded(name):
                parameter.copy_(fp8_rounded(parameter))
            elif parameter.dim() == 3 and is_rounded(f"{name}.weight"):  # of all experts: gate and up are two matrices
                for matrix in (chunk for expert in parameter for chunk in expert.chunk(1 + ("gate_up" in name))):
                    matrix.copy_(fp8_rounded(matrix))

    def _modules(self, model: IndependentModel) -> dict[str, list[torch.nn.Module]]:
        """Return the modules of each part."""
        decoder = model.model.model
        modules: dict[str, list[torch.nn.Module]] = {part: [] for part in PARTS}
        modules["other layers"] = [decoder.embed_tokens, decoder.norm]
        for number, layer in enumerate(decoder.layers):
            modules["attention"].append(layer.self_attn)
            modules["other layers"] += [layer.input_layernorm, layer.post_attention_layernorm]
            children = dict(layer.mlp.named_children())
            if number not in self.facts.moe_layers:
                modules["experts"].append(layer.mlp)
                continue
            router = children.pop("gate", None) or children.pop("router")
            router.register_forward_hook(partial(self._weigh, self.facts.moe_layers.index(number)))
            modules["router"].append(router)
            modules["experts"] += children.values()
        return modules

    def _hooked(self, part: str, modules: Seq[torch.nn.Module]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Make a part's modules compute in the part's precision. Returns each parameter and its float32 values."""

        def enter(_: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return _in(self._at[part], args), _in(self._at[part], kwargs)

        def leave(_: torch.nn.Module, args: tuple, output: Any) -> Any:
            return _in(self._at["other layers"], output)

        for module in modules:
            module.register_forward_pre_hook(enter, with_kwargs=True)
            if part in ("attention", "experts"):
                module.register_forward_hook(leave)
        return [(parameter, parameter.data) for module in modules for parameter in module.parameters()]

    def _weigh(self, column: int, _: torch.nn.Module, args: tuple, output: tuple) -> tuple:
        """Replace the weights of the chosen experts, where the model itself has others."""
        logits, gates, experts = output
        wanted = self._settings["gate weights"]
        if wanted == ("chosen" if self.facts.norm_topk_prob else "all"):
            return output
        if wanted == "recorded":
            assert self._gates is not None and self._routes is not None  # see _check
            rows = slice(self._first, self._first + len(experts))
            taken, recorded_gates = (
                torch.from_numpy(arrays[self._sequence][rows, column]) for arrays in (self._routes, self._gates)
            )
            same = (taken.long() == experts).all(-1, keepdim=True)
            return logits, torch.where(same, recorded_gates.to(gates.dtype), gates), experts
        scores = logits.float().softmax(-1) if self.facts.score_function == "softmax" else logits.float().sigmoid()
        weights = scores.gather(1, experts)
        if wanted == "chosen":
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, (weights * self.facts.routed_scaling).to(gates.dtype), experts

    def _set(self, part: str, dtype: torch.dtype) -> None:
        if self._at[part] != dtype:
            self._at[part] = dtype
            for parameter, exact in self._parts[part]:
                parameter.data = exact.to(dtype)

    def _last_hidden(self, settings: Settings) -> list[torch.Tensor]:
        """Return the last hidden states [N, H] of the rows that predict each sequence's completion."""
        from transformers import DynamicCache

        starts, caches = [0] * len(self._tokens), [None] * len(self._tokens)
        if settings["prompt cache"] not in ("fresh", settings["weights"]):
            starts, caches = self._cached, [DynamicCache() if cached else None for cached in self._cached]
            self._rows({**settings, "weights": settings["prompt cache"]}, [0] * len(starts), starts, caches)
        hidden = self._rows(settings, starts, [len(tokens) - 1 for tokens in self._tokens], caches)
        return [rows[prompt - 1 - start :] for rows, prompt, start in zip(hidden, self._prompts, starts, strict=True)]

    def _rows(self, settings: Settings, first: Seq[int], end: Seq[int], caches: Seq[Any]) -> list[torch.Tensor]:
        """Return the last hidden states of these rows of each sequence. A cache has the rows before, and gets these."""
        model = self._load(settings)
        for part in PARTS:
            self._set(part, getattr(torch, str(settings[part])))
        self._settings, hidden = settings, []
        for number, (tokens, cache) in enumerate(zip(self._tokens, caches, strict=True)):
            rows = slice(first[number], end[number])
            self._sequence, self._first = number, rows.start
            routes = (
                self._routes[number][rows] if self._routes is not None and settings["routes"] == "recorded" else None
            )
            hidden.append(model.hidden(tokens[rows], routes, cache) if end[number] else torch.empty(0))
        return hidden


def _in(dtype: torch.dtype, values: Any) -> Any:
    """Return tensors of floating dtype in another precision, also within tuples and keywords."""
    if isinstance(values, torch.Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, tuple):
        return tuple(_in(dtype, value) for value in values)
    return {name: _in(dtype, value) for name, value in values.items()} if isinstance(values, dict) else values


def _kept(logits: torch.Tensor, sampled: torch.Tensor, support: str) -> torch.Tensor:
    """Return bool [N, V], the tokens that min_p, top_k and top_p leave, in vLLM's order, and always the sampled one."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    limits = {} if support == "all" else dict(part.strip().split("=") for part in support.split(","))
    if "min_p" in limits:
        probabilities = logits.softmax(-1)
        kept &= probabilities >= float(limits["min_p"]) * probabilities.amax(-1, keepdim=True)
    if "top_k" in limits:
        largest = logits.masked_fill(~kept, -torch.inf).topk(min(int(limits["top_k"]), logits.shape[-1]), -1).values
        kept &= logits >= largest[:, -1:]
    if "top_p" in limits:
        ordered, places = logits.masked_fill(~kept, -torch.inf).softmax(-1).sort(-1)
        removed = ordered.cumsum(-1) <= 1 - float(limits["top_p"])
        removed[:, -1] = False  # the most likely token stays
        kept &= ~torch.zeros_like(kept).scatter(1, places, removed)
    return kept.scatter(1, sampled, True)
