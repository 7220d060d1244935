"""Round trips, names, retention, and what a read touches."""

import contextlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from moe_rl.errors import RouteValidationError, TraceError
from moe_rl.trace import store as store_module
from moe_rl.trace.store import ShardWriter, TraceSpec, TraceStore, token_digest, validate
from moe_rl.types import RouteRef


@st.composite
def _shards(draw):
    experts = draw(st.one_of(st.integers(1, 512), st.sampled_from([255, 256, 257, 512])))
    top_k = draw(st.integers(1, min(16, experts)))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 93), min_size=1, max_size=5))))
    lengths = draw(st.lists(st.integers(0, 7), max_size=5))
    return TraceSpec('model "quoted\\" 1', experts, top_k, layers), lengths, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(_shards())
def test_round_trip(random_routes, case):
    spec, lengths, seed = case
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        written = []
        with ShardWriter(Path(folder) / "new" / "store", "a.b-C_1", spec) as writer:
            for i, rows in enumerate(lengths):
                routes = random_routes(spec, rows, seed + i)
                if spec.num_experts <= 256 and i % 2:
                    routes = routes.astype(np.uint8)
                if i % 3 == 2:
                    routes = np.asfortranarray(routes)
                tokens = rng.integers(0, 2**31, rows)
                version = int(rng.integers(0, 2**63 - 1))
                written.append((writer.add(f"r/{i}:0", routes, tokens, version), routes, tokens, version))
        store = TraceStore(Path(folder) / "new" / "store")
        assert store.shards() == ["a.b-C_1"]
        for ref, routes, tokens, version in reversed(written):
            record = store.read(ref)
            assert record.routes.dtype == (np.uint8 if spec.num_experts <= 256 else np.uint16)
            assert not record.routes.flags.writeable
            np.testing.assert_array_equal(record.routes, routes)
            assert (record.key, record.weight_version, record.spec) == (ref.key, version, spec)
            assert record.token_digest == token_digest(tokens)
            assert ref.rows == len(tokens)
            validate(record, token_ids=tokens.tolist(), spec=spec, weight_version=version, ref=ref)
        load_file(Path(folder) / "new" / "store" / "a.b-C_1.safetensors")


@pytest.mark.parametrize("experts", [32, 512])
def test_stock_safetensors_opens_it(tmp_path, spec, write_shard, experts):
    shard = write_shard(tmp_path, "s", replace(spec, num_experts=experts))
    with safe_open(shard.path, framework="np") as file:
        assert set(file.keys()) == {"routes", "index", "keys"}
        meta = file.metadata()
        np.testing.assert_array_equal(file.get_tensor("routes"), np.concatenate(shard.routes))
        assert bytes(file.get_tensor("keys")).decode() == "".join(ref.key for ref in shard.refs)
    assert meta["format"] == "moe_rl.routes/1" and meta["moe_layers"] == "0,1,3"


def test_same_content_gives_the_same_bytes(tmp_path, spec, write_shard):
    first = write_shard(tmp_path / "a", "s", spec)
    second = write_shard(tmp_path / "b", "s", spec)
    assert first.path.read_bytes() == second.path.read_bytes() and first.refs == second.refs


