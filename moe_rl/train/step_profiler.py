"""Profiles chosen steps of a run with torch.profiler, on chosen ranks: `report.profile`.

A rank writes profiles/step000003-rank00000.json.gz, which Perfetto and Chrome's tracing page open, and on a GPU also
profiles/step000003-rank00000.pickle, a snapshot of the allocator for PyTorch's memory viewer (never run).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from moe_rl.config.schema import ProfileConfig
from moe_rl.whereabouts import HERE

# Allocations and releases that a snapshot of the allocator remembers.
_ALLOCATIONS = 200_000
# Microbatches of each pass that a profile records.
_PROFILED_MICROBATCHES = 8


class _FirstMicrobatches:
    """Lets a profile record the first microbatches of each pass, and what is between passes. An operation takes
    host memory until the profile is written: 24 kB, measured with 100,000 of them."""

    def __init__(self, profiler: profile, activities: list[ProfilerActivity]):
        self._profiler, self._activities, self._on = profiler, activities, True

    def __call__(self, microbatch: int | None) -> None:
        if (on := microbatch is None or microbatch < _PROFILED_MICROBATCHES) != self._on:
            self._profiler.toggle_collection_dynamic(on, self._activities)
            self._on = on


class StepProfiler:
    """Profiles the steps of one rank that the config names.

    Args:
        folder: for the files; made when the first one is written.
        note: tells the run's reader which file is missing, and why.
    """

    def __init__(self, config: ProfileConfig | None, folder: Path, rank: int, note: Callable[[str], object]):
        self._config = config if config is not None and rank in config.ranks else None
        self._folder, self._rank, self._note = folder, rank, note

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile what runs inside, if the config names this step. A file that is above the limit, or
        cannot be written, is not kept, with a note."""
        if self._config is None or step not in self._config.steps:
            yield
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        name, most = f"step{step:06d}-rank{self._rank:05d}", self._config.mib
        try:
            with profile(activities=activities, record_shapes=True) as profiler:
                HERE.listener = _FirstMicrobatches(profiler, activities)
                yield
            self._write(f"{name}.json.gz", profiler.export_chrome_trace, most)
            if on_gpu:
                self._write(f"{name}.pickle", torch.cuda.memory._dump_snapshot, most)
        finally:
            HERE.listener = None
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str, export: Callable[[str], object], most: int) -> None:
        unfinished = self._folder / f".{os.getpid()}-{name}"
        try:
            self._folder.mkdir(exist_ok=True)
            export(str(unfinished))
            size = unfinished.stat().st_size / 2**20
            if size <= most:
                unfinished.replace(self._folder / name)
                return
            why = f"it has {size:.1f} MiB, report.profile.mib is {most}"
        except (OSError, RuntimeError) as error:  # such as a full disk, which must not end the run
            why = str(error)
        with suppress(OSError):
            unfinished.unlink()
        self._note(f"{self._folder / name} is not kept: {why}")
