"""No silent bad trace: whatever happens to the bytes, a read gives what was written or an error."""

import os
import shutil
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from moe_rl.errors import TraceError
from moe_rl.trace.record import record_checksum, spec_digest, token_digest
from moe_rl.trace.shard import INDEX, Layout, header_bytes, parse_header
from moe_rl.trace.store import TraceStore
from moe_rl.types import RouteRef


def _read_all(root, shard):
    """Per reference: None if refused (the message names shard and record, or the file), else whether data are right."""
    store, outcomes = TraceStore(root), []
    for ref, routes, tokens in zip(shard.refs, shard.routes, shard.tokens, strict=True):
        try:
            record = store.read(ref)
        except TraceError as error:
            assert f"shard {ref.shard}, record {ref.key}" in str(error) or f"{ref.shard}.safetensors" in str(error)
            outcomes.append(None)
        else:
            same = np.array_equal(record.routes, routes) and record.token_digest == token_digest(tokens)
            outcomes.append(same and (record.key, record.weight_version) == (ref.key, 7))
    return outcomes


def _parts(path):
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    layout = parse_header(raw[:start])
    at = start + layout.index_start
    index_end = at + layout.records * INDEX.itemsize
    return layout, raw[start:at], np.frombuffer(raw[at:index_end], INDEX).copy(), raw[index_end:]


def _reseal(path, layout, routes, index, keys):
    """Write the parts with checksums of index and header that are right again: damage by a program, not by a disk."""
    tail = index.tobytes() + keys
    layout = replace(layout, records=len(index), key_bytes=len(keys), index_checksum=xxhash.xxh3_64_hexdigest(tail))
    path.write_bytes(header_bytes(layout) + routes + tail)


def test_every_single_bit_flip_is_an_error(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    raw = shard.path.read_bytes()
    layout, *_ = _parts(shard.path)
    start = 8 + int.from_bytes(raw[:8], "little")
    assert _read_all(tmp_path, shard) == [True] * 4
    flips = 0
    with open(shard.path, "r+b", buffering=0) as file:
        for at in range(len(raw)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << bit]), at)
                outcomes = _read_all(tmp_path, shard)
                flips += 1
                # A flip in one record's rows costs that record only; anywhere else, the shard.
                in_rows = start <= at < start + layout.index_start
                assert outcomes.count(None) == (1 if in_rows else 4), (at, bit)
                assert outcomes.count(True) == (3 if in_rows else 0), (at, bit)
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert flips == 8 * len(raw) and _read_all(tmp_path, shard) == [True] * 4


