"""Tracks each request until its reply is received, so that a client that retries gets the same turn.

A client whose connection ends before its reply retries: by itself, as the packages of OpenAI and Anthropic do, or
because its user's code does. It sends the same bytes. So a request repeats an earlier one of its session if it is
equal, and

    nobody has received the earlier reply, and nobody waits for it; or
    the client marks it as a retry: the packages count their attempts in `x-stainless-retry-count`, others send an
    `idempotency-key`. This works even if a proxy received the reply or still waits for it.

It then gets the earlier request's reply, once available. Other equal requests are separate samples of one prompt. A
request that was aborted because its client went away is sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence

from moe_rl.gateway.asking import AgentReply
from moe_rl.gateway.sessions import PendingTurns, Session
from moe_rl.rollout.sampler import nobody

# Replies of a session that are kept for retries. A client retries within seconds.
_KEPT_REPLIES = 16


class ClientCall:
    """Represents one client's request while its connection lasts.

    Attributes:
        request: digest of everything that identifies the request.
        size: the bytes of its body.
        again: whether the client marks it as a retry.
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
        """Call `heard` when the client leaves, or at once if it has left."""
        self._heard = heard
        if self.gone:
            heard()


class AgentExchange:
    """Represents a request and its result.

    Attributes:
        leave: set once nobody waits for the samples any more, or the session is aborted.
        replies: for its clients, empty if it was aborted. None: they are not kept.
        turns: numbers of the sampled turns.
        readers: the clients to which the replies were sent, without those that left them unread.
        place: the reservation of the session's limits, until a client has the replies or nobody waits for them.
    """

    def __init__(self, request: bytes, turns: Sequence[int] | None = None):
        """turns: those of an exchange without its replies."""
        self.request = request
        self.leave = asyncio.Event()
        self.replies: asyncio.Future[list[AgentReply]] | None = None
        if turns is None:
            self.replies = asyncio.get_running_loop().create_future()
        self.turns = list(turns or ())
        self.place: PendingTurns | None = None
        self.readers: set[ClientCall] = set()
        self._clients: set[ClientCall] = set()

    @property
    def waited_for(self) -> bool:
        """Return whether a client waits for it."""
        return bool(self._clients)

    def enter(self, call: ClientCall) -> None:
        """Register a client that waits for the replies, until `exit` or until it leaves."""
        self._clients.add(call)
        call.on_leave(lambda: self._left(call))

    def exit(self, call: ClientCall) -> None:
        """Unregister a waiting client."""
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
        equal = [exchange for exchange in self._of.get(session.name, ()) if exchange.request == call.request]
        for exchange in reversed(equal):
            if not exchange.waited_for and exchange.replies is not None and not _received(session, exchange):
                return exchange
        if not call.again or not equal:
            return None
        # With several waited for, it is unknown which one is repeated.
        return equal[-1] if sum(exchange.waited_for for exchange in equal) <= 1 else None

    def add(self, session: Session, exchange: AgentExchange) -> None:
        """Remember an exchange, and forget the oldest replies."""
        known = self._of.setdefault(session.name, [])
        known.append(exchange)
        kept = [past for past in known if past.replies is not None and past.replies.done() and not past.waited_for]
        for past in kept[:-_KEPT_REPLIES]:
            past.replies = None

    def drop(self, session: Session, exchange: AgentExchange) -> None:
        """Forget an exchange without a result."""
        if session.name in self._of:  # it may have ended while the request was rendered
            self._of[session.name].remove(exchange)

    def abort(self, session: Session) -> None:
        """Abort the requests of a session that are still being sampled."""
        for exchange in self._of.get(session.name, ()):
            exchange.leave.set()

    def forget(self, session: Session) -> None:
        """Forget a session."""
        self._of.pop(session.name, None)


def _received(session: Session, exchange: AgentExchange) -> bool:
    return any(session.turns[number].received for number in exchange.turns)
