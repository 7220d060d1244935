"""Sends updates as a trainer with one rank would, with tensors made by a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from moe_rl.errors import WeightSyncError
from moe_rl.weights.digest import info_of
from moe_rl.weights.shared_disk import write_part
from moe_rl.weights.shared_memory import SegmentWriter
from moe_rl.weights.update import Files, Received, SharedMemory, TensorInfo, WeightUpdate

# A trainer with a single rank.
ALONE = SimpleNamespace(gather=lambda message, kind: [message], device=lambda: torch.device("cpu"))


def part(tensors, source, *, version, replaces=0, number=0, final=True, changed=True) -> WeightUpdate:
    """Make one part of an update that brings `tensors`."""
    infos = [info_of(name, tensor) for name, tensor in tensors.items()]
    return WeightUpdate(version, replaces, number, final, changed, infos, source)


def by_disk(folder, tensors, *, files=2, **about) -> WeightUpdate:
    """Write the tensors to `files` files in the folder, and return an update from them."""
    paths = [folder / f"v{about['version']}-{at}.safetensors" for at in range(files)]
    for at, path in enumerate(paths):
        write_part(path, dict(list(tensors.items())[at::files]))
    return part(tensors, Files([str(path) for path in paths]), **about)


def by_memory(tensors, *, parts=1, **about) -> list:
    """Return an update in `parts` parts, each a context manager; its two segments exist only inside its context."""
    names = list(tensors)
    size = -(-len(names) // parts)
    runs = [names[start : start + size] for start in range(0, len(names), size)]
    last = len(runs) - 1
    return [
        _in_memory({name: tensors[name] for name in run}, number=number, final=number == last, **about)
        for number, run in enumerate(runs)
    ]


@contextmanager
def _in_memory(tensors, **about) -> Iterator[WeightUpdate]:
    half = -(-len(tensors) // 2)
    writers = [SegmentWriter(), SegmentWriter()]
    for at, tensor in enumerate(tensors.values()):
        writers[at >= half].append(tensor)
    try:
        yield part(tensors, SharedMemory([writer.segment() for writer in writers]), **about)
    finally:
        for writer in writers:
            writer.close()


def broadcast(sampler, sender, tensors, *, stream=None, **about) -> bool:
    """Broadcast an update over `sender`; `stream` replaces the (name, tensor) pairs that are really sent.

    Returns whether anything was sent.
    """
    stopped, sent, parts = threading.Event(), [], about.pop("parts", 2)
    whole = part(tensors, Received(), number=1, **about)
    infos = [TensorInfo(info.name, info.dtype, info.shape) for info in whole.tensors]
    arguments = (sender, infos, stream or iter(tensors.items()), stopped)
    thread = threading.Thread(target=lambda: sent.append(_sent(*arguments)), daemon=True)
    thread.start()
    try:
        announced = (whole.version, whole.replaces, 0, False, whole.changed, infos, sender.source())
        sampler.update_weights(WeightUpdate(*announced))
        if parts == 2:
            sampler.update_weights(whole)
    finally:
        stopped.set()
        thread.join(20)
        assert not thread.is_alive()
        broadcast.sent = sent[0]
    return broadcast.sent is True


def _sent(sender, infos, stream, stopped) -> bool | str:
    try:
        return sender.send(infos, stream, stopped)
    except (RuntimeError, WeightSyncError) as error:  # the other end is gone, or the stream itself failed
        sender.close()
        return str(error)
