"""What requests with the same prompt share in a shard."""

import numpy as np
import pytest

from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sinks import Sinks
from moe_rl.vllm.slots import Recorded, Rows

SPEC = TraceSpec("model", 16, 4, "mm")
PROMPT, ROWS = 20, 24


@pytest.mark.parametrize("row", [None, 0, 15, PROMPT - 1])
def test_rows_are_stored_once_where_every_expert_is_the_same(tmp_path, row):
    """row: the one where the second request chose another expert in one layer; None: it chose the same everywhere."""
    rng = np.random.default_rng(1)
    routes = np.sort(np.argsort(rng.random((ROWS, 2, 16)), -1)[..., :4], -1).astype(np.uint8)
    other = routes.copy()
    if row is not None:
        free = np.setdiff1d(np.arange(16), routes[row, 1])
        other[row, 1] = np.sort([*routes[row, 1, :3], free[0]])
    tokens = np.arange(ROWS, dtype=np.int32)
    sinks = Sinks(tmp_path, SPEC, layers=SPEC.moe_layers, suffix="")
    for number, (key, chosen) in enumerate((("a", routes), ("b", other))):
        ask = RecordingRequest(key, "shard")
        rows = Rows(chosen, tokens, np.zeros(ROWS, np.int64), np.zeros(ROWS, np.uint64))
        sinks.add(Recorded(number, ask, tokens[:PROMPT], cached=0, greedy=False), ask, rows, {})
    refs, store = sinks.publish("shard", {"a": tokens, "b": tokens}, []), TraceStore(tmp_path)
    assert np.array_equal(store.read(refs["a"]).routes, routes)
    assert np.array_equal(store.read(refs["b"]).routes, other)
    shared = PROMPT if row is None else row
    assert store.info(refs["b"]).own_rows == ROWS - (shared if shared >= 8 else 0)
