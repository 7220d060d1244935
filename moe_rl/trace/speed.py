"""How fast a store can be written and read on this machine, measured on its own records."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from moe_rl.errors import TraceError, describe
from moe_rl.trace.codec import decode_chunk, encode_chunk
from moe_rl.trace.selection import Selection, references

_REPEATS = 3
_LAYER_GROUP = 12
_TOKEN_BLOCK = 512


def measure(selection: Selection, *, max_bytes: int = 64 << 20) -> dict[str, object]:
    """Rates in GB/s of raw routes (one or two bytes an id), over the first records up to max_bytes of them.

    encode, decode: chunks of 512 tokens x 12 layers, processor time of one core, best of 3. read: TraceStore.read of
    whole records, wall time, every checksum included, once cold (as cold as the page cache is) and best of 3 after.
    Raises TraceError when there is nothing to read.
    """
    store, refs, size = selection.store, [], 0
    records = []
    started = time.perf_counter()
    for ref in references(selection):
        record = store.read(ref, layers=store.info(ref).layers)
        refs.append((ref, record.layers))
        records.append(record)
        size += record.routes.nbytes
        if size >= max_bytes:
            break
    first = time.perf_counter() - started
    if not size:
        raise TraceError(describe("there are no routes to measure on", where=selection.root))

    chunks = [
        (
            record.spec.num_experts,
            np.ascontiguousarray(record.routes[at : at + _TOKEN_BLOCK, layer : layer + _LAYER_GROUP]),
        )
        for record in records
        for layer in range(0, len(record.layers), _LAYER_GROUP)
        for at in range(0, len(record.routes), _TOKEN_BLOCK)
    ]
    coded = [(experts, chunk.shape, *encode_chunk(chunk, experts)) for experts, chunk in chunks]

    def encode() -> None:
        for experts, chunk in chunks:
            encode_chunk(chunk, experts)

    def decode() -> None:
        for experts, shape, codec, data in coded:
            decode_chunk(codec, data, shape, experts)

    def read() -> None:
        for ref, layers in refs:
            store.read(ref, layers=layers)

    return {
        "records": len(refs),
        "raw_bytes": size,
        "encoded_bytes": sum(len(data) for *_, data in coded),
        "encode_gb_per_core_second": size / _best(encode, time.process_time) / 1e9,
        "decode_gb_per_core_second": size / _best(decode, time.process_time) / 1e9,
        "first_read_gb_per_second": size / first / 1e9,
        "read_gb_per_second": size / _best(read, time.perf_counter) / 1e9,
    }


def _best(run: Callable[[], None], clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        run()
        seconds.append(clock() - start)
    return max(min(seconds), 1e-9)
