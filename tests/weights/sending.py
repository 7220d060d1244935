"""Sends updates as a trainer with one rank would, with tensors made by a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from moe_rl.errors import WeightSyncError
from moe_rl.weights.digest import info_of
from moe_rl.weights.shared_disk import write_part
from moe_rl.weights.shared_memory import SegmentWriter
from moe_rl.weights.update import Broadcast, Files, Received, SharedMemory, TensorInfo, WeightUpdate

BUCKET = 400  # bytes

# A trainer with a single rank.
ALONE = SimpleNamespace(
    gather=lambda message, kind: [message],
    device=lambda: torch.device("cpu"),
    give_back=lambda: None,
    stage=lambda: 0,
)


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


def in_turns(buckets, *senders) -> Broadcast:
    """Say that these senders take turns with the buckets."""
    turns = [(number % len(senders), len(infos)) for number, infos in enumerate(buckets)]
    return Broadcast([sender.at for sender in senders], turns, senders[0].workers + 1, 1)


def in_buckets(infos, size):
    """Cut descriptions into runs of at most `size` bytes, or of one tensor that is larger."""
    buckets: list[list[TensorInfo]] = [[]]
    for info in infos:
        if buckets[-1] and sum(one.size for one in buckets[-1]) + info.size > size:
            buckets.append([])
        buckets[-1].append(info)
    return buckets


def broadcast(sampler, senders, tensors, *, bucket=BUCKET, sent=None, streams=None, **about) -> bool:
    """Broadcast an update over one sender or several, which take turns with buckets of so many bytes.

    `sent` replaces the tensors that are really sent, `streams` the (name, tensor) pairs of each sender. Returns whether
    all sent everything; `broadcast.sent` has what each of them says.
    """
    sent = sent or tensors
    senders = senders if isinstance(senders, list) else [senders]
    stopped, parts = threading.Event(), about.pop("parts", 2)
    whole = part(tensors, Received(), number=1, **about)
    infos = [TensorInfo(info.name, info.dtype, info.shape) for info in whole.tensors]
    buckets = in_buckets(infos, bucket)
    shares = [buckets[at :: len(senders)] for at in range(len(senders))]
    streams = streams or [((info.name, sent[info.name]) for run in share for info in run) for share in shares]
    announced = (whole.version, whole.replaces, 0, False, whole.changed, infos, in_turns(buckets, *senders))
    with ThreadPoolExecutor(len(senders)) as pool:
        sending = [pool.submit(_sent, *one, stopped) for one in zip(senders, shares, streams, strict=True)]
        try:
            sampler.update_weights(WeightUpdate(*announced))
        finally:
            stopped.set()
            broadcast.sent = [one.result(20) for one in sending]
    sent_all = broadcast.sent == [True] * len(senders)
    if sent_all and parts == 2:  # otherwise the trainer ends with its own error
        sampler.update_weights(whole)
    return sent_all


def _sent(sender, buckets, stream, stopped) -> bool | str:
    try:
        return sender.send(buckets, stream, stopped)
    except (
        RuntimeError,
        ConnectionError,
        WeightSyncError,
    ) as error:  # the other end is gone, or the stream itself failed
        sender.close()
        return str(error)
