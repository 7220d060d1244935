"""Ties a child process to the life of its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def belong_to(parent: int) -> None:
    """Make the kernel kill this process when the parent's thread that started it ends, for whatever reason.

    SIGTERM is ignored from now on: schedulers send it to every process of a job, but the parent decides when this one
    ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the signal was requested
        sys.exit("the parent was gone before its child began")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
