"""Ties processes to the life of the process that started them.

`python -m moe_rl.parent PID ...` runs torchrun with the remaining arguments, and ends when the process PID that started
it ends, for whatever reason: see `torchrun`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_PR_SET_PDEATHSIG = 1
_MARK = "MOE_RL_STARTED_BY"
_SEARCHES = 2
_SEARCH_SECONDS = 10.0
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 2.0


def belong_to(parent: int) -> None:
    """Make the kernel kill this process when the parent's thread that started it ends, for whatever reason.

    SIGTERM is ignored from now on: schedulers send it to every process of a job, but the parent decides when this
    process ends.
    """
    _tie(parent, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def torchrun(ranks: int, *options: str) -> list[str]:
    """Return the command that starts ranks on this machine; the caller appends their script. The thread that runs it
    must outlive the ranks: when the thread ends, torchrun gets SIGTERM and ends the ranks.

    options: torchrun's options.
    """
    tied = [sys.executable, "-m", __name__, str(os.getpid())]
    return [*tied, "--standalone", "--nproc-per-node", str(ranks), *options]


def take_along() -> None:
    """Have all processes that this one starts from now on killed as soon as it has ended, for whatever reason.

    A process of its own waits for that. vLLM's engine does not notice that its server was killed: it would wait for
    requests for ever, with the memory of its device.
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    mark = mark_children(os.environ)
    waits = f"from moe_rl.parent import _bury; _bury({os.getpid()}, {mark!r})"
    subprocess.Popen([sys.executable, "-c", waits], env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _bury(parent: int, mark: str) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    kill_marked(mark)


def mark_children(environment: dict[str, str] | os._Environ[str]) -> str:
    """Put a mark into an environment, and return it, see `kill_marked`."""
    environment[_MARK] = mark = secrets.token_hex(16)
    return mark


def kill_marked(mark: str) -> None:
    """Kill every process that was started with this mark in its environment, until none is left.

    The kernel keeps the environment that a program was started with; a forked child has its parent's. Python's resource
    trackers get two seconds: as soon as the others have ended, they remove the shared memory that those left.
    """
    wanted, began, searches = f"{_MARK}={mark}".encode(), time.monotonic(), 0
    # One search may miss a process that is just starting another program.
    while searches < _SEARCHES and time.monotonic() < began + _SEARCH_SECONDS:
        pids = [pid for pid in _pids() if wanted in _read_of(pid, "environ").split(b"\0")]
        searches = 0 if pids else searches + 1
        for pid in pids:
            if time.monotonic() < began + _TRACKER_SECONDS and _TRACKER in _read_of(pid, "cmdline"):
                time.sleep(0.01)  # it needs a processor to end
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read_of(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _tie(parent: int, number: int) -> None:
    """Make the kernel send a signal when the parent's thread that started this process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the signal was requested
        sys.exit("the parent was gone before its child began")


if __name__ == "__main__":
    _tie(int(sys.argv.pop(1)), signal.SIGTERM)
    from torch.distributed.run import main

    with TemporaryDirectory() as logs:  # torch makes such a folder itself, and leaves it
        sys.argv[1:1] = ["--log-dir", logs]
        main()
