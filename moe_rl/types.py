"""Defines the nouns of moe_rl: frozen dataclasses of plain values and numpy arrays. No torch, vLLM or Megatron.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

# The largest size of a reward. Squares of larger ones leave float32, and sums of much larger ones leave float64.
LARGEST_REWARD = 1e12


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task instance. `answer` is hidden: only a reward function that asks for it by name is given it."""

    id: str
    text: str
    answer: str
    level: str
    token_ids: tuple[int, ...] = ()


class Provenance(IntEnum):
    """How the sampler came by the routes of a row."""

    PREFILL = 0
    DECODE = 1
    CACHED = 2  # an earlier request forwarded the token, a prefix cache kept its rows


@dataclass(frozen=True, slots=True)
class Span:
    """A run of rows that the same weights routed in the same way. rows: at least 1."""

    rows: int
    weight_version: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class RoutePart:
    """One shard's share of a record. digest: hex xxh3-64 of the record's frame header, checked on read."""

    shard: str
    digest: str


@dataclass(frozen=True, slots=True)
class RouteRef:
    """Where the routes of one sequence lie in the trace store. This, never the routes, travels with a completion.

    rows: number of forwarded tokens = prompt + completion - 1; the reference is to the first `rows` rows of the record,
    which may hold more. parts: one, or one per pipeline stage of the sampler, each with its own layers. start: position
    of the first row; not 0 when the request asked for no rows before it, and `rows` are then those from there on.
    source_sum: of these rows as they left the sampler's engine, 16 hex digits, see trace.source_sum; "" is not known,
    and nothing is replayed from such a reference.
    """

    key: str
    rows: int
    parts: tuple[RoutePart, ...]
    start: int = 0
    source_sum: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample. `key` is unique in a run and names the sequence in every message and in the trace.

    top_k 0, top_p 1 and min_p 0 remove nothing. record: whether its routes are kept. parent: record of the earlier
    turns that the prompt begins with, all rows of its reference; only the rows behind it are stored. record_from:
    without a parent, the first position whose row is stored at all.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    record: bool = True
    parent: RouteRef | None = None
    record_from: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What the sampler returned for one request.

    token_ids [T]: sampled tokens, the stop token included. logprobs [T] float32, natural log, of the sampled tokens
    under the distribution they were drawn from. finish_reason: "stop", "length" (truncated) or "abort" (partial).
    weight_version: the version of the weights that sampled every token. routes: None when nothing was recorded.
    stop_token_id: which of the request's stop tokens ended it, hence its last token; None when none did.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: str
    weight_version: int
    routes: RouteRef | None
    stop_token_id: int | None = None

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """What its text is made of: all tokens but the stop token that ended it."""
        return self.token_ids if self.stop_token_id is None else self.token_ids[:-1]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """What one sampler said of some runs of tokens.

    logprobs: of each run of n tokens [n - 1] float32, natural log, temperature 1: of every token but the first, given
    those before it. routes: of each run, where the record of all its tokens but the last lies; empty when none was
    asked for, or the sampler does not record. by: who it is, for messages.
    """

    logprobs: list[np.ndarray]
    routes: list[RouteRef]
    by: str


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """The ids that the tokens of one completion could have been, under top-k, top-p and min-p.

    counts [T] integers. ids [sum of counts] integers, those of each token ascending, one token after the other. A count
    of 0: the whole vocabulary.
    """

    counts: np.ndarray
    ids: np.ndarray


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
    """One completion ready to train on: tokens, sampler logprobs, its reward, the reference to its routes.

    prompt_token_ids, token_ids: as in Completion. rollout_logprobs [T] float32. reward: what the verifiers gave, with
    what the config adds for its length; what a KL takes off it comes later.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rollout_logprobs: np.ndarray
    reward: float
    weight_version: int
    routes: RouteRef | None

    @classmethod
    def of(cls, completion: Completion, reward: float) -> Sequence:
        """A completion with its reward."""
        return cls(
            key=completion.key,
            prompt_token_ids=completion.prompt_token_ids,
            token_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            reward=reward,
            weight_version=completion.weight_version,
            routes=completion.routes,
        )

    @property
    def forwarded(self) -> int:
        """Tokens the sampler forwarded, hence rows of routes: all but the last sampled token."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1
