"""Tests broadcasts of several senders over gloo: order, buckets, digests, and broadcasts that break off."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from torch.distributed import HashStore

from moe_rl.errors import SamplerGone, WeightSyncError
from moe_rl.weights import stream
from moe_rl.weights.conservation import Content
from moe_rl.weights.digest import info_of
from moe_rl.weights.intake import Intake
from moe_rl.weights.reader import Reader
from moe_rl.weights.update import Broadcast, Received, SenderAt, WeightUpdate
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.weights import sending
from tests.weights.sending import ALONE, BUCKET, broadcast, in_buckets
from tests.weights.test_intake import BYTES, equal

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def open_sender():
    from moe_rl.weights.broadcast import Sender

    return lambda workers=1, rank=0: Sender(rank, "127.0.0.1", workers, CPU)


@pytest.fixture
def open_senders(open_sender):
    return lambda count: [open_sender(rank=3 * number) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_tensor_comes_in_buckets_update_after_update(taker, open_senders, weights, others, count):
    senders = open_senders(count)
    for version, tensors in ((1, others), (2, weights)):
        assert broadcast(taker, senders, tensors, version=version, replaces=version - 1)
        assert equal(taker.weights, tensors) and taker.intake.holding().version == version
    buckets = [len(infos) for infos in in_buckets([info_of(*item) for item in others.items()], BUCKET)]
    assert taker.places == 2 * buckets and len(buckets) == 5


def test_a_bucket_of_the_next_sender_arrives_while_one_is_loaded(taker, open_senders, others, monkeypatch):
    """And no third one: it would need memory."""
    from moe_rl.weights.broadcast import GlooGroup

    begun, start, keep = [], GlooGroup.start, taker._keep

    def noted(group, octets):
        begun.append((threading.get_ident(), group))
        return start(group, octets)

    def load(tensors):
        loaded.append([group for thread, group in begun if thread == threading.get_ident()])
        keep(tensors)

    loaded = []
    monkeypatch.setattr(GlooGroup, "start", noted)
    monkeypatch.setattr(taker.reader, "_give", load)
    assert broadcast(taker, open_senders(2), others, version=1) and equal(taker.weights, others)
    assert [len(groups) for groups in loaded] == [2, 3, 4, 5, 5]
    first, second = loaded[0]
    assert loaded[-1] == [first, second, first, second, first] and first is not second


def test_bytes_over_nccl_belong_to_the_stream_of_the_caller(monkeypatch):
    """The allocator reuses freed bytes in the order of the caller's stream. So the broadcast, on another stream, waits
    for what was given to it before, and it waits for the broadcast."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common

    from moe_rl.weights.broadcast import NcclGroup

    told, entered = [], []
    caller = SimpleNamespace(wait_event=lambda event: told.append(("caller waits for", event)))
    own = SimpleNamespace(wait_stream=lambda stream: told.append(("stream waits for", stream)),
                          record_event=lambda: "the broadcast")  # fmt: skip
    library = SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=b"id"))
    group = SimpleNamespace(broadcast=lambda octets, source, stream: told.append((octets, source, stream)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(entered.append(stream)))
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", lambda: library)
    joined = []
    monkeypatch.setattr(
        nccl_common, "uid_init_process_group", lambda *about: joined.append((*about, *entered)) or group
    )
    wait = NcclGroup(HashStore(), 0, 3, CPU).start("octets")
    assert told == [("stream waits for", caller), ("octets", 0, own)] and joined == [(b"id", 0, 3, CPU, caller)]
    wait()
    assert told[2:] == [("caller waits for", "the broadcast")]


@pytest.mark.parametrize("fault", BYTES)
def test_other_bytes_than_the_trainer_meant_are_refused(taker, open_sender, others, weights, fault):
    sender = open_sender()
    with pytest.raises(WeightSyncError, match="got other weights than were sent"):
        broadcast(taker, sender, others, streams=[iter(BYTES[fault](others).items())], version=1)
    assert broadcast.sent == [True] and not equal(taker.weights, others), "the fault was not planted"
    assert not taker.intake.holding().whole
    assert broadcast(taker, sender, weights, version=2, changed=False) and taker.intake.holding().whole


@pytest.mark.parametrize("fault", ["another order", "one too many", "one too few"])
def test_a_stream_that_is_not_what_was_announced_is_broken_off(taker, open_sender, others, fault):
    """Each end cuts the stream by its own list, so the sampler would take the bytes for other tensors."""
    items = list(others.items())
    more = [*items, ("more", torch.ones(1))]
    stream = {"another order": items[::-1], "one too many": more, "one too few": items[:-1]}
    # What comes behind all that was announced is not sent: only the trainer sees it.
    with nullcontext() if fault == "one too many" else pytest.raises(WeightSyncError, match="broke off"):
        assert not broadcast(taker, open_sender(), others, streams=[iter(stream[fault])], version=1)
    assert "differs from its announcement" in broadcast.sent[0] and not taker.intake.holding().version


def test_a_broadcast_that_breaks_off_leaves_nothing_whole(taker, open_sender, others):
    def half():
        yield from list(others.items())[:9]
        raise RuntimeError("the optimizer has gone")

    with pytest.raises(WeightSyncError, match="broadcast of weights broke off.*rank 0"):
        broadcast(taker, open_sender(), others, streams=[half()], version=1)
    assert 0 < len(taker.weights) < len(others) and not taker.intake.holding().whole
    assert broadcast(taker, open_sender(), others, version=2)  # a trainer that is started again
    assert equal(taker.weights, others) and taker.intake.holding().whole


def test_a_trainer_does_not_wait_for_a_sampler_that_could_not_load(open_sender):
    tensors = {name: torch.zeros(8 << 20) for name in "abc"}  # more than a connection buffers

    def load(_):
        raise KeyError("layers.7")

    reader = Reader(Intake(dict.fromkeys(tensors, (8 << 20,))), Path(), load, CPU)
    with pytest.raises(KeyError, match="layers.7"):
        broadcast(SimpleNamespace(update_weights=reader.take), open_sender(), tensors, version=1)
    assert isinstance(broadcast.sent[0], str), "the trainer had sent everything before"


def test_what_is_not_confirmed_is_not_whole(taker, open_sender, others):
    assert broadcast(taker, open_sender(), others, version=1, parts=1)
    assert equal(taker.weights, others) and not taker.intake.holding().whole


@pytest.mark.parametrize("about", [{"version": 1, "replaces": 5}, {"version": 0, "replaces": 1}])
def test_a_refused_update_is_not_even_begun(taker, open_sender, others, about):
    sender = open_sender()
    with pytest.raises(WeightSyncError, match="does not hold the version that the trainer expects"):
        broadcast(taker, sender, others, **about)
    assert broadcast.sent == [False] and not taker.weights and taker.intake.holding().whole
    assert broadcast(taker, sender, others, version=1), "the way is open still"


def test_several_workers_get_the_same(taker, open_sender, others, weights, tmp_path):
    """The workers belong to a tensor-parallel sampler, or to several samplers."""
    from moe_rl.weights.update import agreement
    from tests.weights.taking import Taker

    class Both:
        takers = taker, Taker(tmp_path / "checkpoint")

        def update_weights(self, update):
            sources = [update.source] * 2
            if hasattr(update.source, "first_rank"):
                sources = [msgspec.structs.replace(update.source, first_rank=rank) for rank in (1, 2)]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda one, source: one.update_weights(msgspec.structs.replace(update, source=source)),
                              self.takers, sources))  # fmt: skip

    assert broadcast(Both(), open_sender(workers=2), others, version=1)
    assert all(equal(one.weights, others) for one in Both.takers)
    agreed = agreement([one.intake.holding() for one in Both.takers])
    assert agreed.whole and not agreed.refused and agreed.version == 1


