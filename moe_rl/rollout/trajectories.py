"""Describes a run's episodes: the request for each, and its result as sequences to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from moe_rl.types import Completion, Drawing, Prompt, Verdict


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Requests one episode.

    Attributes:
        name: its session's name, unique in a run.
        seed: the seeds of its turns derive from it.
        prompt: its columns are the row that the environment gets.
        drawing: how all its turns are sampled.
        shard: name of the trace shard for its turns, which all episodes of a call share. None: its routes are not
            recorded, and its session is not kept.
    """

    name: str
    seed: str
    prompt: Prompt
    drawing: Drawing
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Holds one played episode.

    Attributes:
        name: its session's name.
        sequences: the tokens that the agent received from the model, each once; empty if there are none. They share
            the reward.
        verdict: the environment's reward. A failed episode has a failed verdict with the reason.
        turns, undelivered, branches: numbers of turns that the agent received, of turns that it did not, and of
            branches.
        digest: the digest of its session.
        other_system: number of requests that failed to continue a turn only because the system prompt differed.
    """

    name: str
    sequences: list[Completion]
    verdict: Verdict
    turns: int
    undelivered: int
    branches: int
    digest: str
    other_system: int = 0

    @property
    def whole(self) -> Completion:
        """Return all tokens that the model sampled as one completion, for metrics and keys. It has no prompt and no
        record."""
        sequences = self.sequences
        return Completion(
            key=self.name,
            prompt_token_ids=(),
            token_ids=sum((sequence.token_ids for sequence in sequences), ()),
            logprobs=np.concatenate([np.empty(0, np.float32), *(sequence.logprobs for sequence in sequences)]),
            finish_reason=sequences[-1].finish_reason if sequences else "abort",
            versions=sum((sequence.versions for sequence in sequences), ()),
            routes=None,
        )

    def sealed(self) -> Trajectory:
        """Return this trajectory with a verdict that carries its seal."""
        return replace(self, verdict=replace(self.verdict, of=self.whole.seal))

    @property
    def forwarded(self) -> int:
        """Return the number of tokens that training forwards, over all sequences."""
        return sum(sequence.forwarded for sequence in self.sequences)

    def fits(self, credit: str | None, microbatch_tokens: int) -> bool:
        """Return whether a microbatch holds what `task.environment.credit` trains on together. A failed episode is not
        trained on."""
        return credit != "trajectory" or not self.verdict.scored or self.forwarded <= microbatch_tokens

    @property
    def inserted(self) -> int:
        """Return the number of tokens given to the model between its turns."""
        return sum(len(insertion.token_ids) for sequence in self.sequences for insertion in sequence.inserted)


class EpisodePlayer(Protocol):
    """Plays episodes of an environment in an event loop, while the sampler is updated from time to time."""

    async def open(self) -> None:
        """Begin to serve, in this event loop."""

    async def play(self, asked: Sequence[EpisodeRequest]) -> list[Trajectory]:
        """Play episodes concurrently, and return their trajectories in order. Cancelling this kills them.

        Raises:
            SamplerGone: the sampler is lost.
            EngineError: the sampler's record of a turn is missing or wrong.
            SessionError: a session lacks the records of its turns. The message names both.
        """

    @property
    def lost_tokens(self) -> int:
        """Return how many turn tokens were lost with their servers so far. These turns were sampled again."""

    def hold(self) -> None:
        """Let no turn begin until `updated`. Running turns are not interrupted."""

    def updated(self, version: int) -> None:
        """Continue with weights of this version."""

    async def close(self) -> None:
        """End all episodes."""
