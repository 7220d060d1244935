"""Tests the bytes of docs/reference/trace_format.md with an independent parser, and freezes them with a digest."""

import json
import struct
from itertools import combinations
from math import comb

import numpy as np
import pytest
import xxhash

from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.types import Provenance, Span

SPEC = TraceSpec('m"1', 6, 2, "dmhm")
SETS = np.array([[[0, 1], [4, 5]], [[0, 5], [2, 3]], [[1, 4], [0, 2]]], np.uint8)
TOKENS = [7, 70_000, 8]


@pytest.fixture
def raw(tmp_path):
    with ShardWriter(tmp_path, "s", SPEC, layer_group=1, token_block=2) as writer:
        spans = [Span(2, 200, Provenance.PREFILL), Span(1, 201, Provenance.DECODE)]
        first = writer.add("a", SETS, TOKENS, spans, aux={"x": np.array([1.5, -2], np.float16)})
        writer.add("b/1:2", SETS[:1], [9], [Span(1, 201, Provenance.DECODE)], parent=first)
        writer.mark_aborted("b/1:2")
    return (tmp_path / "s.safetensors").read_bytes()


def test_a_parser_written_from_the_document(raw):
    (length,) = struct.unpack("<Q", raw[:8])
    header, text = json.loads(raw[8 : 8 + length]), raw[8 : 8 + length]
    meta = header["__metadata__"]
    assert (length + 8) % 64 == 0
    assert xxhash.xxh3_64_hexdigest(text.replace(meta["digest"].encode(), b"0" * 16)) == meta["digest"]
    assert {key: meta[key] for key in ("layers", "layer_group", "token_block", "order", "records")} == {
        "layers": "1,3",
        "layer_group": "1",
        "token_block": "2",
        "order": "ascending",
        "records": "2",
    }
    context = json.dumps(["moe_rl.routes/2", 'm"1', 6, 2, "dmhm", [1, 3], 1, 2, False], separators=(",", ":"))
    context = xxhash.xxh3_64_digest(context.encode())
    data = raw[8 + length :]
    (begin, middle), (_, end) = header["frames"]["data_offsets"], header["index"]["data_offsets"]
    frames, index = data[begin:middle], data[middle:end]
    assert end == len(data) and xxhash.xxh3_64_hexdigest(index) == meta["index_checksum"]

    # Every number here is below 128, or is written out.
    body = bytes([1]) + b"a" + bytes([2, 2 << 2 | 0, 200 & 127 | 128, 1, 1 << 2 | 1, 201 & 127 | 128, 1, 0])
    sections = []

    def section(stored, checked=None):
        sections.append(stored)
        return xxhash.xxh3_64_digest(stored if checked is None else checked)

    for ids in (TOKENS[:2], TOKENS[2:]):
        width = 3 if max(ids) > 255 else 1
        stored = b"".join(i.to_bytes(width, "little") for i in ids)
        body += bytes([len(stored) << 3 | width - 1]) + section(stored, np.array(ids, "<i4"))
    ranks = sorted(combinations(range(6), 2), key=lambda c: c[::-1])  # combinadic order
    assert len(ranks) == comb(6, 2) <= 16
    for layer in (0, 1):
        for block in (SETS[:2, layer], SETS[2:, layer]):
            bits = sum(ranks.index(tuple(one)) << 4 * i for i, one in enumerate(block.tolist()))
            stored = bits.to_bytes((4 * len(block) + 7) // 8, "little")
            body += bytes([1, len(stored)]) + section(stored)
    stored = np.array([1.5, -2], "<f2").tobytes()
    body += bytes([0, 1, 1]) + b"x" + bytes([9, 1, 2, len(stored) << 1]) + section(stored)
    digest = xxhash.xxh3_64_digest(context + body)
    assert len(body) < 128
    head = b"MRF2" + bytes([len(body)]) + body + digest
    first = head + b"".join(sections)
    assert frames[: len(first)] == first

    second = frames[len(first) :]
    start = bytes([5]) + b"b/1:2" + bytes([1, 1 << 2 | 1, 201 & 127 | 128, 1, 1, 3]) + digest + bytes([0])
    assert second[5:].startswith(start)
    head_bytes = 5 + second[4] + 8
    second_digest = second[head_bytes - 8 : head_bytes]
    assert xxhash.xxh3_64_digest(context + second[5 : head_bytes - 8]) == second_digest
    assert max(len(first), len(second)) < 128
    entries = [bytes([len(first), len(head) << 1 & 127 | 128, len(head) >> 6]) + digest]
    entries += [bytes([len(second), head_bytes << 1 & 127 | 128 | 1, head_bytes >> 6]) + second_digest]
    assert index == b"".join([bytes([0]), *entries])


def test_the_format_has_not_changed_unnoticed(raw):
    """If this fails, the format changed: give it a new version, and say so in docs/reference/trace_format.md."""
    assert xxhash.xxh3_64_hexdigest(raw) == "924e53b1c753d6ce"