def test_the_port_is_open_to_the_named_address_alone(open_sender):
    sender = open_sender()
    ours = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert [address.ip for address in ours if address.port == sender.at.port] == ["127.0.0.1"]


def test_a_sampler_with_other_workers_gets_a_way_of_its_own_and_the_old_one_is_closed(tmp_path, monkeypatch):
    from tests.weights.taking import sender_of

    policy = SimpleNamespace(moves=0, content=lambda dtype, updated: Content({}, torch.zeros(2, 0)))
    sender = sender_of(policy, tmp_path, "broadcast", ALONE)
    used, closed = [], []
    monkeypatch.setattr(sender, "_rounds", lambda *, host: [])
    monkeypatch.setattr("moe_rl.weights.sender.broadcast", lambda stream, way, *_: used.append(way) or 0)
    for workers in (["a", "b"], ["a", "b"], ["a", "b again"], ["a"]):
        sender.send(SimpleNamespace(workers=workers, address="127.0.0.1", wake=lambda part: None), len(used) + 1)
        monkeypatch.setattr(used[-1], "close", lambda way=used[-1]: closed.append(way))
    assert used[0] is used[1] and closed == used[1:3] and [way.workers for way in used] == [2, 2, 2, 1]


def test_a_rank_listens_on_the_address_by_which_its_host_is_reached_while_it_sends(tmp_path, monkeypatch):
    from moe_rl.weights.sender import _Workers
    from tests.weights.taking import sender_of

    sender, asked = sender_of(SimpleNamespace(moves=0), tmp_path, "broadcast", ALONE), []
    monkeypatch.setattr("moe_rl.weights.sender.own_address", lambda *other: asked.append(other[0]) or "127.0.0.2")
    for rank, to, heard in ((0, "127.0.0.1", "127.0.0.1"), (3, "10.0.0.1", "127.0.0.2")):
        sender._listen(_Workers(["a", "b"], to), SimpleNamespace(rank=rank, sends=True))
        assert (sender._sender.at.rank, sender._sender.at.address, sender._sender.workers) == (rank, heard, 2)
        sender._listen(_Workers(["a", "b"], to), SimpleNamespace(rank=rank, sends=False))
        assert sender._sender is None
    assert asked == ["10.0.0.1"]


