"""Defines the data types that all packages share: frozen dataclasses of plain values and numpy arrays.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import groupby
from typing import Any

import numpy as np
import xxhash

# Largest |reward|. Squares of larger rewards overflow float32, and sums of much larger ones overflow float64.
LARGEST_REWARD = 1e12
# A sampler searches for every stop string after every token.
LONGEST_STOP_STRING, MOST_STOP_STRINGS = 200, 16
LOGITS_AT_ONCE = 1 << 24
"""Number of logits that a rank holds at a time: 64 MiB in float32."""

QUANTILES = (5, 25, 50, 75, 95)
"""Percentages for which a run logs quantiles, as members p05 to p95 of a family."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds one task instance.

    Attributes:
        id: unique within its prompt set.
        text: the sampler's input as text; the row as JSON where an environment calls the sampler.
        token_ids: the sampler's input; the first tokens of that JSON where an environment calls the sampler.
        columns: all columns of the prompt's row, as JSON values. The model never sees them; a reward function gets
            those that it names.
        messages: the chat that the text was rendered from, as a list of {"role": ..., "content": ..., ...}. None for a
            prompt of plain text.
        level: difficulty class; pass rates are logged for each. None: the prompt has no level.
    """

    id: str
    text: str
    token_ids: tuple[int, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] | None = None
    level: str | None = None


class Provenance(IntEnum):
    """Says how the sampler obtained the routes of a row."""

    PREFILL = 0
    DECODE = 1
    CACHED = 2  # the prefix cache held the token, so an earlier request computed its routes


@dataclass(frozen=True, slots=True)
class Span:
    """Describes one or more consecutive rows with the same weight version and provenance."""

    rows: int
    weight_version: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Describes one or more consecutive tokens of a completion that weights of one version sampled."""

    tokens: int
    weight_version: int


def merged_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the spans in order, with neighbours of one version as one."""
    of_versions = groupby(spans, key=lambda span: span.weight_version)
    return tuple(VersionSpan(sum(span.tokens for span in same), version) for version, same in of_versions)


def sampled_by(weight_version: int, tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a completion whose tokens were all sampled by one version; () without a token."""
    return (VersionSpan(tokens, weight_version),) if tokens else ()


@dataclass(frozen=True, slots=True)
class InsertedTokens:
    """Holds tokens after the first sampled token that the model was given and did not sample, such as a tool's result.

    Attributes:
        after: number of sampled tokens before them; at least 1.
        token_ids: at least one.
    """

    after: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RewardedTurn:
    """Holds a turn of an episode with its own reward. Its tokens are a unit of the loss.

    Attributes:
        number: position in its session.
        parent: number of the turn that it continues; None if it begins the session's dialogue.
        tokens: number of tokens that the model sampled in it, at least 1.
    """

    number: int
    parent: int | None
    tokens: int
    reward: float


@dataclass(frozen=True, slots=True)
class InsertedText:
    """Shows inserted tokens to a reader.

    Attributes:
        after: as in InsertedTokens.
        tokens: number of inserted tokens.
        text: their text.
    """

    after: int
    tokens: int
    text: str


