"""Describes episodes that a run samples: what is asked for, and what came of each as sequences to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from moe_rl.types import Completion, Prompt, Verdict


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Asks for one episode.

    Attributes:
        name: of its session, unique in a run. The names of its trace shards follow from it.
        seed: what the seeds of its turns follow from.
        prompt: whose columns are the row that the environment gets.
        temperature, top_p, top_k, min_p: how all its turns are sampled, as in GenerateRequest.
        kept: whether its routes are recorded, and its session is checked and kept.
    """

    name: str
    seed: str
    prompt: Prompt
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Holds one episode that was played.

    Attributes:
        name: of its session.
        sequences: what the agent received of the model, each token once; none if that is nothing. They share the
            reward.
        verdict: the environment's reward. An episode that failed has a failed verdict, and says why.
        turns, undelivered, branches: numbers of turns that the agent received and did not, and of branches.
        digest: of its session.
        other_system: requests that would have continued a turn if the system's text were the same.
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
        """Return all that the model said as one completion, to measure and to name. It has no prompt and no record."""
        said = self.sequences
        return Completion(
            key=self.name,
            prompt_token_ids=(),
            token_ids=sum((one.token_ids for one in said), ()),
            logprobs=np.concatenate([np.empty(0, np.float32), *(one.logprobs for one in said)]),
            finish_reason=said[-1].finish_reason if said else "abort",
            versions=sum((one.versions for one in said), ()),
            routes=None,
        )

    def sealed(self) -> Trajectory:
        """Return this trajectory with a verdict that says what it is of."""
        return replace(self, verdict=replace(self.verdict, of=self.whole.seal))

    @property
    def forwarded(self) -> int:
        """Return the number of tokens of all its sequences that are forwarded in training."""
        return sum(one.forwarded for one in self.sequences)

    @property
    def inserted(self) -> int:
        """Return the number of tokens that the model was given between its turns."""
        return sum(len(one.token_ids) for sequence in self.sequences for one in sequence.inserted)


class EpisodePlayer(Protocol):
    """Plays episodes of an environment."""

    def play(self, asked: Sequence[EpisodeRequest]) -> list[Trajectory]:
        """Play episodes side by side, and return what came of each, in their order.

        Raises:
            SamplerGone: the sampler is lost.
            EngineError: the sampler has no right record of a turn.
            SessionError: a session does not have the records of its turns. The message names both.
        """
        ...


class LivePlayer(Protocol):
    """Plays episodes in an event loop, while the sampler gets new weights from time to time."""

    async def open(self) -> None:
        """Begin to serve, in this event loop."""
        ...

    async def play(self, asked: Sequence[EpisodeRequest]) -> list[Trajectory]:
        """Play episodes, see EpisodePlayer.play. If this is cancelled, they are killed."""
        ...

    @property
    def lost_tokens(self) -> int:
        """Return how many tokens of turns were lost with their servers so far. These turns were sampled again."""
        ...

    def hold(self) -> None:
        """Let no turn begin until `updated`. Those that are under way stay so."""
        ...

    def updated(self, version: int) -> None:
        """Go on, with weights of this version."""
        ...

    async def close(self) -> None:
        """End all episodes."""
        ...