def test_a_rank_that_cannot_listen_is_named(tmp_path, monkeypatch):
    from moe_rl.weights.sender import _Workers
    from tests.weights.taking import sender_of

    sender = sender_of(SimpleNamespace(moves=0), tmp_path, "broadcast", ALONE)
    monkeypatch.setattr("moe_rl.weights.sender.own_address", lambda *other: "192.0.2.77")  # no host has this address
    with refused(WeightSyncError, rank=3, host="10.0.0.1"):
        sender._listen(_Workers(["a", "b"], "10.0.0.1"), SimpleNamespace(rank=3, sends=True))


@pytest.mark.parametrize(("to", "on_host", "senders"), [("127.0.0.1", 4, 3), ("127.0.0.1", 2, 1), ("10.0.0.1", 2, 3)])
def test_samplers_that_no_other_host_reaches_get_all_from_rank_0(tmp_path, monkeypatch, to, on_host, senders):
    from tests.weights.taking import sender_of

    ranks, asked = SimpleNamespace(**vars(ALONE) | {"gather": lambda message, kind: [message] * 4}), []
    sender = sender_of(SimpleNamespace(moves=0), tmp_path, "broadcast", ranks, weight_senders=3)

    class Asked(Exception):
        pass

    def planned(rounds, ranks, *, senders):
        asked.append(senders)
        raise Asked

    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_host))
    monkeypatch.setattr("moe_rl.weights.sender.WeightStream", planned)
    monkeypatch.setattr(sender, "_rounds", lambda *, host: [])
    with pytest.raises(Asked):
        sender._stream(SimpleNamespace(workers=["a"], address=to), None)
    assert asked == [senders]


def test_weights_are_announced_as_changed_after_an_update_alone(tmp_path, monkeypatch):
    """The same bytes are refused as stale where they should have changed, and nowhere else."""
    from tests.weights.taking import sender_of

    told = []
    nothing = Content({}, torch.zeros(2, 0))
    policy = SimpleNamespace(moves=0, content=lambda dtype, updated: told.append(updated) or nothing)
    sender = sender_of(policy, tmp_path, "broadcast", ALONE)
    monkeypatch.setattr(sender, "_rounds", lambda *, host: [])
    announced = []

    def broadcast(stream, way, senders, sampler, ranks, part, settle):
        announced.append(part(number=0, final=True, tensors=[], source=Received()).changed)
        return 0

    monkeypatch.setattr("moe_rl.weights.sender.broadcast", broadcast)
    sampler = SimpleNamespace(workers=["a"], address="127.0.0.1", wake=lambda part: None)
    for version, moves in ((1, 0), (2, 1), (3, 1), (4, 3)):
        policy.moves = moves
        sender.send(sampler, version)
    assert announced == told == [False, True, False, True]


SERVERS = {"servers": ("http://10.0.0.1:80",), "token_file": "token"}


