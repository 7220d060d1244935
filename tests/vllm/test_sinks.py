"""What requests with the same prompt share in a shard, and what is done behind the engine's steps."""

import errno
import os
import threading

import numpy as np
import pytest

from moe_rl.errors import EngineError, RequestRefused, TraceDiskError
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.trace.recovery import recover_shard
from moe_rl.vllm import sinks as module
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sinks import Sinks
from moe_rl.vllm.slots import Recorded, Rows
from tests.support.refusals import refused

SPEC = TraceSpec("model", 16, 4, "mm")
PROMPT, ROWS = 20, 24


def rows_of(seed):
    routes = np.sort(np.argsort(np.random.default_rng(seed).random((ROWS, 2, 16)), -1)[..., :4], -1).astype(np.uint8)
    return Rows(routes, np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int64), np.zeros(ROWS, np.uint64))


def add(sinks, key, rows, shard="shard", number=0):
    ask = RecordingRequest(key, shard)
    sinks.add(Recorded(number, ask, rows.token_ids[:PROMPT], cached=0, greedy=False), ask, rows, {})
    sinks.hand_over()


class Gate:
    """Holds the writing thread in front of every record until it is opened."""

    def __init__(self, monkeypatch):
        self.threads, self.entered, self._open = [], threading.Semaphore(0), threading.Event()

        def written(writer, key, *args, real=module.ShardWriter.add, **kwargs):
            self.threads.append(threading.current_thread())
            self.entered.release()
            assert self._open.wait(30)
            return real(writer, key, *args, **kwargs)

        monkeypatch.setattr(module.ShardWriter, "add", written)

    def open(self):
        self._open.set()


@pytest.fixture
def sinks(tmp_path):
    return Sinks(tmp_path, SPEC, layers=SPEC.moe_layers, suffix="")


def test_prompts_are_remembered_for_sharing_up_to_a_number_of_bytes(sinks, monkeypatch):
    rows = rows_of(1)
    monkeypatch.setattr(module, "_FAMILY_BYTES", 2 * rows.first(PROMPT).nbytes)
    for number in range(3):
        ids = rows.token_ids + number
        add(sinks, f"{number}", Rows(rows.routes, ids, rows.weight_versions, rows.sums))
    sink = sinks._open["shard"]
    sink.wait()
    assert [np.frombuffer(prompt, np.int32)[0] for prompt in sink.families] == [1, 2]
    add(sinks, "other rows of the last prompt", Rows(rows_of(2).routes, ids, rows.weight_versions, rows.sums))
    sink.wait()
    assert len(sink.families) == 2 and sink.family_bytes == 2 * rows.first(PROMPT).nbytes


def test_each_group_of_an_asynchronous_run_may_have_a_shard(sinks):
    for number in range(600):
        sinks.open(f"group{number}")
    assert len(sinks._open) == 600


TURNS = 70  # more than the records that a reader follows


def dialogue(sinks, cuts=()):
    """Records the turns of a dialogue in a shard that stays open, and is published so far after the turns `cuts`.
    Returns their references and the routes of all."""
    rng, rows = np.random.default_rng(3), PROMPT + 3 * TURNS
    routes = np.sort(np.argsort(rng.random((rows, 2, 16)), -1)[..., :4], -1).astype(np.uint8)
    tokens, refs = np.arange(rows, dtype=np.int32), []
    for turn in range(TURNS):
        end, key = PROMPT + 3 * (turn + 1), f"turn{turn}"
        ask = RecordingRequest(key, "shard", parent=refs[-1] if refs else None)
        own = Rows(routes[:end], tokens[:end], np.zeros(end, np.int64), np.zeros(end, np.uint64))
        sinks.add(Recorded(turn, ask, tokens[: end - 2], cached=0, greedy=False), ask, own, {})
        refs.append(sinks.publish("shard", {key: tokens[:end]}, [], keep_open=True).result()[key])
        if turn in cuts:
            assert sinks.publish("shard", {}, [], keep_open=True, cut=True).result() == {}
    return refs, routes


def readable(root, refs, routes):
    store = TraceStore(root)
    store.check_published({ref.parts[0].shard for ref in refs})
    for ref in refs:
        assert np.array_equal(store.read(ref).routes, routes[: ref.rows]), ref.key