class _Dialogue:
    """Locates the tokens that the model sampled, and those that it was given, in a sequence."""

    __slots__ = ()
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    inserted: tuple[InsertedTokens, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Return all tokens in their order: prompt, sampled and inserted ones."""
        ids, done = self.prompt_token_ids, 0
        for insertion in self.inserted:
            ids += self.token_ids[done : insertion.after] + insertion.token_ids
            done = insertion.after
        return ids + self.token_ids[done:]

    @property
    def positions(self) -> np.ndarray:
        """Return the position int64 [T] of each sampled token among all tokens."""
        positions = np.arange(len(self.prompt_token_ids), len(self.prompt_token_ids) + len(self.token_ids))
        for insertion in self.inserted:
            positions[insertion.after :] += len(insertion.token_ids)
        return positions

    @property
    def forwarded(self) -> int:
        """Return the number of tokens that the sampler forwarded, hence of route rows: all but the last sampled
        token."""
        inserted = sum(len(insertion.token_ids) for insertion in self.inserted)
        return len(self.prompt_token_ids) + inserted + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class RoutePart:
    """Locates one shard's part of a record. `digest` is the hex xxh3-64 of the record's frame header, checked on
    read."""

    shard: str
    digest: str


@dataclass(frozen=True, slots=True)
class RouteRef:
    """Locates the routes of one sequence in the trace store. A completion carries this reference instead of its routes.

    Attributes:
        rows: number of rows referenced, from the record's first; the record may hold more. Without `start` this is the
            number of forwarded tokens, prompt + completion - 1.
        parts: one part, or one per pipeline stage of the sampler, each with its own layers.
        start: position of the first row. It is above 0 when the request asked only for later rows.
        source_sum: checksum of these rows as they left the sampler's engine, 16 hex digits, see trace.source_sum. ""
            means unknown; such a reference cannot be replayed.
    """

    key: str
    rows: int
    parts: tuple[RoutePart, ...]
    start: int = 0
    source_sum: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Says how tokens are drawn: by temperature, top-k, top-p and min-p, as in GenerateRequest."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, top_k {self.top_k}, top_p {self.top_p:g}, min_p {self.min_p:g}"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Asks the sampler for one completion.

    Attributes:
        key: unique in a run; names the sequence in messages and in the trace.
        seed: the seed of its own random numbers. None: those of the engine, in the order of its steps.
        stop: texts that end the completion as soon as the sampled text contains one. The sampler must read text.
        top_k, top_p, min_p: the values 0, 1 and 0 switch them off.
        record: whether to store the routes.
        parent: record with all rows of the earlier turns that the prompt begins with; only later rows are stored.
        record_from: without a parent, the first position whose row is stored.
        grammar: tokens are drawn only where this allows them: a structural tag of xgrammar, as JSON text. "": anywhere.
            The sampler must read text and record supports.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    seed: int | None
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    record: bool = True
    parent: RouteRef | None = None
    record_from: int = 0
    stop: tuple[str, ...] = ()
    grammar: str = ""

    @property
    def drawing(self) -> Drawing:
        """Return how its tokens are drawn."""
        return Drawing(self.temperature, self.top_k, self.top_p, self.min_p)


def seal_of(key: str, token_ids: Iterable[int], logprobs: np.ndarray) -> str:
    """Return the seal of a completion, 16 hex digits: a digest of its key, sampled tokens and their log-probabilities.

    The seal is computed when the completion is made, and travels with it to the loss, which computes it again from the
    values it used. `trace.source_sum` also binds the forwarded tokens of a sequence to its routes; the last sampled
    token is not forwarded.
    """
    digest = xxhash.xxh3_64(f"{key}\0".encode())
    digest.update(np.asarray(token_ids, "<i4").tobytes())
    digest.update(np.asarray(logprobs, "<f4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Completion(_Dialogue):
    """Holds what the sampler returned for one request, or for the turns of a dialogue that continue each other.

    Attributes:
        token_ids: sampled tokens [T], including the stop token, or all tokens of the stop string.
        logprobs: natural log-probabilities [T] float32 of the sampled tokens under the distribution they were drawn
            from.
        finish_reason: "stop", "length" (truncated) or "abort" (partial).
        versions: which weights sampled which tokens, in token order; versions never decrease. Empty without a token.
        routes: None when nothing was recorded.
        stop_token_id: the stop token that ended the completion, which is then its last token; otherwise None.
        stop_string: the stop string that ended the completion, which its last token completes; otherwise None.
        inserted: tokens that the model was given between its turns, in order. `token_ids` does not contain them.
        turns: the turns of the sampled tokens, in order, if turns have their own rewards.
        drawing: how the tokens were drawn; None: not known.
        seal: see `seal_of`. A new completion is sealed; a copy keeps its seal.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    routes: RouteRef | None
    stop_token_id: int | None = None
    stop_string: str | None = None
    inserted: tuple[InsertedTokens, ...] = ()
    turns: tuple[RewardedTurn, ...] = ()
    drawing: Drawing | None = None
    seal: str = ""

    def __post_init__(self) -> None:
        if not self.seal:
            object.__setattr__(self, "seal", seal_of(self.key, self.token_ids, self.logprobs))

    @property
    def oldest_version(self) -> int:
        """Return the version that sampled the first token. There must be a token."""
        return self.versions[0].weight_version

    @property
    def newest_version(self) -> int:
        """Return the version that sampled the last token. There must be a token."""
        return self.versions[-1].weight_version

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """Return the tokens of the text: all but the final stop token. The tokens of a stop string are included,
        because the first of them may begin before the string."""
        return self.token_ids if self.stop_token_id is None else self.token_ids[:-1]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Holds what one sampler returned for several token sequences that it scored.

    Attributes:
        logprobs: for each sequence of n tokens, natural log-probabilities [n - 1] float32 at temperature 1 of all
            tokens but the first, each given the tokens before it.
        routes: for each sequence, the location of the routes of all tokens but the last; empty when not requested, or
            when the sampler does not record.
        by: the sampler's name, for messages.
    """

    logprobs: list[np.ndarray]
    routes: list[RouteRef]
    by: str


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """Lists the ids that could have been drawn for each token of a completion under a grammar, top-k, top-p and min-p.

    Attributes:
        sets: the number of each token's set of ids [T], integers.
        counts: number of ids listed for each set [S], integers: n > 0 ids that could be drawn, or -n that could not. So
            0 means the whole vocabulary.
        ids: the ids of all sets, concatenated; ascending within a set.
    """

    sets: np.ndarray
    counts: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True, slots=True)
class SamplerHead:
    """Holds the sampler's K likeliest tokens at each token of a completion, with their log-probabilities.

    Attributes:
        ids: [T, K] int32, the likeliest first.
        logprobs: [T, K] float32, natural logarithm. -inf where fewer than K tokens could be drawn.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds the verifiers' result for one completion.

    Attributes:
        status: "scored" or "failed". A failed verdict has no reward and does not count as a wrong answer.
        reward: weighted sum of the reward functions' values.
        parts: value of each reward function.
        detail: why scoring failed, for the log.
        of: the seal of the completion that was judged.
    """

    status: str
    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    of: str = ""

    @property
    def scored(self) -> bool:
        return self.status == "scored"


@dataclass(frozen=True, slots=True)
class Sequence(_Dialogue):
    """Holds one completion ready for training: tokens, sampler log-probabilities, reward and the location of its
    routes.

    Attributes:
        prompt_token_ids, token_ids, versions, routes, inserted, turns: as in GenerateRequest and Completion.
        rollout_logprobs: [T] float32.
        reward: the verifiers' reward plus the configured length terms; a KL penalty is subtracted later.
        segment_of: key of the completion or episode that these tokens are a segment of; "" for a whole completion. The
            segments have its reward. A token sampled in one segment is part of the prompt of segments that continue it.
        alone: whether this segment is a unit of the loss by itself.
        seal: as in Completion.
        verdict: a digest of seal, rewards and group, made where the verdict was joined to the completion, see
            `verdict_of`.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rollout_logprobs: np.ndarray
    reward: float
    versions: tuple[VersionSpan, ...]
    routes: RouteRef | None
    segment_of: str = ""
    inserted: tuple[InsertedTokens, ...] = ()
    turns: tuple[RewardedTurn, ...] = ()
    seal: str = ""
    verdict: str = ""
    alone: bool = False

    def __post_init__(self) -> None:
        if not self.seal:
            object.__setattr__(self, "seal", seal_of(self.key, self.token_ids, self.rollout_logprobs))

    @classmethod
    def of(cls, completion: Completion, reward: float, segment_of: str = "", *, alone: bool = False) -> Sequence:
        """Make a Sequence from a completion, or a segment of one, and its reward. It is in no group yet."""
        return cls(
            key=completion.key,
            prompt_token_ids=completion.prompt_token_ids,
            token_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            reward=reward,
            versions=completion.versions,
            routes=completion.routes,
            segment_of=segment_of,
            inserted=completion.inserted,
            turns=completion.turns,
            seal=completion.seal,
            alone=alone,
        )

    def judged(self, group: int) -> Sequence:
        """Return this sequence as a member of a group, with the digest that binds its reward and group to it."""
        return replace(self, verdict=self.verdict_of(group))

    def verdict_of(self, group: int) -> str:
        """Return a digest, 16 hex digits, of the values that this sequence's advantage in a group is computed from."""
        rewards = (float(reward).hex() for reward in (self.reward, *(turn.reward for turn in self.turns)))
        text = f"{self.seal} {self.segment_of} {group} {' '.join(rewards)}"
        return xxhash.xxh3_64_hexdigest(text.encode())

    @property
    def completion(self) -> str:
        """Return the key of the completion that the tokens belong to."""
        return self.segment_of or self.key

    @property
    def together(self) -> str:
        """Return a key that is equal for sequences that a microbatch must hold together: parts of a unit of the loss.
        A turn with its own reward is in one sequence."""
        return self.key if self.alone or self.turns else self.completion

    @property
    def oldest_version(self) -> int:
        """Return the version that sampled the first token."""
        return self.versions[0].weight_version

    @property
    def newest_version(self) -> int:
        """Return the version that sampled the last token."""
        return self.versions[-1].weight_version


def by_completion(sequences: Iterable[Sequence]) -> list[list[int]]:
    """Return the indices of each completion's sequences. Completions are in the order of their first sequence."""
    return _places(sequence.completion for sequence in sequences)


def held_together(sequences: Iterable[Sequence]) -> list[list[int]]:
    """Return the indices of the sequences that a microbatch must hold together, in the order of their first ones."""
    return _places(sequence.together for sequence in sequences)


def unit_lengths(sequences: list[Sequence]) -> list[int]:
    """Return the number of sampled tokens of each unit of the loss. A unit is a turn if turns have their own rewards,
    otherwise a completion, or a segment that is a unit by itself."""
    turns = [turn.tokens for sequence in sequences for turn in sequence.turns]
    return turns or [sum(len(sequences[i].token_ids) for i in places) for places in held_together(sequences)]


def _places(keys: Iterable[str]) -> list[list[int]]:
    """Return the places of each key, in the order of their first places."""
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())
