"""Runs the gateway's app on a socket, in the caller's event loop, and tells it when clients hang up."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from moe_rl.disk import allow_files
from moe_rl.rollout.sampler import nobody

# A client that takes nothing of a reply for so long is cut off: until then its session cannot be finished.
_UNREAD_SECONDS = 60
# Seconds for replies in flight at shutdown.
_LEAVE_SECONDS = 3
# A client that has not sent the head of its first request by then is cut off: each connection takes a file.
_SILENT_SECONDS = 60
# How long a connection stays open between two requests. A client that sends a request just as the server closes gets no
# answer, so this is longer than clients and balancers keep connections: aiohttp 15 s, or 75 s and more if configured;
# Go and reqwest 90 s; balancers 60 to 600 s. At shutdown idle connections are closed at once.
_IDLE_SECONDS = 650


class GatewayListener:
    """Serves an ASGI app on a bound socket until `stop`. The caller handles signals."""

    def __init__(self, app, listener: socket.socket):
        self._listener = listener
        allow_files()  # each client takes one
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000)
        # No access log: addresses may contain keys.
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_LEAVE_SECONDS,
        )
        config.load()
        config.http_protocol_class = type("Protocol", (Connection, config.http_protocol_class), {})
        self._server = _QuietServer(config)

    @property
    def listens(self) -> bool:
        """Return whether it has begun to accept connections."""
        return self._server.started

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Accept no more requests, and let `serve` end. May be called from another thread."""
        self._server.should_exit = True


class Connection:
    """Is mixed into uvicorn's class of connections. The app finds it in `scope["connection"]`.

    ASGI reports a client that leaves while it waits. It does not report that a reply was written to a connection that
    the client had already closed, or that the client closed it without reading the reply.

    Attributes:
        on_hang_up: called when the client leaves before it has read the reply, as far as can be known. An app sets it
            for its request.
    """

    app: Any
    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: Any
    on_hang_up: Callable[[], None] = nobody
    _silent: asyncio.TimerHandle

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        app = self.app

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            self.on_hang_up = nobody  # a new request on this connection means that the client has read the last reply
            scope["connection"] = self
            await app(scope, receive, send)

        self.app = serve

    def connection_made(self, transport: Any) -> None:
        """Handle a new connection."""
        super().connection_made(transport)  # type: ignore[misc]
        self._silent = self.loop.call_later(_SILENT_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        if self.cycle is None:  # no request has begun
            self.transport.close()

    @property
    def hung_up(self) -> bool:
        """Return whether the client has closed the connection, even if the event loop has not heard of it yet."""
        if self.transport.is_closing():
            return True
        look = select.poll()
        look.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(look.poll(0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection. exc: a client that closes it with unread bytes resets it."""
        super().connection_lost(exc)  # type: ignore[misc]
        self._silent.cancel()
        if self.cycle is not None and (exc is not None or not self.cycle.response_complete):
            self.on_hang_up()


class _QuietServer(uvicorn.Server):
    """Leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