@pytest.mark.parametrize(("rollout", "gives"), [({}, ["give back"]), (SERVERS, [])], ids=["engine", "servers"])
def test_a_sampler_on_the_same_gpu_wakes_into_memory_that_is_free(tmp_path, monkeypatch, rollout, gives):
    """What torch has reserved for training, and then for the transfer, no other process could have."""
    from tests.weights.taking import sender_of

    done = []
    policy = SimpleNamespace(
        moves=0, content=lambda dtype, updated: done.append("look") or Content({}, torch.zeros(2, 0))
    )
    ranks = SimpleNamespace(**vars(ALONE) | {"give_back": lambda: done.append("give back")})
    sender = sender_of(policy, tmp_path, "broadcast", ranks, **rollout)
    monkeypatch.setattr(sender, "_rounds", lambda *, host: [])
    monkeypatch.setattr("moe_rl.weights.sender.broadcast", lambda *_: done.append("send") or 0)
    sender.send(SimpleNamespace(workers=["a"], address="127.0.0.1", wake=done.append), 1)
    assert done == ["look", *gives, "weights", "send", *gives, "kv_cache"]


@pytest.mark.parametrize(("rank", "gives"), [(0, True), (1, True), (2, False)])
def test_every_rank_with_an_engine_on_its_gpu_frees_memory_before_the_engines_wake(tmp_path, monkeypatch, rank, gives):
    from tests.weights.taking import sender_of

    done = []
    policy = SimpleNamespace(moves=0, content=lambda dtype, updated: Content({}, torch.zeros(2, 0)))
    ranks = SimpleNamespace(**vars(ALONE) | {"give_back": lambda: done.append("give back")})
    monkeypatch.setattr("moe_rl.weights.sender.dist.get_world_size", lambda: 2)
    sender = sender_of(policy, tmp_path, "cuda_ipc", ranks, engines=2, prompts_per_step=2)
    monkeypatch.setattr(sender, "_place", lambda *_: done.append("send") or 0)
    monkeypatch.setattr("moe_rl.weights.sender.dist.get_rank", lambda: rank)
    monkeypatch.setattr("moe_rl.weights.sender.dist.barrier", lambda: done.append("all are here"))
    sender.send(None if rank else SimpleNamespace(wake=done.append), 1)
    before, wakes = ["give back"] * gives + ["all are here"], lambda part: [] if rank else [part]
    assert done == [*before, *wakes("weights"), "send", *before, *wakes("kv_cache")]


@pytest.mark.parametrize(
    "sampler_says", [WeightSyncError("vLLM did not load all new weights"), SamplerGone("server 1 is gone"), None]
)
def test_of_a_broadcast_that_failed_both_ends_tell(sampler_says):
    """When a server dies, the trainer's broadcast fails too: the run must report the server's error."""
    closed = threading.Event()

    def send(*_):
        raise RuntimeError("Connection closed by peer")

    def update_weights(update):
        assert closed.wait(20)
        if sampler_says is not None:
            raise sampler_says

    sender = SimpleNamespace(send=send, close=closed.set, workers=1)
    part = partial(WeightUpdate, version=1, replaces=0, changed=True)
    with pytest.raises((WeightSyncError, SamplerGone)) as error:
        sampler = SimpleNamespace(update_weights=update_weights)
        stream.broadcast(stream.WeightStream([], ALONE), sender, [], sampler, ALONE, part, lambda: None)
    if isinstance(sampler_says, SamplerGone):
        assert error.value is sampler_says
    else:
        assert "failed on the trainer: Connection closed by peer" in str(error.value)
        assert sampler_says is None or str(error.value).startswith("vLLM did not load all new weights. ")


def test_a_sender_that_breaks_off_is_named(taker, open_senders, others, monkeypatch):
    """The other one hears of it: the worker closes its connection. Groups that an error's traceback refers to are left
    all the same."""
    from moe_rl.weights.broadcast import GlooGroup

    kept, start = [], GlooGroup.start
    monkeypatch.setattr(GlooGroup, "start", lambda group, octets: kept.append(group) or start(group, octets))

    def half():
        yield from list(others.items())[4:8]
        raise RuntimeError("a rank without memory")

    infos = in_buckets([info_of(*item) for item in others.items()], BUCKET)
    mine = ((info.name, others[info.name]) for run in infos[::2] for info in run)
    with pytest.raises(WeightSyncError, match="broadcast of weights broke off.*rank 3, 127.0.0.1:"):
        broadcast(taker, open_senders(2), others, streams=[mine, half()], version=1)
    assert "a rank without memory" in broadcast.sent[1] and not taker.intake.holding().whole
    assert set(taker.weights) == {info.name for run in infos[:3] for info in run}


def test_a_sender_that_left_sends_nothing_more(open_sender):
    sender = open_sender()
    sender.close()
    with refused(WeightSyncError, fault="closed", rank=0):
        sender.send([], iter(()), threading.Event())


