"""Tests that damage is never silent: whatever happens to the bytes, a read returns what was written or an error."""

import json
import os
import shutil
import time
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import xxhash

from moe_rl.errors import TraceError
from moe_rl.trace import TraceStore, frame, ranked
from moe_rl.trace.manifest import MANIFEST
from moe_rl.trace.primitives import pack_ints, varint
from moe_rl.trace.shard import header_bytes, index_bytes, parse_header, parse_index
from moe_rl.types import RoutePart, RouteRef
from tests.support.refusals import refused, tells


def _checks(shard):
    """Return name -> a read that says whether its result is right. Together the reads use every byte."""
    refs, routes, tokens = shard.refs, shard.routes, shard.tokens

    def whole(i):
        def check(store):
            record = store.read(refs[i])
            right = np.array_equal(record.routes, routes[i]) and np.array_equal(record.token_ids, tokens[i])
            versions = all(span.weight_version == 7 for span in record.spans)
            return right and versions and (record.key, record.aborted) == (refs[i].key, i == len(refs) - 1)

        return check

    def a_slice(store):
        last = len(routes[-1])
        record = store.read(refs[-1], layers=[1, 3], rows=(1, last))
        same = np.array_equal(record.routes, routes[-1][1:, [1, 2]])
        return same and np.array_equal(record.token_ids, tokens[-1][1:])

    def batch(store):
        out = np.empty((sum(map(len, routes)), 3, 4), np.uint8)
        store.read_batch([(ref, None) for ref in refs], out)
        return np.array_equal(out, np.concatenate(routes))

    def counts(i):
        def check(store):
            expected = ranked.count_experts(routes[i].astype(np.int64), 32)
            return np.array_equal(store.expert_counts(refs[i]), expected)

        return check

    def info(store):
        got = store.info(refs[-1])
        return (got.key, got.rows, got.aborted, got.parent.key) == (refs[-1].key, refs[-1].rows, True, refs[0].key)

    return {
        **{f"read {i}": whole(i) for i in range(len(refs))},
        **{f"counts {i}": counts(i) for i in range(len(refs))},
        "slice": a_slice,
        "batch": batch,
        "aux": lambda store: np.array_equal(store.aux(refs[-1], "logprobs"), shard.aux),
        "info": info,
        "records": lambda store: [ref.key for ref in store.records(refs[0].parts[0].shard)] == [r.key for r in refs],
    }


def _outcomes(root, checks):
    """Return name -> None if refused (with shard and record, or the file, in the message), else whether the data are
    right."""
    store, outcomes = TraceStore(root), {}
    for name, check in checks.items():
        try:
            outcomes[name] = bool(check(store))
        except TraceError as error:
            assert "shard" in error.about
            outcomes[name] = None
    return outcomes


@pytest.fixture
def small(tmp_path, spec, write_shard, monkeypatch):
    """A small shard with every feature that a shard can have, and its checks."""
    monkeypatch.setattr(frame, "COUNTS_FROM", 0)
    shard = write_shard(tmp_path, "s", spec, lengths=(2, 1, 2))
    return shard, _checks(shard)


def _parts(path):
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, _ = parse_header(raw[:start])
    end = start + header.frame_bytes
    _, entries = parse_index(header, raw[end:])
    frames = [raw[start + e.start : start + e.start + e.size] for e in entries.values()]
    return header, frames, [(e.size, e.head_bytes, e.aborted, digest) for digest, e in entries.items()]


