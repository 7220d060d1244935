"""Runs a script as the only rank of a run, as torchrun would start it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]


def alone(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Wait for the script, and return its exit status and what it wrote."""
    rank = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env={**os.environ, **rank, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
