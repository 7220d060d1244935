"""Prepares a process that runs vLLM: its environment, its connection to the parent, and a temporary folder that is
removed soon after it ends."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

import moe_rl
from moe_rl.messages import Channel, Message
from moe_rl.parent import belong_to

_PREFIX = "moe_rl-engine-"
_SHARED_MEMORY = Path("/dev/shm")
# With torchrun's variables the engine would take itself for one of torchrun's ranks.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")


def model_runner(capture: str) -> dict[str, str]:
    """Return the variable that selects vLLM's model runner: V1 for the recorder, V2 for vLLM's own capture."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1" if capture == "native" else "0"}


def child_environment(capture: str, number: int = 0, engines: int = 1, *, compiles: bool = False) -> dict[str, str]:
    """Return the child's environment: the parent's without torchrun's variables, plus settings that only variables can
    make.

    Args:
        capture: rollout.capture.
        number, engines: the child is engine `number` of so many on this host. It sees the GPU of the rank with that
            local number, and gets its part of the processor.
        compiles: whether the child is an engine whose forward pass is compiled.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN)}
    root = str(Path(moe_rl.__file__).resolve().parents[1])
    settings = {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [inherited.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        # Half the cores: waiting threads spin, and with two threads on two busy cores sampling was several times slower
        # than with one.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2 // engines)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if compiles:  # though this process, a trainer on a CPU or the pool, may not
        settings |= dict.fromkeys(("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"), "0")
    else:
        # vLLM compiles parts of its sampler even in eager mode, which takes seconds and needs a C++ compiler.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    if engines > 1:
        gpus = inherited.get("CUDA_VISIBLE_DEVICES")
        visible = [str(gpu) for gpu in range(engines)] if gpus is None else gpus.split(",")
        settings["CUDA_VISIBLE_DEVICES"] = "".join(visible[number : number + 1])  # none without GPUs
    return inherited | settings | model_runner(capture)


class Scratch:
    """Creates a temporary folder, locked while this process lives.

    A killed process cannot remove its folder, so every new Scratch removes old unlocked folders.
    """

    def __init__(self):
        _sweep(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix="new-"))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed only now, under the lock, so that no other process can find and remove it unlocked.
        self.name = str(made.rename(made.with_name(_PREFIX + made.name.removeprefix("new-"))))

    def cleanup(self) -> None:
        """Remove the folder with its content. May be called repeatedly."""
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
    # vLLM's workers rendezvous through a file there. On CPUs they name shared memory after it, and never remove that
    # memory.
    for met in folder.glob("vllm_dist_*"):
        for memory in _SHARED_MEMORY.glob(f"{met.name}-*"):
            memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class _Lossy(io.FileIO):
    """Drops output that the disk refuses."""

    def write(self, data) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def channel_to_parent[M: Message](calls: msgspec.msgpack.Decoder[M]) -> Channel[M]:
    """Set up a child that `rollout.child_process` has spawned: it ends with its parent, and survives a full disk of its
    log. Returns the connection to the parent.

    Args:
        calls: decoder of the parent's messages.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    belong_to(parent)
    _outlive_a_full_log()
    return Channel(socket.socket(fileno=descriptor), calls)


def _outlive_a_full_log() -> None:
    """Let this process continue when the disk of its log is full; output is then lost.

    The trainer detects the full disk separately.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = _Lossy(stream.fileno(), "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))  # type: ignore[arg-type]