def _reseal(path, header, frames, entries, parents=()):
    """Write the parts with correct checksums in index and header, without a manifest: damage done by a program."""
    index = index_bytes(parents, entries)
    header = replace(
        header,
        records=len(entries),
        frame_bytes=sum(map(len, frames)),
        index_bytes=len(index),
        index_checksum=xxhash.xxh3_64_hexdigest(index),
    )
    path.write_bytes(b"".join([header_bytes(header)[0], *frames, index]))
    (path.parent / MANIFEST).unlink(missing_ok=True)


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.long)])
def test_every_single_bit_flip_is_an_error(tmp_path, small, bits):
    """In every byte; of its bits all, or one, which is another one in the next byte."""
    shard, checks = small
    raw = shard.path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    end = start + _parts(shard.path)[0].frame_bytes
    assert set(_outcomes(tmp_path, checks).values()) == {True}
    flips, refused, names = 0, 0, list(checks)
    with open(shard.path, "r+b", buffering=0) as file:
        for at in range(len(raw)):
            for bit in (number % 8 for number in range(at, at + bits)):
                os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << bit]), at)
                flips += 1
                # A bit flip in a frame damages what uses the frame; anywhere else it damages the whole shard. Each flip
                # is tested with
                # three of the reads, in turn.
                in_frames = start <= at < end
                some = checks if in_frames else {name: checks[name] for name in names[flips % 3 :: 3]}
                outcomes = _outcomes(tmp_path, some)
                refused += None in outcomes.values()
                assert False not in outcomes.values(), (at, bit, outcomes)
                assert in_frames or set(outcomes.values()) == {None}, (at, bit, outcomes)
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert flips == refused == bits * len(raw) and set(_outcomes(tmp_path, checks).values()) == {True}


def test_sampled_flips_of_a_large_shard(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec, lengths=(200, 1, 300), token_block=64)
    raw, every = shard.path.read_bytes(), _checks(shard)
    checks = {name: every[name] for name in ("read 0", "read 2")}
    rng, refused = np.random.default_rng(5), 0
    with open(shard.path, "r+b", buffering=0) as file:
        for at in rng.choice(len(raw), 2000, replace=False).tolist():
            os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << int(rng.integers(8))]), at)
            outcomes = _outcomes(tmp_path, checks)
            os.pwrite(file.fileno(), raw[at : at + 1], at)
            assert False not in outcomes.values(), (at, outcomes)
            refused += None in outcomes.values()
    assert refused > 1700 and set(_outcomes(tmp_path, every).values()) == {True}


def test_every_truncation_and_any_extension_is_an_error(tmp_path, small):
    shard, checks = small
    raw = shard.path.read_bytes()
    for size in reversed(range(len(raw))):
        os.truncate(shard.path, size)
        assert set(_outcomes(tmp_path, checks).values()) == {None}, size
    for extra in (b"\0", b" ", b"\0" * 4096):
        shard.path.write_bytes(raw + extra)
        assert set(_outcomes(tmp_path, checks).values()) == {None}
    shard.path.write_bytes(raw)
    assert set(_outcomes(tmp_path, checks).values()) == {True}


