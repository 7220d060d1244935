"""Profiles chosen steps of a run with torch.profiler, on chosen ranks: `report.profile`.

A rank writes profiles/step000003-rank00000.json.gz, which Perfetto and Chrome's tracing page open, and on a GPU also
profiles/step000003-rank00000.pickle, a snapshot of the allocator for PyTorch's memory viewer (never run).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from moe_rl.config.schema import ProfileConfig

# Allocations and releases that a snapshot of the allocator remembers.
_ALLOCATIONS = 200_000


class StepProfiler:
    """Profiles the steps of one rank that the config names.

    Args:
        folder: for the files; made when the first one is written.
    """

    def __init__(self, config: ProfileConfig | None, folder: Path, rank: int):
        self._config = config if config is not None and rank in config.ranks else None
        self._folder, self._rank = folder, rank

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile what runs inside, if the config names this step. A file above the limit is removed, with a note."""
        if self._config is None or step not in self._config.steps:
            yield
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, record_shapes=True) as profiler:
            yield
        self._folder.mkdir(exist_ok=True)
        name, most = f"step{step:06d}-rank{self._rank:05d}", self._config.mib
        self._write(f"{name}.json.gz", profiler.export_chrome_trace, most)
        if on_gpu:
            self._write(f"{name}.pickle", torch.cuda.memory._dump_snapshot, most)
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str, export: Callable[[str], object], most: int) -> None:
        unfinished = self._folder / f".{os.getpid()}-{name}"
        export(str(unfinished))
        size = unfinished.stat().st_size / 2**20
        if size > most:
            unfinished.unlink()
            print(f"{self._folder / name} is removed: it has {size:.1f} MiB, report.profile.mib is {most}", flush=True)
        else:
            unfinished.replace(self._folder / name)