def test_every_truncation_and_any_extension_is_an_error(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    raw = shard.path.read_bytes()
    for size in reversed(range(len(raw))):
        os.truncate(shard.path, size)
        assert _read_all(tmp_path, shard) == [None] * 4, size
    for extra in (b"\0", b" ", b"\0" * 4096):
        shard.path.write_bytes(raw + extra)
        assert _read_all(tmp_path, shard) == [None] * 4
    shard.path.write_bytes(raw)
    assert _read_all(tmp_path, shard) == [True] * 4


def test_a_file_cut_or_damaged_after_its_index_was_cached(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    store = TraceStore(tmp_path)
    store.read(shard.refs[0])
    raw, stat = shard.path.read_bytes(), shard.path.stat()
    start = 8 + int.from_bytes(raw[:8], "little")
    with open(shard.path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([raw[start] ^ 1]), start)
    os.utime(shard.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(TraceError, match=f"record is damaged .shard s, record step1/prompt0:0, bytes {start} to"):
        store.read(shard.refs[0])
    os.truncate(shard.path, start + 1)
    with pytest.raises(TraceError, match="shard is refused"):
        store.read(shard.refs[1])


def test_swapped_rows_keys_and_entries_are_refused_even_when_resealed(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)  # records 0 and 3 have the same length, and so do all keys
    layout, routes, index, keys = _parts(shard.path)
    size, width = 3 * spec.row_bytes, len(shard.refs[0].key)
    swapped_rows = routes[-size:] + routes[size:-size] + routes[:size]
    swapped_keys = keys[-width:] + keys[width:-width] + keys[:width]
    swapped_index = index[[3, 1, 2, 0]]

    _reseal(shard.path, layout, routes, index, keys)
    assert _read_all(tmp_path, shard) == [True] * 4
    for name, parts in {
        "rows": (swapped_rows, index, keys),
        "keys": (routes, index, swapped_keys),
        "rows and entries": (swapped_rows, swapped_index, keys),
    }.items():
        _reseal(shard.path, layout, *parts)
        assert _read_all(tmp_path, shard) == [None, True, True, None], name
        # The binding to the key holds by itself: references made up from the damaged index do not help.
        made_up = [
            RouteRef("s", ref.key, 3, f"{int(parts[1][i]['checksum']):016x}")
            for i, ref in zip((0, 3), (shard.refs[0], shard.refs[3]), strict=True)
        ]
        for ref in made_up if name != "keys" else [replace(made_up[0], key=made_up[1].key)]:
            with pytest.raises(TraceError):
                TraceStore(tmp_path).read(ref)
    # Records moved whole, with entry and key, are the same records.
    _reseal(shard.path, layout, swapped_rows, swapped_index, swapped_keys)
    assert _read_all(tmp_path, shard) == [True] * 4


@pytest.mark.parametrize("field", ["token_digest", "weight_version", "checksum"])
def test_metadata_is_bound_to_its_record(tmp_path, spec, write_shard, field):
    shard = write_shard(tmp_path, "s", spec)
    layout, routes, index, keys = _parts(shard.path)
    index[field][1] += 1
    _reseal(shard.path, layout, routes, index, keys)
    assert _read_all(tmp_path, shard) == [True, None, True, True]


def test_splices_from_other_shards_are_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    other = write_shard(tmp_path / "b", "s", spec, seed=1)  # same keys, lengths, name
    layout, routes, index, keys = _parts(shard.path)
    _, other_routes, other_index, _ = _parts(other.path)
    size = 3 * spec.row_bytes
    _reseal(shard.path, layout, other_routes[:size] + routes[size:], index, keys)
    assert _read_all(tmp_path, shard) == [None, True, True, True]
    # Rows together with their entry: only the reference can tell.
    spliced = index.copy()
    spliced[0] = other_index[0]
    _reseal(shard.path, layout, other_routes[:size] + routes[size:], spliced, keys)
    assert _read_all(tmp_path, shard) == [None, True, True, True]
    assert TraceStore(tmp_path).read(other.refs[0]).key == other.refs[0].key
    # The whole file of another run under the same name.
    shutil.copy(other.path, shard.path)
    assert _read_all(tmp_path, shard) == [None, None, True, None] or _read_all(tmp_path, shard) == [None] * 4
    # Of another model with the same sizes: every record is bound to its model.
    _reseal(shard.path, replace(layout, spec=replace(spec, moe_layers=(0, 1, 2))), routes, index, keys)
    assert _read_all(tmp_path, shard) == [None] * 4
    _reseal(shard.path, replace(layout, spec=replace(spec, model_fingerprint="another")), routes, index, keys)
    assert _read_all(tmp_path, shard) == [None] * 4


def test_a_renamed_shard_is_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    shard.path.rename(tmp_path / "t.safetensors")
    with pytest.raises(TraceError, match="published as 's'"):
        TraceStore(tmp_path).read(replace(shard.refs[0], shard="t"))


def test_duplicated_dropped_and_reordered_index_entries_are_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    layout, routes, index, keys = _parts(shard.path)
    width = len(shard.refs[0].key)
    for parts in (
        (routes, index[[0, 0, 2, 3]], keys),
        (routes, index[:3], keys[: 3 * width]),
        (routes, index[[1, 0, 2, 3]], keys),
        (routes, index, keys[:width] * 2 + keys[2 * width :]),
        (routes, index, keys[:-1]),
        (routes, index, b"a b" + keys[3:]),
        (routes, index, b"\xff" + keys[1:]),
    ):
        _reseal(shard.path, layout, *parts)
        assert True not in _read_all(tmp_path, shard)[:2]
        assert False not in _read_all(tmp_path, shard)
    _reseal(shard.path, layout, routes, index, keys[:width] * 2 + keys[2 * width :])
    with pytest.raises(TraceError, match="names a record twice"):
        TraceStore(tmp_path).read(shard.refs[3])


def test_ids_that_could_not_have_been_accepted_are_refused_on_read(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec, lengths=(3,))
    layout, routes, index, keys = _parts(shard.path)
    for value in (32, 255, routes[spec.row_bytes + 1]):  # out of range twice, then a duplicate in token 1, first layer
        bad = bytearray(routes)
        bad[spec.row_bytes] = value
        tokens = int(index["token_digest"][0])
        index["checksum"] = record_checksum(spec_digest(spec), keys, 3, tokens, 7, bytes(bad))
        _reseal(shard.path, layout, bytes(bad), index, keys)
        ref = replace(shard.refs[0], digest=f"{int(index['checksum'][0]):016x}")
        with pytest.raises(TraceError, match="shard s, record step1/prompt0:0, token 1, layer 0"):
            TraceStore(tmp_path).read(ref)


def _hostile(good: bytes, layout: Layout) -> dict[str, bytes]:
    start = 8 + int.from_bytes(good[:8], "little")
    text = good[8:start]

    def with_header(header: bytes) -> bytes:
        return len(header).to_bytes(8, "little") + header + good[start:]

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
        "no metadata": with_header(b'{"routes":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "another format": with_header(text.replace(b"moe_rl.routes/1", b"moe_rl.routes/9")),
        "duplicate field": with_header(text.replace(b'"top_k":"4",', b'"top_k":"4","top_k":"4",')),
        "one more tensor": with_header(text.rstrip()[:-1] + b',"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "rows 2**40": header_bytes(replace(layout, rows=2**40)) + good[start:],
        "records 2**40": header_bytes(replace(layout, records=2**40)) + good[start:],
        "keys 2**40": header_bytes(replace(layout, key_bytes=2**40)) + good[start:],
        "rows 2**63": header_bytes(replace(layout, rows=2**63)) + good[start:],
        "rows negative": header_bytes(replace(layout, rows=-1)) + good[start:],
        "rows a float": header_bytes(replace(layout, rows=8.0)) + good[start:],
    }


def test_hostile_headers_are_refused_in_bounded_time_and_memory(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    layout, *_ = _parts(shard.path)
    good = shard.path.read_bytes()
    cases = _hostile(good, layout)
    assert len({*cases.values(), good}) == len(cases) + 1
    for name, raw in cases.items():
        shard.path.write_bytes(raw)
        tracemalloc.start()
        began = time.monotonic()
        assert _read_all(tmp_path, shard) == [None] * 4, name
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4_000_000 and time.monotonic() - began < 1.0, name
    shard.path.write_bytes(good)
    assert _read_all(tmp_path, shard) == [True] * 4


def test_things_that_are_no_files_are_refused(tmp_path, spec, write_shard):
    ref = write_shard(tmp_path / "elsewhere", "s", spec).refs[0]
    path = tmp_path / "s.safetensors"
    path.mkdir()
    with pytest.raises(TraceError, match="not a regular file"):
        TraceStore(tmp_path).read(ref)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(TraceError, match="not a regular file"):
        TraceStore(tmp_path).read(ref)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(TraceError, match="cannot be opened"):
        TraceStore(tmp_path).read(ref)
    assert TraceStore(tmp_path / "missing").shards() == []
