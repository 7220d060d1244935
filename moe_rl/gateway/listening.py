"""Runs the gateway's app on a socket, inside the caller's event loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

# Time for replies in flight at shutdown.
_LEAVE_SECONDS = 3
# How long a connection stays open between two requests. A client that sends one just when the server closes gets no
# answer, so this is longer than clients and balancers keep connections: aiohttp 15 s, or 75 s and more where a user
# says so; Go and reqwest 90 s; balancers 60 to 600 s. At shutdown idle connections are closed at once.
_IDLE_SECONDS = 650


class GatewayListener:
    """Serves an ASGI app on a bound socket until `stop`. Signals are the caller's."""

    def __init__(self, app, listener: socket.socket):
        self._listener = listener
        # No access log: addresses may contain keys.
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_LEAVE_SECONDS,
            )
        )

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


class _QuietServer(uvicorn.Server):
    """Leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
