"""Ties a child process to the life of its parent.

`python -m moe_rl.parent PID ...` runs torchrun with the remaining arguments, and ends when the process PID that started
it ends, for whatever reason: see `torchrun`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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

    main()
