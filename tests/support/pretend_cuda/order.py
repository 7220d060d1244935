"""Keeps the order that CUDA guarantees: which work a stream, or the host, knows to be finished.

Every value is computed at once, so what is checked is not when work ends but whether the program waited for it. Each
stream counts its work. A wait copies what the other side knows; work that is not known to be finished may still run.

Source: happens-before by vector clocks, as in race detectors (Lamport 1978; Flanagan & Freund, FastTrack, 2009).
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType

import torch

from tests.support.pretend_cuda.places import level_of, place

POISON = 0xEE  # each byte of memory that nothing has been written to yet


class PretendFault(RuntimeError):
    """Reports what would be an error, or a wrong value, on a GPU."""


class Known(dict["Stream", int]):
    """Maps a stream to how much of its work is known to be finished."""

    def learn(self, other: Known) -> None:
        for stream, time in other.items():
            self[stream] = max(time, self.get(stream, 0))

    def covers(self, stream: Stream, time: int) -> bool:
        return self.get(stream, 0) >= time


@dataclass(eq=False)
class Copy:
    """An asynchronous copy with pinned memory, which ends when the host has waited for it: as late as it may."""

    stream: Stream
    time: int
    finish: Callable[[], None]


@dataclass(eq=False)
class Device:
    """Holds the state of the pretend GPU.

    Attributes:
        host: What the host knows to be finished. It is one for all threads.
        faults: What would go wrong on a GPU, where it could not be raised.
        syncs: How often the host waited for the device: by (level, kind, place in the code).
        levels: {function: how often it runs}, see `levels` in pretend_ranks.py. A wait is counted under the
            innermost of them in the stack.
        refuses_waits: Whether a wait of the host is an error, see `torch.cuda.set_sync_debug_mode`.
        graph: The graph that is being captured.
        of_hosts: Names of the process groups that were made for gloo, and so for tensors in host memory.
        pool: Name of the memory pool that new memory comes from.
    """

    host: Known = field(default_factory=Known)
    copies: list[Copy] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    syncs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    refuses_waits: bool = False
    graph: list | None = None
    of_hosts: set[str] = field(default_factory=set)
    pool: str = ""
    blocks: dict[str, list] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.default, self.nccl = Stream(device=self), Stream(device=self)
        self._local, self._levels = threading.local(), dict[CodeType, str]()
        self._lock = threading.RLock()

    @property
    def levels(self) -> Mapping[Callable, str]:
        raise AttributeError("levels are only set")

    @levels.setter
    def levels(self, levels: Mapping[Callable, str]) -> None:
        self._levels = {inspect.unwrap(function).__code__: level for function, level in levels.items()}

    @property
    def current(self) -> Stream:
        return getattr(self._local, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._local.stream = stream

    def wait(self, kind: str, known: Known) -> None:
        """Let the host wait for work, which is noted under this kind."""
        if self.graph is not None:
            raise PretendFault(f"the host waits while a graph is captured: {kind} at {place()}")
        if kind and self.refuses_waits:
            raise PretendFault(f"the host waits, which set_sync_debug_mode refuses: {kind} at {place()}")
        if kind:
            self.syncs[level_of(self._levels), kind, place()] += 1
        with self._lock:
            self.host.learn(known)
            done = [one for one in self.copies if self.host.covers(one.stream, one.time)]
            self.copies = [one for one in self.copies if one not in done]
        for one in done:
            one.finish()

    def copy_later(self, finish: Callable[[], None]) -> None:
        stream = self.current
        with self._lock:
            self.copies.append(Copy(stream, stream.time, finish))


class Stream:
    """Stands for torch.cuda.Stream and torch.Stream."""

    device_index = 0
    cuda_stream = 0

    def __init__(self, *_: object, device: object = None, **__: object):
        self._device = device if isinstance(device, Device) else current()
        self.time, self.known, self._before = 0, Known(), []

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def work(self) -> int:
        """Begin work, after all that the host knows and after earlier work of this stream. Return its number."""
        self.time += 1
        self.known.learn(self._device.host)
        self.known[self] = self.time
        return self.time

    def now(self) -> Known:
        return Known(self.known)

    def wait_stream(self, other: Stream) -> None:
        self.known.learn(other.known)

    def wait_event(self, event: Event) -> None:
        self.known.learn(event.known)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.wait("Stream.synchronize", self.known)

    def query(self) -> bool:
        return all(self._device.host.covers(*one) for one in self.known.items())

    def __enter__(self) -> Stream:
        self._before.append(self._device.current)
        self._device.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before.pop()


class Event:
    """Stands for torch.cuda.Event and torch.Event. It has happened at the third question, or when it is waited for."""

    def __init__(self, *_: object, **__: object):
        self.known, self._asked = Known(), 0

    def record(self, stream: Stream | None = None) -> None:
        self.known, self._asked = (stream or current().current).now(), 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current().current).wait_event(self)

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            current().wait("", self.known)
        return all(current().host.covers(*one) for one in self.known.items())

    def synchronize(self) -> None:
        current().wait("Event.synchronize", self.known)

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Block:
    """Stands for memory of the device that some tensors share, until the last of them is gone."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage, self.device, self.mapped = storage, current(), True
        self.home = self.device.current
        self._written: tuple[Stream, int] | None = None
        self._used: dict[Stream, int] = {}
        self._kept_for: set[Stream] = set()
        if self.device.pool:
            self.device.blocks.setdefault(self.device.pool, []).append(self)

    def use(self, stream: Stream, time: int, *, writes: bool, what: str) -> None:
        """Note that work of a stream uses this memory. Raise PretendFault if it does not wait for earlier work."""
        if not self.mapped:
            raise PretendFault(f"illegal memory access: {what} uses memory of a pool that is unmapped, at {place()}")
        if self._written is not None and not stream.known.covers(*self._written):
            raise PretendFault(f"{what} does not wait for the stream that writes its input, at {place()}")
        if writes:
            if not all(stream.known.covers(*one) for one in self._used.items()):
                raise PretendFault(f"{what} does not wait for the stream that reads what it overwrites, at {place()}")
            self._written = stream, time
        self._used[stream] = time

    def record_stream(self, stream: Stream) -> None:
        self._kept_for.add(stream)

    def __del__(self) -> None:
        # The allocator gives the memory to the next work of its home stream.
        for stream, time in self._used.items():
            known = stream is self.home or stream in self._kept_for
            if not (known or self.home.known.covers(stream, time) or self.device.host.covers(stream, time)):
                self.device.faults.append(f"memory is freed while another stream uses it, at {place()}")


_device: Device | None = None


def current() -> Device:
    """Return the device that is installed."""
    assert _device is not None, "install the pretend device first"
    return _device


def install(device: Device | None) -> None:
    global _device
    _device = device
