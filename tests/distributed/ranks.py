"""Worlds of ranks for tests. A world is started once, and does one job after the other: see worker.py."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from tools.dev.runs import ROOT, python_path

WORKER = Path(__file__).with_name("worker.py")


class Leave(Exception):
    """A job raises this where the process of its rank is to end behind it, sockets and all. found: what it returns."""

    def __init__(self, found: Any):
        self.found = found


def torchrun(ranks: int, script, *arguments, timeout: float = 600) -> subprocess.CompletedProcess:
    """Run a script under torchrun on a free port, to its end; its output is captured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # what follows two dashes is not torchrun's own, also where it looks like that
    command += ["--", str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=timeout)


def _environment() -> dict[str, str]:
    return os.environ | python_path() | {"OMP_NUM_THREADS": "1"}


class Origin:
    """The process that the ranks of all worlds are forked from: see worker.py."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def world(self, place: Path, ranks: int) -> psutil.Process:
        """Start a world; return its agent."""
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen([sys.executable, "-u", WORKER], cwd=ROOT, env=_environment(), **pipes)
        print(json.dumps([str(place), ranks, os.getpid()]), file=self._process.stdin, flush=True)
        return psutil.Process(int(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


ORIGIN = Origin()


class World:
    """As many ranks as asked for, which start with the first job."""

    def __init__(self, ranks: int, folder: Path):
        """folder: for jobs, and for what comes of them."""
        self._ranks, self._folder = ranks, folder
        self._agent: psutil.Process | None = None
        self._jobs = self._starts = 0

    def run(self, job: Callable, *arguments, timeout: float = 600) -> list[Any]:
        """Run job(*arguments) on every rank; what each of them returned.

        job: a function at the top of a module. Raises AssertionError with the traceback of each rank that failed; the
        next job then gets new ranks.
        """
        if self._agent is None or not self._agent.is_running():
            self._start()
        number, self._jobs = self._jobs, self._jobs + 1
        _publish(self._place / f"{number}.job", pickle.dumps((job, arguments)))
        files = [self._place / f"{number}-rank{rank}.pt" for rank in range(self._ranks)]
        limit = time.monotonic() + timeout
        try:
            while not all(file.exists() for file in files):
                ended = not self._agent.is_running() and not all(file.exists() for file in files)
                if ended or time.monotonic() > limit:
                    raise AssertionError(f"{job.__module__}.{job.__name__}{arguments}: {self._failure(number)}")
                time.sleep(0.02)
            found = [torch.load(file, weights_only=False) for file in files]
            if any(file.with_suffix(".left").exists() for file in files):
                self.close()  # the next job needs new ranks, and these may take a while to end
        except BaseException:
            self.close()
            raise
        for file in files:
            file.unlink()
        return found

    def close(self) -> None:
        """End all processes of the ranks."""
        if self._agent is not None:
            with suppress(psutil.NoSuchProcess):  # it may end by itself just now
                for process in [*self._agent.children(recursive=True), self._agent]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                self._agent.wait()
            self._agent = None

    def _start(self) -> None:
        self._place = self._folder / f"{self._ranks}-{self._starts}"
        self._starts, self._jobs = self._starts + 1, 0
        self._place.mkdir()
        self._agent = ORIGIN.world(self._place, self._ranks)

    def _failure(self, number: int) -> str:
        said = [(path.stem, path.read_text()) for path in sorted(self._place.glob(f"{number}-rank*.error"))]
        if not said:
            return "no rank gave a reason: " + (self._place / "log").read_text()[-4000:]
        return "\n".join(f"{rank}:\n{error[-4000:]}" for rank, error in said)


def _publish(path: Path, content: bytes) -> None:
    """Write a file that is whole as soon as it is there."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)
