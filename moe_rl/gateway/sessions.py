"""Keeps one agent's prompts and completions as a prefix tree of token ids. Has no I/O and no clock.

    turn      one request: its prompt tokens after its parent's tokens, and the completion
    parent    the deepest turn whose prompt and completion together are a prefix of the prompt
    branch    a path from the root to a turn that no other turn continues

                                         kind of the turn, by where its prompt leaves the tree
    first turn of the session            first
    continues an uncontinued turn        continued
    leaves it inside a prompt            forked: other input after the same history, or the same prompt again
    leaves it inside a completion        rewritten: the model's text was changed, dropped or rewritten

A turn is received once its whole reply has been sent to a client that was still connected, or once another turn
continues it. A turn that nobody received is kept and verified like any other, but does not count as the agent's: it
uses no limit, belongs to no branch, and is not trained on. An aborted turn had no reply, so no turn continues it.

The model's text is never tokenised again: a prompt that continues a turn begins with that turn's own ids. Each turn has
a digest over its parent's digest, its tokens, log-probabilities, versions and record, so that changing, swapping or
moving a turn is detected.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import msgspec
import numpy as np

from moe_rl.errors import About, SessionError
from moe_rl.types import Completion, RouteRef, VersionSpan

TurnKind = Literal["first", "continued", "forked", "rewritten"]
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds a session. Turns that nobody received do not count.

    Attributes:
        tokens: each turn counts its prompt tokens after its parent's, and its completion.
        seconds: age after which its key serves nothing.
    """

    tokens: int
    turns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds one request of a session and the model's completion.

    Attributes:
        number: index in the session, in the order in which turns ended.
        parent: number of the turn that it continues; None: it begins at the root.
        input_ids: the prompt tokens after the parent's tokens.
        token_ids, logprobs, versions, finish_reason, routes: as in types.Completion.
        kind: where the prompt left the tree.
        continues: whether its record continues the parent's. If not, it has the rows of the whole prompt.
        shared: length of the prompt's prefix that the session already had.
        digest: over the turn and all turns before it on its branch, 64 hex digits.
        received: whether the agent got it. Known only later, so the session's digest covers it and the turn's does not.
    """

    number: int
    parent: int | None
    input_ids: Ids
    token_ids: Ids
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    routes: RouteRef | None
    continues: bool
    kind: TurnKind
    shared: int
    digest: str = ""
    received: bool = False

    @property
    def ids(self) -> Ids:
        """Return its tokens after the parent's."""
        return self.input_ids + self.token_ids


@dataclass(frozen=True, slots=True)
class PendingTurns:
    """Holds the place of requests being sampled, and their reservation of the session's limits.

    Attributes:
        parent: the turn that they continue.
        prompt: all token ids of the prompt.
        samples: completions of the prompt, each a turn.
        max_tokens: limit for each completion.
    """

    parent: int | None
    prompt: Ids
    samples: int
    max_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """Holds a session that takes no more turns. digest: over the names and all turns, received or not."""

    name: str
    group: str
    turns: list[Turn]
    digest: str


