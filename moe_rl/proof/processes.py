"""Work that each wants a process group of its own, one after the other, without starting Python anew for each."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable


def in_turn(work: Callable[..., None], arguments: Iterable[tuple]) -> None:
    """Call work(*arguments) for each, in a fork of this process, which must not have joined a group. Run by torchrun.

    A model's process groups cannot be got rid of: megatron's gradient hooks hold them, and every one of gloo's keeps a
    thread that wakes up a hundred times a second. A process that ends takes them along. Ends this process, with its
    status, when one of the forks fails.
    """
    fork = multiprocessing.get_context("fork")
    for number, given in enumerate(arguments):
        # Where the ranks meet: torchrun's store has a place for each attempt.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        process = fork.Process(target=work, args=given)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
