"""Follows each request until its reply is received, so that a client that asks again gets the same turn.

A client whose connection ends before its reply asks once more: by itself, as the packages of OpenAI and Anthropic do,
or because its user's code does. What it sends is the same, byte for byte. So a request repeats an earlier one of its
session if it is equal, and

    nobody has the reply of the earlier one, and nobody waits for it; or
    the client says that it asks again: the packages count their attempts in `x-stainless-retry-count`, others send an
    `idempotency-key`. This holds where a proxy took the reply, or still waits for it.

It then gets the reply of the earlier one, once that is there. Equal requests of which none of this is true are several
samples of one prompt. A request that was aborted because its client went is sampled anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence

from moe_rl.gateway.asking import AgentReply
from moe_rl.gateway.sessions import PendingTurns, Session
from moe_rl.rollout.sampler import nobody

# Replies of a session that are kept for clients that ask again. A client does so within seconds.
_KEPT_REPLIES = 16


class ClientCall:
    """Is one client's request, as long as its connection lasts.

    Attributes:
        request: digest of all that makes the request what it is.
        size: of its body, in bytes.
        again: whether the client says that it asked before.
        gone: whether it left before its reply was received.
    """

    def __init__(self, path: str, headers: Mapping[str, str], body: bytes):
        attempts, key = headers.get("x-stainless-retry-count", "0"), headers.get("idempotency-key", "")
        self.request = hashlib.sha256(f"{path}\n{key}\n".encode() + body).digest()
        self.size = len(body)
        self.again = bool(key) or attempts.strip("0") != ""
        self.gone = False
        self._heard: Callable[[], None] = nobody

    def leave(self) -> None:
        """Note that the client is gone, and tell the exchange."""
        self.gone = True
        self._heard()

    def on_leave(self, heard: Callable[[], None]) -> None:
        """Call this when the client goes, or at once if it has gone."""
        self._heard = heard
        if self.gone:
            heard()


class AgentExchange:
    """Is a request and what came of it.

    Attributes:
        leave: set when nobody waits any more for what is being sampled.
        replies: for its clients, none if it was aborted. None: they are not kept.
        turns: their numbers.
        place: what is set aside of the session's limits until a client has the replies, or nobody waits for them.
    """

    def __init__(self, request: bytes):
        self.request = request
        self.leave = asyncio.Event()
        self.replies: asyncio.Future[list[AgentReply]] | None = asyncio.get_running_loop().create_future()
        self.turns: list[int] = []
        self.place: PendingTurns | None = None
        self._clients: set[ClientCall] = set()

    @classmethod
    def of(cls, request: bytes, turns: Sequence[int]) -> AgentExchange:
        """Return one whose replies nobody keeps."""
        found = cls(request)
        found.replies, found.turns = None, list(turns)
        return found

    @property
    def waited_for(self) -> bool:
        """Return whether a client waits for it."""
        return bool(self._clients)

    def enter(self, call: ClientCall) -> None:
        """Let a client wait for the replies, until `exit` or until it goes."""
        self._clients.add(call)
        call.on_leave(lambda: self._left(call))

    def exit(self, call: ClientCall) -> None:
        """Let a client wait no more."""
        self._clients.discard(call)

    def _left(self, call: ClientCall) -> None:
        self.exit(call)
        if not self._clients:
            self.leave.set()


class AgentExchanges:
    """Holds the requests of all open sessions."""

    def __init__(self) -> None:
        self._of: dict[str, list[AgentExchange]] = {}

    def repeated(self, session: Session, call: ClientCall) -> AgentExchange | None:
        """Return the exchange that a request repeats."""
        equal = [one for one in self._of.get(session.name, ()) if one.request == call.request]
        for one in reversed(equal):
            if not one.waited_for and one.replies is not None and not _received(session, one):
                return one
        if not call.again or not equal:
            return None
        # With several under way nobody knows which of them it is.
        return equal[-1] if sum(one.waited_for for one in equal) <= 1 else None

    def add(self, session: Session, exchange: AgentExchange) -> None:
        """Remember an exchange, and forget the oldest replies."""
        known = self._of.setdefault(session.name, [])
        known.append(exchange)
        kept = [one for one in known if one.replies is not None and one.replies.done() and not one.waited_for]
        for one in kept[:-_KEPT_REPLIES]:
            one.replies = None

    def drop(self, session: Session, exchange: AgentExchange) -> None:
        """Forget an exchange that gave nothing."""
        self._of[session.name].remove(exchange)

    def forget(self, session: Session) -> None:
        """Forget a session."""
        self._of.pop(session.name, None)


def _received(session: Session, exchange: AgentExchange) -> bool:
    return any(session.turns[number].received for number in exchange.turns)
