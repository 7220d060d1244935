"""The nouns of moe_rl. Frozen dataclasses of plain values and numpy arrays: no torch, no vLLM, no Megatron.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task instance. `answer` is hidden: only a reward function that asks for it by name is given it."""

    id: str
    text: str
    answer: str
    level: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteRef:
    """Where the routes of one sequence lie in the trace store. This, never the routes, travels with a completion.

    rows: number of forwarded tokens = prompt + completion - 1. digest: hex xxh3-64 of the record (rows, key, tokens,
    weight version and model), checked on read.
    """

    shard: str
    key: str
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample. `key` is unique in a run and names the sequence in every message and in the trace."""

    key: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the sampler returned for one request.

    token_ids [T]: sampled tokens, the stop token included. logprobs [T] float32, natural log, of the sampled tokens
    under the distribution they were drawn from. finish_reason: "stop" or "length" (truncated). weight_version: the
    version of the weights that sampled every token. routes: None only when recording is off.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: str
    weight_version: int
    routes: RouteRef | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifiers said. status "scored" or "failed"; a failed one has no reward and is no wrong answer.

    reward: weighted sum. parts: each reward function's own value. detail: why it failed, for the log.
    """

    status: str
    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""

    @property
    def scored(self) -> bool:
        return self.status == "scored"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One completion ready to train on: tokens, sampler logprobs, its advantage, the reference to its routes.

    prompt_token_ids, token_ids: as in Completion. rollout_logprobs [T] float32.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rollout_logprobs: np.ndarray
    advantage: float
    weight_version: int
    routes: RouteRef | None

    @property
    def forwarded(self) -> int:
        """Tokens the sampler forwarded, hence rows of routes: all but the last sampled token."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1