def test_the_turns_of_a_shard_that_stays_open_are_synced_once(tmp_path, sinks, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    refs, routes = dialogue(sinks)
    assert not synced and not TraceStore(tmp_path).shards()
    sinks.publish("shard", {}, []).result()
    assert len(synced) == 4, "the file, the folder of the new manifest, the manifest, the folder"
    readable(tmp_path, refs, routes)


def test_the_parts_of_a_shard_are_published_while_it_is_filled(tmp_path, sinks):
    refs, routes = dialogue(sinks, cuts=(9, 40))
    assert TraceStore(tmp_path).shards() == ["shard", "shard.part1"]
    assert {ref.parts[0].shard for ref in refs[41:]} == {"shard.part2"}
    readable(tmp_path, refs[:41], routes)
    other = rows_of(5)
    add(sinks, "late", other)  # ended, and not asked for, when the part is published
    for _ in range(2):  # without new records nothing is published
        sinks.publish("shard", {}, [], keep_open=True, cut=True).result()
    assert sinks.publish("shard", {}, [], keep_open=True).result() == {}, "a call that left before its first token"
    late = sinks.publish("shard", {"late": other.token_ids}, ["late"], keep_open=True).result()["late"]
    assert sinks.publish("shard", {}, []).result() == {} and not list(tmp_path.glob("*.tmp"))
    assert TraceStore(tmp_path).shards() == ["shard", "shard.part1", "shard.part2"]
    readable(tmp_path, refs, routes)
    assert np.array_equal(TraceStore(tmp_path).read(late).routes, other.routes)


def test_a_part_that_a_full_disk_refused_is_lost_and_the_next_one_is_not(tmp_path, sinks, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = rows_of(1)
    sinks.open("shard")
    add(sinks, "lost", rows)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for _ in range(2):
            with refused(TraceDiskError, shard="shard"):
                sinks.publish("shard", {}, [], keep_open=True, cut=True).result()
    add(sinks, "next", rows)
    with refused(RequestRefused, fault="not recorded", request="lost"):
        sinks.publish("shard", {"lost": rows.token_ids}, [], keep_open=True).result()
    assert list(sinks.publish("shard", {"next": rows.token_ids}, [], keep_open=True).result()) == ["next"]
    sinks.publish("shard", {}, []).result()
    assert TraceStore(tmp_path).shards() == ["shard.part1"]


@pytest.mark.parametrize("cuts", [(), (9,)])
def test_what_a_killed_writer_had_answered_for_is_recovered(tmp_path, sinks, cuts):
    refs, routes = dialogue(sinks, cuts)
    (path,) = tmp_path.glob(".shard.*.tmp")
    recover_shard(tmp_path, "shard", 0.0)
    assert len(TraceStore(tmp_path).shards()) == len(cuts), "its writer lives"
    written = path.read_bytes()
    sinks.abandon_all()
    path.write_bytes(written)  # as the kernel leaves it: nobody holds its lock
    recover_shard(tmp_path, "other", 0.0)
    recover_shard(tmp_path, "shard", 0.0)
    assert not path.exists()
    readable(tmp_path, refs, routes)


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
    refs, store = sinks.publish("shard", {"a": tokens, "b": tokens}, []).result(), TraceStore(tmp_path)
    assert np.array_equal(store.read(refs["a"]).routes, routes)
    assert np.array_equal(store.read(refs["b"]).routes, other)
    shared = PROMPT if row is None else row
    assert store.info(refs["b"]).own_rows == ROWS - (shared if shared >= 8 else 0)


def test_a_step_does_not_wait_for_a_shard_to_be_published(sinks, tmp_path, monkeypatch):
    gate, rows = Gate(monkeypatch), rows_of(1)
    add(sinks, "a", rows)
    publication = sinks.publish("shard", {"a": rows.token_ids}, [])
    assert not publication.done() and not TraceStore(tmp_path).shards()
    gate.open()
    ref = publication.result(30)["a"]
    assert np.array_equal(TraceStore(tmp_path).read(ref).routes, rows.routes)


def test_a_shard_that_is_being_published_is_abandoned_no_more(sinks, tmp_path, monkeypatch):
    gate, rows = Gate(monkeypatch), rows_of(1)
    add(sinks, "a", rows)
    publication = sinks.publish("shard", {"a": rows.token_ids}, [])
    threading.Timer(0.1, gate.open).start()
    sinks.abandon("shard")
    assert publication.done() and list(publication.result()) == ["a"]
    assert TraceStore(tmp_path).shards() == ["shard"]


def test_a_step_does_not_wait_for_a_record_to_be_written(sinks, tmp_path, monkeypatch):
    gate, rows = Gate(monkeypatch), {key: rows_of(number) for number, key in enumerate("cab")}
    for key, one in rows.items():
        add(sinks, key, one)
    add(sinks, "alone", rows["a"], shard="other")
    assert gate.entered.acquire(timeout=30) and sinks.waits == 0
    assert not TraceStore(tmp_path).shards()  # here the engine's thread goes on, while nothing is written
    gate.open()
    refs = sinks.publish("shard", {key: one.token_ids for key, one in rows.items()}, []).result()
    store = TraceStore(tmp_path)
    assert [ref.key for ref in store.records("shard")] == ["c", "a", "b"]  # the order of adding
    for key, one in rows.items():
        np.testing.assert_array_equal(store.read(refs[key]).routes, one.routes)
    assert len(set(gate.threads)) == 1 and gate.threads[0] is not threading.current_thread()


def test_waiting_rows_are_bounded_and_waits_counted(sinks, monkeypatch):
    rows = rows_of(1)
    monkeypatch.setattr(sinks._thread, "_limit", 2 * rows.nbytes)
    gate, done = Gate(monkeypatch), []

    def adds():
        for number in range(4):
            add(sinks, str(number), rows, number=number)
            done.append(number)

    engine = threading.Thread(target=adds)
    engine.start()
    assert gate.entered.acquire(timeout=30)
    engine.join(0.3)
    assert done == [0, 1] and engine.is_alive()
    gate.open()
    engine.join(30)
    assert done == [0, 1, 2, 3] and 1 <= sinks.waits <= 2
    assert len(sinks.publish("shard", {str(n): rows.token_ids for n in range(4)}, []).result()) == 4


def test_a_full_disk_is_told_by_every_publication_of_the_shard(sinks, tmp_path, monkeypatch):
    """The record fails after the step that added it; other shards lose nothing."""

    def full(fd, data, at, real=os.pwrite):
        if at > 0 and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    rows = rows_of(1)
    sinks.open("shard")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        add(sinks, "a", rows)
        add(sinks, "b", rows)
        for _ in range(2):
            with refused(TraceDiskError, shard="shard", folder=tmp_path, got=(os.strerror(errno.ENOSPC),)):
                sinks.publish("shard", {"a": rows.token_ids}, []).result()
    assert os.listdir(tmp_path) == []
    add(sinks, "a", rows, shard="next")
    sinks.check()
    assert list(sinks.publish("next", {"a": rows.token_ids}, []).result()) == ["a"]
    sinks.open("shard")  # begun anew
    add(sinks, "a", rows)
    assert list(sinks.publish("shard", {"a": rows.token_ids}, []).result()) == ["a"]


def test_a_fault_of_the_writing_thread_is_raised_by_name(sinks, monkeypatch):
    def broken(writer, *args, **kwargs):
        raise ZeroDivisionError("a fault of ours")

    rows = rows_of(1)
    monkeypatch.setattr(module.ShardWriter, "add", broken)
    add(sinks, "first", rows)
    add(sinks, "second", rows)
    for call in (lambda: sinks.publish("shard", {"first": rows.token_ids}, []).result(), sinks.check):
        with refused(EngineError, request="first", shard="shard", fault="writing", got=("ZeroDivisionError",)):
            call()


def test_an_abandoned_shard_is_not_written_to_its_end(sinks, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    for number in range(5):
        add(sinks, str(number), rows_of(number), number=number)
    assert gate.entered.acquire(timeout=30)
    abandoning = threading.Thread(target=sinks.abandon, args=("shard",))
    abandoning.start()
    abandoning.join(0.2)
    assert abandoning.is_alive()  # the file is not closed under the thread
    gate.open()
    abandoning.join(30)
    assert len(gate.threads) == 1 and os.listdir(tmp_path) == []


def test_the_short_records_of_a_step_are_one_piece_of_work(sinks, monkeypatch):
    """Others are handed over when there are enough bytes, and what is left when the shard is published."""
    pieces = []

    def submit(work, size, real=sinks._thread.submit):
        pieces.append(size)
        return real(work, size)

    monkeypatch.setattr(sinks._thread, "submit", submit)
    monkeypatch.setattr(sinks, "hand_over", lambda real=sinks.hand_over: pieces.append("handed") or real())
    monkeypatch.setattr(module, "_GATHERED_BYTES", 3 * rows_of(0).nbytes)
    for number in range(5):
        ask, rows = RecordingRequest(str(number), "shard"), rows_of(number)
        sinks.add(Recorded(number, ask, rows.token_ids[:PROMPT], cached=0, greedy=False), ask, rows, {})
    size = rows_of(0).nbytes
    assert pieces == ["handed", 3 * size]
    refs = sinks.publish("shard", {str(number): rows_of(number).token_ids for number in range(5)}, []).result()
    assert pieces == ["handed", 3 * size, "handed", 2 * size, 0] and list(refs) == list("01234")


def test_a_record_that_nobody_awaits_stays_in_no_memory(sinks):
    """A gateway's shard is filled for as long as it runs."""
    rows = rows_of(1)
    for key in ("left before its first token", "said"):
        add(sinks, key, rows)
    sequences = {"left before its first token": [], "never begun": [], "said": rows.token_ids}
    assert [*sinks.publish("shard", sequences, [], keep_open=True).result()] == ["said"]
    assert not sinks._open["shard"].records
