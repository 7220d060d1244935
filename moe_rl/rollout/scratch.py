"""A temporary folder that does not outlive its process for long, whatever ends it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "moe_rl-engine-"
_SHARED_MEMORY = Path("/dev/shm")


class Scratch:
    """A new folder under the system's temporary one, locked for as long as this process lives.

    A killed process cannot remove its own: folders of the same kind that nobody holds are removed here.
    """

    def __init__(self):
        _sweep(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix="new-"))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # It has the name that is looked for only now that it is held.
        self.name = str(made.rename(made.with_name(_PREFIX + made.name.removeprefix("new-"))))

    def cleanup(self) -> None:
        """Remove the folder and all that is in it. May be called again."""
        if self._lock >= 0:
            _remove(Path(self.name))
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or gone by now
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(fd)


def _remove(folder: Path) -> None:
    # vLLM's workers meet by a file there. On CPUs they name memory that they share after it, and never remove that.
    for met in folder.glob("vllm_dist_*"):
        for memory in _SHARED_MEMORY.glob(f"{met.name}-*"):
            memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
