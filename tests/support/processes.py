"""Looks at processes of this machine, and waits for what they do."""

import time
from collections.abc import Callable
from pathlib import Path


def state(pid: int) -> str:
    """Return the letter of a process's state in /proc, or "X" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid: int) -> bool:
    """Tell whether a process is alive. A zombie that nobody has reaped counts as dead."""
    return state(pid) not in "ZX"


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait until the condition holds; return whether it did within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False
