"""Measures how many turns a second the sinks of one server record and publish, on a store whose fsync is slow."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.types import RouteRef
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sinks import Sinks
from moe_rl.vllm.slots import Recorded, Rows

FSYNC_SECONDS = 0.015
# Routes of a model with 48 layers of 128 experts.
SPEC = TraceSpec("night", 128, 8, "m" * 48)
TURNS, ROWS = 40, 50


def turns_published_per_second(dialogues: int = 16) -> float:
    """Record dialogues of 40 turns side by side, each turn as soon as the reference to the turn before is there, and
    publish their shard."""
    rng, total, real = np.random.default_rng(1), TURNS * ROWS, os.fsync
    routes = np.sort(np.argsort(rng.random((total, 48, 128)), -1)[..., :8], -1).astype(np.uint8)
    tokens, zeros = np.arange(total, dtype=np.int32), np.zeros(total, np.int64)

    def slow(fd: int) -> None:
        time.sleep(FSYNC_SECONDS)
        real(fd)

    with tempfile.TemporaryDirectory() as folder, patch("os.fsync", slow):
        sinks, refs = Sinks(Path(folder), SPEC, layers=SPEC.moe_layers, suffix=""), dict[int, RouteRef]()
        begun = time.perf_counter()
        for end in range(ROWS, total + 1, ROWS):
            for dialogue in range(dialogues):
                key = f"{dialogue}/{end}"
                ask = RecordingRequest(key, "step", parent=refs.get(dialogue))
                rows = Rows(routes[:end], tokens[:end], zeros[:end], zeros[:end].astype(np.uint64))
                request = Recorded(0, ask, tokens[: end - ROWS // 2], cached=0, greedy=False)
                sinks.add(request, ask, rows, {})
                refs[dialogue] = sinks.publish("step", {key: tokens[:end]}, [], keep_open=True).result()[key]
        sinks.publish("step", {}, []).result()
        seconds = time.perf_counter() - begun
        assert len(TraceStore(Path(folder)).records("step")) == dialogues * TURNS
    return dialogues * TURNS / seconds
