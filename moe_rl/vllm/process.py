"""What a process that runs vLLM is given: its environment, and a temporary folder that does not outlive it for long."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import moe_rl

_PREFIX = "moe_rl-engine-"
_SHARED_MEMORY = Path("/dev/shm")
# What torchrun tells its ranks would make the engine believe that it is one of them.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")


def model_runner(capture: str) -> dict[str, str]:
    """What the environment must say: the recorder knows vLLM's first model runner, vLLM's own capture the second."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1" if capture == "native" else "0"}


def child_environment(capture: str) -> dict[str, str]:
    """Environment of the child: the parent's, less what torchrun set, plus what only the environment can tell vLLM."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN)}
    root = str(Path(moe_rl.__file__).resolve().parents[1])
    ours = {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [inherited.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        # Half the cores: threads that wait for each other spin, and two on two busy cores sampled several times slower
        # than one.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM compiles a few helpers of its sampler even when told to be eager: seconds, and a C++ compiler needed.
        "TORCH_COMPILE_DISABLE": "1",
    }
    return inherited | ours | model_runner(capture)


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


class _Lossy(io.FileIO):
    """A file that forgets what its disk refuses."""

    def write(self, data) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def outlive_a_full_log() -> None:
    """Let this process lose what it prints rather than die of it, where its log is on a disk that is full: the trainer
    is told of that in another way."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = _Lossy(stream.fileno(), "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))  # type: ignore[arg-type]
