"""Runs a script as the only rank of a run, as torchrun would start it."""

import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def alone(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Wait for the script, and return its exit status and what it wrote."""
    port = str(_free_port())
    rank = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env={**os.environ, **rank, "MASTER_PORT": port, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def _free_port() -> int:
    """Return a port that is free now, below those that Linux gives to outgoing connections by default."""
    while True:
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return free.getsockname()[1]