def sending_process(line, names):
    """Send a bucket of each tensor, and end without a word before the third one."""
    from moe_rl.weights.broadcast import Sender

    sender = Sender(5, "127.0.0.1", 1, CPU)
    line.send(sender.at)
    tensors = {name: torch.ones(1 << 20) for name in names}

    def dying():
        for number, item in enumerate(tensors.items()):
            if number == 2:
                os._exit(0)
            yield item

    sender.send([[info_of(*item)] for item in tensors.items()], dying(), threading.Event())


def test_a_sender_that_dies_is_named(open_sender):
    names = [f"{number}.weight" for number in range(8)]
    line, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=sending_process, args=(theirs, names[1::2]))
    process.start()
    tensors, sender, got, stopped = {name: torch.ones(1 << 20) for name in names}, open_sender(), [], threading.Event()
    infos = [info_of(*item) for item in tensors.items()]
    reader = Reader(Intake(dict.fromkeys(names, (1 << 20,))), Path(), got.append, CPU)
    turns = [(number % 2, 1) for number in range(8)]
    update = WeightUpdate(1, 0, 0, False, True, infos, Broadcast([sender.at, line.recv()], turns, 2, 1))
    mine = ([[info] for info in infos[::2]], ((name, tensors[name]) for name in names[::2]), stopped)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, *mine)
        with pytest.raises(WeightSyncError, match="broadcast of weights broke off.*rank 5, 127.0.0.1:"):
            reader.take(update)
        # The one that lives does not wait for ever: the worker has left.
        assert isinstance(sending.exception(20), ConnectionError)
    process.join()
    # 3: the second bucket of the dying sender was lost on its way. 5: its end was seen behind the other's next bucket.
    assert [name for tensors in got for name in tensors] == names[: len(got)] and len(got) in (3, 4, 5)


@pytest.mark.parametrize("fault", ["senders", "turns", "lost", "twice", "nobody"])
def test_a_wrong_plan_of_senders_is_refused(taker, open_senders, others, monkeypatch, fault):
    """Two senders that change places, or turns, or a bucket of which nobody or somebody else knows."""
    plan, told = sending.in_turns, {}

    def wrong(buckets, *senders):
        source = plan(buckets, *senders)
        turns = list(source.buckets)
        changed = {
            "turns": [(1 - at, count) for at, count in turns],
            "lost": turns[:-1],
            "twice": [*turns, turns[0]],
            "nobody": [(2, turns[0][1]), *turns[1:]],
        }
        if fault != "senders":
            return msgspec.structs.replace(source, buckets=changed[fault])
        first, second = source.senders
        swapped = [SenderAt(first.rank, second.address, second.port), SenderAt(second.rank, first.address, first.port)]
        return msgspec.structs.replace(source, senders=swapped)

    monkeypatch.setattr(sending, "in_turns", wrong)
    told = {
        "senders": "Another rank of the trainer sends from this address.*rank 0.*got 3.*[Ee]xpected 0",
        "turns": "sends other tensors than were announced.*rank 0",
    }
    with pytest.raises(WeightSyncError, match=told.get(fault, "buckets of a broadcast are not those of its tensors")):
        broadcast(taker, open_senders(2), others, version=1)
    assert broadcast.sent == [False, False] and not taker.weights and taker.intake.holding().whole


def test_a_trainer_that_is_gone_does_not_hold_the_worker_up(monkeypatch):
    """A source with an address that no socket accepts is refused as well."""
    from moe_rl.weights.broadcast import Receiver

    monkeypatch.setattr("moe_rl.weights.broadcast._REACHED", timedelta(seconds=1))
    port = free_port()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"trainer cannot be reached.*rank 7, 127.0.0.1:{port}"):
        Receiver(Broadcast([SenderAt(7, "127.0.0.1", port)], [], 2, 1), 1, CPU)
    assert time.monotonic() - began < 20
    at = {"rank": 0, "address": "a", "port": 1}
    plain = {"senders": [list(at.values())], "buckets": [], "world_size": 2, "first_rank": 1, "type": "broadcast"}
    assert msgspec.convert(plain, Broadcast).senders == [SenderAt(**at)]
    for wrong in ({"rank": -1}, {"port": 70_000}, {"address": ""}):
        with pytest.raises(msgspec.ValidationError, match=r"senders\[0\]"):
            msgspec.convert(plain | {"senders": [list((at | wrong).values())]}, Broadcast)
    for wrong in ({"senders": []}, {"buckets": [[0, -1]]}, {"world_size": 1}, {"first_rank": 0}):
        with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
            msgspec.convert(plain | wrong, Broadcast)
