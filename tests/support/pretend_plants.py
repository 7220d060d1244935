"""Plants faults into the recorder on the pretend device, and tells which of them were noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from moe_rl.errors import MoeRLError
from moe_rl.trace.source_sum import rows_of, total
from moe_rl.vllm import capture, recorder
from moe_rl.vllm.capture import RowSums
from tests.support import pretend_cuda
from tests.support.pretend_cuda import CUDA, Device, Stream
from tests.vllm.test_recorder import EXPERTS, LAYERS, Engine

TOKENS = [11, 12, 13, 14, 15]


def recorded(device: Device, folder: Path, *, sums_in_pool: bool = False, wakes: bool = True) -> str:
    """Record a request on the device, let the engine sleep at level 2 and wake, and record another. Returns what was
    noticed; "" if both records are right.

    vLLM attaches the recorder while it loads the weights, inside their pool, whose content that sleep throws away.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capture, "_SIDE_STREAMS", {})
        with pretend_cuda.pool("weights"):
            engine = Engine(folder, patched, device=CUDA)
            if sums_in_pool:
                sums = RowSums(LAYERS, EXPERTS, CUDA)
                patched.setattr(recorder, "RowSums", lambda *_: sums)
        try:
            for step, key in ((0, "before"), (2, "after")):
                engine.recorder.sinks.open("shard", key)
                engine.step(new=[(key, key, [1, 2], 0, TOKENS)])
                engine.step(new=[(f"next to {key}", None, [3], 0, [1])], finished=[key])
                (ref,) = engine.recorder.publish("shard", {key: TOKENS}).result().values()
                rows = engine.routes(TOKENS, range(len(TOKENS)), step)
                assert ref.source_sum == total(key, rows_of(rows, LAYERS, TOKENS, versions=[0] * len(TOKENS)))
                pretend_cuda.unmap("weights")
                if wakes:
                    pretend_cuda.mapped("weights")
        except (MoeRLError, pretend_cuda.PretendFault, AssertionError) as noticed:
            return f"{type(noticed).__name__}: {noticed}"
    return "; ".join(device.faults)


def _no_event(device: Device, folder: Path) -> str:
    """The journal reads a copy at once, and not after its event."""
    with patch.object(recorder, "to_host", lambda tensors: (capture.to_host(tensors)[0], None)):
        return recorded(device, folder)


def _nothing_recorded_for(device: Device, folder: Path) -> str:
    """A snapshot is freed while the side stream may still copy it."""
    with patch.object(pretend_cuda.PretendTensor, "record_stream", lambda *_: None):
        return recorded(device, folder)


def _side_stream_hurries(device: Device, folder: Path) -> str:
    """The side stream copies before the main stream has made the snapshot."""
    with patch.object(Stream, "wait_stream", lambda *_: None):
        return recorded(device, folder)


def _changed_too_soon(device: Device, folder: Path) -> str:
    """A pinned buffer is filled anew before its copy to the device has ended."""
    buffer = torch.zeros(4, pin_memory=True)
    on_device = buffer.to(CUDA, non_blocking=True)
    buffer.fill_(1)
    torch.cuda.synchronize()
    return "; ".join(device.faults) if on_device.sum().item() == 0 else ""


def _index_on_host(device: Device, folder: Path) -> str:
    """Rows are chosen by an index in host memory: the host waits for its copy."""
    torch.arange(8, device=CUDA)[torch.tensor([1, 2])]
    return ", ".join(kind for _, kind, _ in device.syncs if "index" in kind)


PLANTS: dict[str, Callable[[Device, Path], str]] = {
    "a host buffer read before its event": _no_event,
    "no record_stream for another stream": _nothing_recorded_for,
    "no wait for the main stream": _side_stream_hurries,
    "tensors in a pool that is emptied": partial(recorded, sums_in_pool=True),
    "tensors in a pool that is unmapped": partial(recorded, wakes=False),
    "a pinned buffer changed before its copy": _changed_too_soon,
    "a copied index in host memory": _index_on_host,
}


def noticed(folder: Path) -> dict[str, str]:
    """Return {plant: how it was noticed}; "" if it was not. "nothing" is the recorder as it is."""
    found = {}
    for number, (name, plant) in enumerate({"nothing": recorded, **PLANTS}.items()):
        with pretend_cuda.installed() as device:
            found[name] = plant(device, folder / str(number))
    return found