def test_token_digest_is_over_little_endian_int32():
    expected = xxhash.xxh3_64_hexdigest(bytes([1, 0, 0, 0, 255, 255, 255, 127]))
    for ids in ([1, 2**31 - 1], (1, 2**31 - 1), np.array([1, 2**31 - 1], ">i8"), np.array([1, 9, 2**31 - 1, 9])[::2]):
        assert token_digest(ids) == expected
    assert token_digest([]) == "2d06800538d394c2"  # the published xxh3-64 of no bytes
    assert token_digest([1, 2]) != token_digest([2, 1])


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.0], [[1, 2]], [True], ["a"], 3, [2**63]])
def test_token_digest_refuses(ids):
    with pytest.raises(RouteValidationError, match="token id"):
        token_digest(ids)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "\u00e4", "a" * 201, None, "a:b"]
)
def test_shard_names_refused(tmp_path, spec, name):
    with pytest.raises(TraceError, match="shard name"):
        ShardWriter(tmp_path, name, spec)
    with pytest.raises(TraceError, match="shard name"):
        TraceStore(tmp_path).read(RouteRef(name, "k", 1, "0" * 16))
    with pytest.raises(TraceError, match="shard name"):
        TraceStore(tmp_path).remove(name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", "a b", "a\n", "\u00e4", "k" * 513, None, 7, "a\\b"])
def test_record_keys_refused(tmp_path, spec, random_routes, key):
    with ShardWriter(tmp_path, "s", spec) as writer:
        with pytest.raises(TraceError, match="record key"):
            writer.add(key, random_routes(spec, 1), [1], 0)
        good = writer.add("k" * 512, random_routes(spec, 1), [1], 0)
    assert TraceStore(tmp_path).read(good).key == "k" * 512
    with pytest.raises(TraceError, match="record key"):
        TraceStore(tmp_path).read(replace(good, key=key))


def test_a_refused_record_leaves_the_shard_as_it_was(tmp_path, spec, random_routes):
    good = random_routes(spec, 2)
    bad = good.copy()
    bad[1, 2, 0] = bad[1, 2, 3]
    with ShardWriter(tmp_path, "s", spec) as writer:
        first = writer.add("one", good, [1, 2], 0)
        with pytest.raises(RouteValidationError, match=r"request two, shard s, token 1, layer 3"):
            writer.add("two", bad, [1, 2], 0)
        with pytest.raises(RouteValidationError, match=r"request two.*weight version|weight version.*request two"):
            writer.add("two", good, [1, 2], -1)
        with pytest.raises(RouteValidationError, match="request two, shard s, token 2 has no routes"):
            writer.add("two", good, [1, 2, 3], 0)
        with pytest.raises(RouteValidationError, match="request two, shard s, token 1"):
            writer.add("two", good, [1, -100], 0)
        with pytest.raises(TraceError, match="shard s, record one"):
            writer.add("one", good, [1, 2], 0)
        second = writer.add("two", good[:1], [1], 0)
    store = TraceStore(tmp_path)
    np.testing.assert_array_equal(store.read(first).routes, good)
    np.testing.assert_array_equal(store.read(second).routes, good[:1])


def test_publish_never_overwrites(tmp_path, spec, write_shard, assert_holds):
    early = ShardWriter(tmp_path, "s", spec)
    shard = write_shard(tmp_path, "s", spec)
    before = shard.path.read_bytes()
    with pytest.raises(TraceError, match="shard s in .*exists already|exists already.*shard s in"):
        early.publish()
    with pytest.raises(TraceError, match="exists already"):
        ShardWriter(tmp_path, "s", spec)
    assert shard.path.read_bytes() == before and os.listdir(tmp_path) == ["s.safetensors"]
    assert_holds(TraceStore(tmp_path), shard)


def test_nothing_is_visible_before_publish_nor_left_by_abandon(tmp_path, spec, random_routes):
    with pytest.raises(KeyError, match="stop"), ShardWriter(tmp_path, "s", spec) as writer:
        ref = writer.add("k", random_routes(spec, 2), [1, 2], 0)
        assert len(os.listdir(tmp_path)) == 1 and TraceStore(tmp_path).shards() == []
        with pytest.raises(TraceError, match="shard s, record k"):
            TraceStore(tmp_path).read(ref)
        raise KeyError("stop")
    assert os.listdir(tmp_path) == []
    for use in (writer.publish, lambda: writer.add("z", random_routes(spec, 1), [1], 0)):
        with pytest.raises(TraceError, match="shard is closed"):
            use()
    writer.abandon()


def test_interrupted_add_does_not_spoil_the_shard(tmp_path, spec, random_routes, monkeypatch):
    writer = ShardWriter(tmp_path, "s", spec)
    first = writer.add("one", random_routes(spec, 2, 1), [1, 2], 0)
    real, fired = os.pwrite, []

    def interrupted(fd, data, at):
        fired.append(real(fd, data[:-1], at))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", interrupted)
        writer.add("long", random_routes(spec, 500), list(range(500)), 0)
    assert fired == [500 * 12 - 1]
    second = writer.add("two", random_routes(spec, 2, 2), [1, 2], 0)
    writer.publish()
    store = TraceStore(tmp_path)
    np.testing.assert_array_equal(store.read(first).routes, random_routes(spec, 2, 1))
    np.testing.assert_array_equal(store.read(second).routes, random_routes(spec, 2, 2))
    with pytest.raises(TraceError, match="record is not in its shard"):
        store.read(RouteRef("s", "long", 500, "0" * 16))


def test_short_writes_and_reads_are_continued(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    pwrite, pread, calls = os.pwrite, os.pread, []
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: calls.append("w") or pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: calls.append("r") or pread(fd, min(size, 5), at))
    shard = write_shard(tmp_path, "s", spec)
    assert_holds(TraceStore(tmp_path), shard)
    assert calls.count("w") > 50 and calls.count("r") > 50


def test_wrong_references_are_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    other = write_shard(tmp_path, "other", spec, seed=50)
    store, ref = TraceStore(tmp_path), shard.refs[0]
    wrong = {
        "other": replace(ref, shard="other"),
        "rows": replace(ref, rows=2),
        "digest": replace(ref, digest=shard.refs[1].digest),
        "key": replace(ref, key=shard.refs[3].key),
        "absent key": replace(ref, key="nobody"),
        "absent shard": replace(ref, shard="nowhere"),
    }
    for name, bad in wrong.items():
        with pytest.raises(TraceError) as caught:
            store.read(bad)
        assert f"shard {bad.shard}, record {bad.key}" in str(caught.value), name
    assert store.read(other.refs[0]).key == ref.key


def test_remove_and_a_new_shard_of_the_same_name(tmp_path, spec, write_shard, assert_holds):
    store = TraceStore(tmp_path)
    old, kept = write_shard(tmp_path, "s", spec), write_shard(tmp_path, "t", spec)
    assert_holds(store, old)
    store.remove("s")
    assert store.shards() == ["t"]
    with pytest.raises(TraceError, match=r"shard s, record step1/prompt0:0.*retention"):
        store.read(old.refs[0])
    with pytest.raises(TraceError, match="shard s in"):
        store.remove("s")
    new = write_shard(tmp_path, "s", spec, seed=9)
    assert_holds(store, new)
    assert_holds(store, kept)
    with pytest.raises(TraceError, match="another record under this key"):
        store.read(old.refs[0])


def test_a_read_touches_its_own_record_only(tmp_path, spec, write_shard, monkeypatch):
    shard = write_shard(tmp_path, "s", spec, lengths=(1000, 5, 1000))
    store, real, seen = TraceStore(tmp_path), os.pread, []
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(size) or real(fd, size, at))
    store.read(shard.refs[1])
    assert sum(seen) < 2000
    seen.clear()
    store.read(shard.refs[1])
    assert seen == [5 * spec.row_bytes]


def test_threads_share_a_store_and_its_small_cache(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    monkeypatch.setattr(store_module, "_CACHED_SHARDS", 2)
    shards = [write_shard(tmp_path, f"s{i}", spec, seed=i) for i in range(5)]
    store = TraceStore(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(assert_holds, store, shard) for shard in shards * 8]:
            done.result()
    assert len(store._cache) == 2
    open_files = len(os.listdir("/proc/self/fd"))
    for shard in shards:
        assert_holds(store, shard)
        with contextlib.suppress(TraceError):
            store.read(replace(shard.refs[0], digest="0" * 16))
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": ""},
        {"model_fingerprint": "a\nb"},
        {"model_fingerprint": "f" * 257},
        {"num_experts": 0},
        {"num_experts": 65537},
        {"top_k": 0},
        {"top_k": 33},
        {"moe_layers": ()},
        {"moe_layers": [0, 1]},
        {"moe_layers": (1, 1)},
        {"moe_layers": (2, 1)},
        {"moe_layers": (-1, 1)},
        {"moe_layers": (True,)},
    ],
)
def test_impossible_specs_are_refused(spec, change):
    with pytest.raises(TraceError, match=next(iter(change)).replace("model_fingerprint", "model fingerprint")):
        replace(spec, **change)
