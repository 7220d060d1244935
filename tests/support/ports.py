"""Finds a port for a process that is started later."""

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that is free now, below those that Linux gives to outgoing connections by default."""
    while True:
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return free.getsockname()[1]