def test_a_file_cut_or_damaged_after_its_index_was_cached(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    store = TraceStore(tmp_path)
    store.read(shard.refs[0])
    raw, stat = shard.path.read_bytes(), shard.path.stat()
    start = 8 + int.from_bytes(raw[:8], "little")
    with open(shard.path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([raw[start + 9] ^ 1]), start + 9)
    os.utime(shard.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with refused(TraceError, fault="damaged record", shard="s", bytes=(f"{start} to",)):
        store.read(shard.refs[0])
    os.truncate(shard.path, start + 1)
    with refused(TraceError, fault="damaged shard", shard="s"):
        store.read(shard.refs[1])


def test_moved_frames_and_sections_are_refused_even_when_resealed(tmp_path, spec, write_shard):
    # Records 0 and 1 have frames of equal length: 6 tokens in blocks of 2 and 3 layers in groups of 1 give 9 equal
    # chunks.
    shard = write_shard(tmp_path, "s", spec, lengths=(6, 6, 2), layer_group=1)
    checks = _checks(shard)
    header, frames, entries = _parts(shard.path)
    assert entries[0][:2] == entries[1][:2] and len(shard.refs[0].key) == len(shard.refs[1].key)
    _reseal(shard.path, header, frames, entries)
    assert set(_outcomes(tmp_path, checks).values()) == {True}

    def outcomes(frames, entries):
        _reseal(shard.path, header, frames, entries)
        result = _outcomes(tmp_path, checks)
        assert False not in result.values()
        return result

    swapped = outcomes([frames[1], frames[0], frames[2]], entries)
    assert [swapped[f"read {i}"] for i in range(3)] == [None, None, None]
    # Moved together with their entries they are the same records in another order.
    _reseal(shard.path, header, [frames[1], frames[0], frames[2]], [entries[1], entries[0], entries[2]])
    result = _outcomes(tmp_path, {name: check for name, check in checks.items() if name != "records"})
    assert set(result.values()) == {True}

    parsed = frame.parse_head(header, frames[0][: entries[0][1]])
    sections = [*parsed.tokens, *parsed.chunks]
    same_size = 0
    for a, one in enumerate(sections):
        for other in sections[:a]:
            x, y = (frames[0][s.start : s.start + s.size] for s in (one, other))
            if one.size == other.size and x != y:
                same_size += 1
                bad = bytearray(frames[0])
                bad[one.start : one.start + one.size], bad[other.start : other.start + other.size] = y, x
                result = outcomes([bytes(bad), *frames[1:]], entries)
                # Record 2 continues the first rows of record 0; a batch reads no token ids.
                assert (result["read 0"], result["read 1"]) == (None, True)
                assert result["batch"] is (True if one in parsed.tokens else None)
    assert same_size >= 36
    # A chunk of another record, at the same place and of the same size.
    bad = bytearray(frames[0])
    chunk = parsed.chunks[4]
    bad[chunk.start : chunk.start + chunk.size] = frames[1][chunk.start : chunk.start + chunk.size]
    result = outcomes([bytes(bad), *frames[1:]], entries)
    assert (result["read 0"], result["read 1"], result["batch"]) == (None, True, None)


def test_every_field_of_a_head_is_bound_to_its_record(tmp_path, spec, write_shard):
    """A program changes a head and also fixes frame, index and header: only the reference can reveal that, and does."""
    shard = write_shard(tmp_path, "s", spec, lengths=(3,))
    header, (good,), ((size, head_bytes, aborted, digest),) = _parts(shard.path)
    changed = 0
    body_at = 5
    for at in range(body_at, head_bytes - 8):
        bad = bytearray(good)
        bad[at] ^= 1
        mended = xxhash.xxh3_64_digest(header.context + bytes(bad[body_at : head_bytes - 8]))
        bad[head_bytes - 8 : head_bytes] = mended
        _reseal(shard.path, header, [bytes(bad)], [(size, head_bytes, aborted, mended)])
        with refused(TraceError, shard="s", record="step1/prompt0:0"):
            TraceStore(tmp_path).read(shard.refs[0])
        _reseal(shard.path, header, [bytes(bad)], [(size, head_bytes, aborted, digest)])
        with refused(TraceError, shard="s", record=("",)):
            TraceStore(tmp_path).read(shard.refs[0])
        changed += 1
    assert changed > 60


def test_splices_from_other_shards_are_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    other = write_shard(tmp_path / "b", "s", spec, seed=1)  # same keys, lengths, name
    checks = _checks(shard)
    header, frames, entries = _parts(shard.path)
    _, other_frames, other_entries = _parts(other.path)
    _reseal(shard.path, header, [other_frames[1], *frames[1:]], entries)
    assert False not in _outcomes(tmp_path, checks).values()
    # The frame together with its entry.
    _reseal(shard.path, header, [frames[0], other_frames[1], *frames[2:]], [entries[0], other_entries[1], *entries[2:]])
    result = _outcomes(tmp_path, checks)
    assert [result[f"read {i}"] for i in range(4)] == [True, None, True, True] and False not in result.values()
    assert TraceStore(tmp_path).read(other.refs[1]).key == other.refs[1].key
    # The parent of a record.
    _reseal(shard.path, header, [other_frames[0], *frames[1:]], [other_entries[0], *entries[1:]])
    result = _outcomes(tmp_path, checks)
    assert [result[f"read {i}"] for i in range(4)] == [None, True, True, None] and False not in result.values()
    # The whole file of another run under the same name.
    shutil.copy(other.path, shard.path)
    result = _outcomes(tmp_path, checks)
    assert [result[f"read {i}"] for i in range(4)] == [None, None, True, None]
    # Shards of another model with the same sizes, or cut differently: each record is bound to the meaning of its bytes.
    for change in (
        {"spec": replace(spec, layer_map="mmmd"), "layers": (0, 1, 2)},
        {"spec": replace(spec, layer_map="mmhm")},
        {"spec": replace(spec, model_fingerprint="another")},
        {"layer_group": 3},
        {"token_block": 512},
        {"keep_order": True},
    ):
        _reseal(shard.path, replace(header, **change), frames, entries)
        result = _outcomes(tmp_path, checks)
        assert [result[f"read {i}"] for i in range(4)] == [None] * 4, change


def test_a_renamed_shard_is_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    shard.path.rename(tmp_path / "t.safetensors")
    (part,) = shard.refs[0].parts
    with refused(TraceError, shard="t") as caught:
        TraceStore(tmp_path).read(replace(shard.refs[0], parts=(replace(part, shard="t"),)))
    tells(caught.value.__cause__, fault="another name", got="s")


def test_duplicated_dropped_and_wrong_index_entries_are_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    checks = _checks(shard)
    header, frames, entries = _parts(shard.path)
    size, head, aborted, digest = entries[1]
    for name, (some_frames, some_entries) in {
        "duplicate": ([frames[0], *frames], [entries[0], *entries]),
        "duplicate entry": (frames, [entries[0], *entries]),
        "dropped": (frames[1:], entries[1:]),
        "dropped entry": (frames, entries[1:]),
        "longer": (frames, [entries[0], (size + 1, head, aborted, digest), *entries[2:]]),
        "longer head": (frames, [entries[0], (size, size + 1, aborted, digest), *entries[2:]]),
        "shorter head": (frames, [entries[0], (size, head - 1, aborted, digest), *entries[2:]]),
        "another size, same sum": (
            frames,
            [entries[0], (size - 1, head, aborted, digest), (entries[2][0] + 1, *entries[2][1:]), entries[3]],
        ),
        "garbage between": ([frames[0], b"x" * 7, *frames[1:]], entries),
    }.items():
        _reseal(shard.path, header, some_frames, some_entries)
        outcomes = _outcomes(tmp_path, {key: c for key, c in checks.items() if key != "records"})
        assert None in outcomes.values() and False not in outcomes.values(), name
    _reseal(shard.path, header, [frames[0], *frames], [entries[0], *entries])
    with refused(TraceError, shard="s") as caught:
        TraceStore(tmp_path).read(shard.refs[3])
    tells(caught.value.__cause__, fault="record twice")


def _forged(header, key, **parts):
    """Make a frame of one row with the given fields and correct checksums."""
    fields = {
        "spans": varint(1) + varint(1 << 2 | 1) + varint(7),
        "parent": varint(0),
        "tokens": None,
        "chunk": None,
        "counts": varint(0),
        "aux": varint(0),
    } | parts
    kind, ids = pack_ints(np.array([5]))
    tokens = fields["tokens"] or (kind, ids, xxhash.xxh3_64_digest(np.array([5], "<i4")))
    codec, chunk = fields["chunk"] or (0, bytes(range(12)))
    body = varint(len(key)) + key.encode() + fields["spans"] + fields["parent"]
    body += varint(len(tokens[1]) << 3 | tokens[0]) + tokens[2]
    body += varint(codec) + varint(len(chunk)) + xxhash.xxh3_64_digest(chunk) + fields["counts"] + fields["aux"]
    digest = xxhash.xxh3_64_digest(header.context + body)
    head = b"MRF2" + varint(len(body)) + body + digest
    data = head + tokens[1] + chunk + fields.get("tail", b"")
    return data, (len(data), len(head), False, digest)


def _zstd_bomb(size):
    """Make a zstd frame of a few bytes that claims to hold `size` bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x03\x00\x00\x00"


def test_hostile_frames_are_refused_in_bounded_time_and_memory(tmp_path, spec, write_shard):
    path = write_shard(tmp_path, "s", spec, lengths=(1,), layer_group=3).path
    header, *_ = _parts(path)
    bomb, check = _zstd_bomb(1 << 40), xxhash.xxh3_64_digest(_zstd_bomb(1 << 40))
    good = bytes(range(12))
    cases = {
        "good": {},
        "expert out of range": {"chunk": (0, good[:-1] + b"\x20")},
        "expert twice": {"chunk": (0, good[:-1] + b"\x0a")},
        "descending": {"chunk": (0, good[::-1])},
        "codec of the future": {"chunk": (200, good)},
        "short chunk": {"chunk": (0, good[:-1])},
        "chunk bomb": {"chunk": (2, bomb)},
        "token bomb": {"tokens": (7, bomb, check)},
        "long tokens": {"tokens": (3, b"12345678", check)},
        "no rows": {"spans": varint(0)},
        "an empty span": {"spans": varint(1) + varint(1) + varint(7)},
        "2**40 spans": {"spans": varint(1 << 40)},
        "rows 2**24": {"spans": varint(1) + varint(1 << 26 | 1) + varint(7)},
        "rows 2**60": {"spans": varint(1) + varint((1 << 62) + 1) + varint(7)},
        "endless number": {"spans": b"\xff" * 40},
        "2**19 spans": {"spans": varint(1 << 19) + b"\x05\x07" * (1 << 19)},
        "2**16 spans, then nothing": {"spans": varint(1 << 16) + b"\x05\x07\x05\x08" * (1 << 15)},
        "2**16 + 1 spans": {"spans": varint((1 << 16) + 1) + b"\x05\x07\x05\x08" * (1 << 16)},
        "one span as two": {"spans": varint(2) + varint(1 << 2 | 1) + varint(7) + varint(1 << 2 | 1) + varint(7)},
        "provenance 3": {"spans": varint(1) + varint(1 << 2 | 3) + varint(7)},
        "deep chain": {"parent": varint(65) + varint(1) + bytes(8) + varint(0)},
        "parent outside": {"parent": varint(1) + varint(1) + bytes(8) + varint(4) + b"../a"},
        "aux of 2**60 bytes": {"aux": varint(1) + b"\x01a" + b"\x0a\x01" + varint(1 << 58) + varint(2) + bytes(8)},
        "aux bomb": {
            "aux": varint(1) + b"\x01a\x0a\x01" + varint(1 << 20) + varint(len(bomb) << 1 | 1) + check,
            "tail": bomb,
        },
        "aux of no dtype": {"aux": varint(1) + b"\x01a" + b"\x40\x01" + varint(1) + varint(2) + bytes(8)},
        "counts bomb": {"counts": varint(len(bomb) << 3 | 7) + check, "tail": bomb},
        "more": {"aux": varint(0) + b"x"},
    }
    for name, fields in cases.items():
        data, entry = _forged(header, "k", **fields)
        _reseal(path, header, [data], [entry])
        ref = RouteRef("k", 1, (RoutePart("s", entry[3].hex()),))
        _bounded(partial(_refused_frame, tmp_path, ref, name), 64_000_000, name)


def _refused_frame(folder, ref, name):
    store = TraceStore(folder)
    if name == "good":
        np.testing.assert_array_equal(store.read(ref).routes.reshape(-1), np.arange(12))
        return
    with refused(TraceError, record=("",)):
        if name == "aux bomb":
            store.aux(ref, "a")
        elif name == "counts bomb":
            store.expert_counts(ref)
        else:
            store.read(ref)


def _bounded(call, peak, name):
    """Bound the memory of one call, which tracing slows, and the processor time of another one."""
    tracemalloc.start()
    call()
    assert tracemalloc.get_traced_memory()[1] < peak, name
    tracemalloc.stop()
    began = time.process_time()
    call()
    assert time.process_time() - began < 10, name


def _hostile(good, header):
    start = 8 + int.from_bytes(good[:8], "little")
    text = good[8:start]

    def with_header(raw):
        return len(raw).to_bytes(8, "little") + raw + good[start:]

    def changed(**fields):
        return header_bytes(replace(header, **fields))[0] + good[start:]

    forged = json.loads(text)
    forged["__metadata__"]["layer_group"] = "012"
    return {
        "empty": b"",
        "7 bytes": b"\x01" * 7,
        "length 2**64-1": b"\xff" * 8 + good[8:],
        "length 2**63": (2**63).to_bytes(8, "little") + good[8:],
        "length of the file": len(good).to_bytes(8, "little") + good[8:],
        "length 0": bytes(8) + good[8:],
        "header over the limit": with_header(text + b" " * 70000),
        "deep JSON": with_header(b"[" * 60000),
        "deep objects": with_header(b'{"a":' * 12000),
        "huge number": with_header(text.replace(b'"num_experts":"32"', b'"num_experts":"' + b"9" * 5000 + b'"')),
        "not JSON": with_header(b"\x80\x04\x95" + text[3:]),
        "pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
        + b"\0" * 100,
        "JSON of another kind": with_header(b'["__metadata__"]'),
        "no metadata": with_header(b'{"frames":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "another format": with_header(text.replace(b"moe_rl.routes/2", b"moe_rl.routes/1")),
        "duplicate field": with_header(text.replace(b'"top_k":"4",', b'"top_k":"4","top_k":"4",')),
        "one more tensor": with_header(text.rstrip()[:-1] + b',"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "another spelling": with_header(json.dumps(forged, separators=(",", ":")).encode().ljust(len(text))),
        "never sealed": changed(sealed=False),
        "frames 2**50": changed(frame_bytes=2**50),
        "frames 2**63": changed(frame_bytes=2**63),
        "frames negative": changed(frame_bytes=-1),
        "frames a float": changed(frame_bytes=8.0),
        "index 2**50": changed(index_bytes=2**50),
        "records 2**50": changed(records=2**50),
        "chunks of 2**34": changed(token_block=65536, layer_group=1024, spec=replace(header.spec, num_experts=65536)),
        "a path": with_header(text.replace(b'"shard":"s"', b'"shard":"../s"')),
    }


def _all_refused(folder, checks):
    assert set(_outcomes(folder, checks).values()) == {None}


def test_hostile_headers_are_refused_in_bounded_time_and_memory(tmp_path, small):
    shard, checks = small
    header, *_ = _parts(shard.path)
    good = shard.path.read_bytes()
    cases = _hostile(good, header)
    assert len({*cases.values(), good}) == len(cases) + 1
    (tmp_path / MANIFEST).unlink()
    for name, raw in cases.items():
        shard.path.write_bytes(raw)
        _bounded(partial(_all_refused, tmp_path, checks), 4_000_000, name)
    shard.path.write_bytes(good)
    assert set(_outcomes(tmp_path, checks).values()) == {True}


def test_things_that_are_no_files_are_refused(tmp_path, spec, write_shard):
    ref = write_shard(tmp_path / "elsewhere", "s", spec).refs[0]
    path = tmp_path / "s.safetensors"
    path.mkdir()
    with refused(TraceError, shard="s") as caught:
        TraceStore(tmp_path).read(ref)
    tells(caught.value.__cause__, fault="no regular file")
    path.rmdir()
    os.mkfifo(path)
    with refused(TraceError, shard="s") as caught:
        TraceStore(tmp_path).read(ref)
    tells(caught.value.__cause__, fault="no regular file")
    path.unlink()
    path.symlink_to(path)
    with refused(TraceError, fault="absent shard", shard="s"):
        TraceStore(tmp_path).read(ref)
    assert TraceStore(tmp_path / "missing").shards() == []