class Session:
    """Holds the turns of one agent.

    Attributes:
        name: the session's name, in record keys and messages. Not secret.
        group: names the sessions whose rewards are compared; the caller's choice.
        turns: in the order in which they ended, including those that nobody received.
        ended: whether it takes no more turns. The caller sets it.
        under_way: requests that have no reply yet. sampling: those of them that are being sampled.
        other_system: requests that failed to continue a turn only because the system prompt differed. The caller
            counts both.
        reopened: how often a restarted gateway has reopened it. The caller sets it.
        shard: the trace shard of its requests, which the caller sets and publishes; None: its routes are not recorded.
        seed: the seeds of its requests derive from it and their numbers. The caller may set it.
        parting: where the system prompt changed in the last request that `other_system` counts.
        home: the place that sampled its last request. calls: its requests that were sampled. `TurnSampler` sets both.

    Args:
        opened: when the session began, on the caller's clock in seconds.
    """

    def __init__(self, name: str, group: str, limits: SessionLimits, opened: float):
        self.name, self.group, self.limits = name, group, limits
        self.turns: list[Turn] = []
        self.ended = False
        self.under_way = self.sampling = self.other_system = 0
        self.reopened = self.calls = 0
        self.parting: str | None = None
        self.home: int | None = None
        self.shard: str | None = None
        # Without the part of the name that differs with each start of a gateway.
        self.seed = name.rpartition("-")[2]
        self._opened = opened
        self._children: dict[int | None, list[int]] = {None: []}
        self._pending: list[PendingTurns] = []

    def refuse_old(self, now: float) -> None:
        """Raise SessionError if the session's time is over."""
        self._refuse("seconds", now - self._opened, self.limits.seconds)

    def is_old(self, now: float) -> bool:
        """Return whether the session's time is over."""
        return now - self._opened > self.limits.seconds

    @property
    def busy(self) -> bool:
        """Return whether a request of the session is being sampled or its reply is being sent."""
        return self.under_way > 0 or bool(self._pending)

    @property
    def received(self) -> list[Turn]:
        """Return the turns that the agent got."""
        return [turn for turn in self.turns if turn.received]

    @property
    def kinds(self) -> Counter[TurnKind]:
        """Return how many received turns there are of each kind."""
        return Counter(turn.kind for turn in self.received)

    def begin(self, prompt: Sequence[int], *, samples: int, max_tokens: int, now: float) -> PendingTurns:
        """Find the place of a prompt in the tree, and reserve its turns' share of the limits.

        Args:
            samples: completions of the prompt.
            max_tokens: most tokens of each; fewer are granted if the session's limit is near.

        Raises:
            SessionError: a limit of the session leaves no room, or it has ended.
        """
        if self.ended:
            raise SessionError("The session has ended", where={"session": self.name}, fault="ended")
        ids = tuple(prompt)
        parent, shared = self._deepest(ids)
        if parent is not None:
            self.tell_received([parent])  # only a client that received it can continue it
        received = self.received
        fed = (len(ids) - shared) * samples
        pending = sum(other.samples for other in self._pending)
        used = sum(len(turn.ids) for turn in received) + sum(other.tokens for other in self._pending)
        tokens_left = self.limits.tokens - used - fed
        self._refuse("turns", len(received) + pending + samples, self.limits.turns)
        self.refuse_old(now)
        self._refuse("tokens", self.limits.tokens - tokens_left + samples, self.limits.tokens)
        granted = min(max_tokens, tokens_left // samples)
        place = PendingTurns(parent, ids, samples, granted, fed + granted * samples)
        self._pending.append(place)
        return place

    def drop(self, place: PendingTurns) -> None:
        """Release the reservation of requests that have ended."""
        self._pending = [other for other in self._pending if other is not place]

    def add(self, place: PendingTurns, completion: Completion, *, continues: bool) -> Turn:
        """Add one of the turns that `place` reserves. Returns it with its number and digest."""
        start = self._length(place.parent)
        kind, shared = self._leaves(place.parent, place.prompt[start:])
        turn = Turn(
            number=len(self.turns),
            parent=place.parent,
            input_ids=place.prompt[start:],
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            routes=completion.routes,
            continues=continues,
            kind=kind,
            shared=start + shared,
        )
        turn = replace(turn, digest=self._digest(turn))
        self._append(turn)
        return turn

    def tell_received(self, numbers: Sequence[int], received: bool = True) -> list[int]:
        """Note whether turns were received. Returns the numbers of the turns for which this changed.

        An aborted turn is never received, and a turn that another continues always is.
        """
        continued = {turn.parent for turn in self.turns}
        news = [
            number
            for number in numbers
            if self.turns[number].received != received
            and (self.turns[number].finish_reason != "abort" if received else number not in continued)
        ]
        for number in news:
            self.turns[number] = replace(self.turns[number], received=received)
        return news

    def restore(self, turn: Turn) -> None:
        """Add a turn from a kept session.

        Raises:
            SessionError: its place or content has changed. The message names the turn.
        """
        number = len(self.turns)
        known = turn.parent is None or 0 <= turn.parent < number
        if turn.number != number or not known:
            raise self._fault(number, "has moved", f"turn {turn.number} after turn {turn.parent}")
        kind, shared = self._leaves(turn.parent, turn.input_ids)
        shared += self._length(turn.parent)
        if (kind, shared) != (turn.kind, turn.shared):
            raise self._fault(number, "has moved", f"{turn.kind}, {turn.shared}", f"{kind}, {shared}")
        if (digest := self._digest(turn)) != turn.digest:
            raise self._fault(number, "has changed", f"digest {digest}", turn.digest)
        self._append(turn)

    def path(self, number: int) -> list[Turn]:
        """Return the turns of a branch from the root to a turn."""
        turns: list[Turn] = []
        current: int | None = number
        while current is not None:
            turns.append(self.turns[current])
            current = turns[-1].parent
        return turns[::-1]

    def ids(self, number: int) -> Ids:
        """Return all tokens up to the end of a turn: those of its prompt and its completion."""
        return tuple(chain.from_iterable(turn.ids for turn in self.path(number)))

    def prompt(self, number: int) -> Ids:
        """Return the tokens of a turn's prompt."""
        turn = self.turns[number]
        return (() if turn.parent is None else self.ids(turn.parent)) + turn.input_ids

    def rows_version(self, number: int) -> int | None:
        """Return the weight version of all rows of a turn's record; None if there are several."""
        versions = set()
        for turn in reversed(self.path(number)):
            versions |= {span.weight_version for span in turn.versions}
            if not turn.continues:
                break
        return versions.pop() if len(versions) == 1 else None

    def branches(self) -> list[list[Turn]]:
        """Return the branches of received turns, ordered by when their last turns ended."""
        received = self.received
        continued = {turn.parent for turn in received}
        return [self.path(turn.number) for turn in received if turn.number not in continued]

    def finish(self) -> FinishedSession:
        """Return the session in its current state."""
        return FinishedSession(self.name, self.group, list(self.turns), _whole_digest(self))

    @classmethod
    def of(cls, finished: FinishedSession) -> Session:
        """Rebuild a session from the result of `finish`.

        Raises:
            SessionError: the place or content of a turn has changed. The message names the turn.
        """
        session = cls(finished.name, finished.group, SessionLimits(0, 0, 0.0), 0.0)
        for turn in finished.turns:
            session.restore(turn)
        if (whole := _whole_digest(session)) != finished.digest:
            raise SessionError(
                "A session lacks turns, has another name, or another turn of it was received",
                where={"session": finished.name},
                got=f"{len(finished.turns)} turns, digest {whole}",
                expected=finished.digest,
                fault="chain",
            )
        return session

    def _refuse(self, what: str, got: float, most: float) -> None:
        """Raise SessionError if a limit is reached."""
        if got > most:
            raise SessionError(
                f"The session's limit of {what} is reached",
                where={"session": self.name},
                got=f"{got:g} {what} with this request",
                expected=f"at most {most:g}",
                fault="limit",
            )

    def _append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._children[turn.number] = []
        if turn.finish_reason != "abort":
            self._children[turn.parent].append(turn.number)
        if turn.parent is not None:
            self.tell_received([turn.parent])

    def _length(self, number: int | None) -> int:
        """Return the number of tokens up to the end of a turn; 0 for None, the root."""
        return 0 if number is None else len(self.ids(number))

    def _fault(self, number: int, what: str, got: str, expected: str | None = None) -> SessionError:
        where: About = {"session": self.name, "turn": number}
        return SessionError(f"A turn of a session {what}", where=where, got=got, expected=expected, fault="chain")

    def _deepest(self, ids: Ids) -> tuple[int | None, int]:
        """Return the parent of a prompt, and how many tokens the two share. Ties go to the newest turn."""
        best: tuple[int, int] = (0, -1)
        left: list[tuple[int | None, int]] = [(None, 0)]
        while left:
            parent, start = left.pop()
            best = max(best, (start, -1 if parent is None else parent))
            for child in self._children[parent]:
                theirs = self.turns[child].ids
                if ids[start : start + len(theirs)] == theirs:
                    left.append((child, start + len(theirs)))
        shared, number = best
        return (None if number < 0 else number), shared

    def _leaves(self, parent: int | None, ids: Ids) -> tuple[TurnKind, int]:
        """Return where a prompt leaves the tree after its parent, and how many of these tokens the tree has."""
        siblings = [self.turns[number] for number in self._children[parent]]
        if not siblings:
            return ("first" if parent is None else "continued"), 0
        alike = [(_common(ids, sibling.ids), sibling) for sibling in siblings]
        shared, nearest = max(alike, key=lambda pair: pair[0])
        said = shared >= len(nearest.input_ids) and shared < len(ids)
        return ("rewritten" if said else "forked"), shared

    def _digest(self, turn: Turn) -> str:
        before = "" if turn.parent is None else self.turns[turn.parent].digest
        content = (
            before,
            _packed(turn.input_ids),
            _packed(turn.token_ids),
            np.ascontiguousarray(turn.logprobs, "<f4").tobytes(),
            turn.versions,
            turn.finish_reason,
            turn.routes,
            turn.continues,
        )
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def _whole_digest(session: Session) -> str:
    content = (session.name, session.group, [(turn.digest, turn.received) for turn in session.turns])
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def _packed(ids: Ids) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _common(ids: Ids, other: Ids) -> int:
    """Return the length of the common prefix."""
    most = min(len(ids), len(other))
    differ = np.flatnonzero(np.asarray(ids[:most]) != np.asarray(other[:most]))
    return int(differ[0]) if len(differ) else most
