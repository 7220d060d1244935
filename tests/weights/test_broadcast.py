"""Tests broadcasts in vLLM's packed buckets over gloo: order, buckets, digests, and broadcasts that break off."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import batched
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from moe_rl.errors import SamplerGone, WeightSyncError
from moe_rl.weights import stream
from moe_rl.weights.conservation import Content
from moe_rl.weights.digest import tensor_digest
from moe_rl.weights.intake import Intake
from moe_rl.weights.reader import Reader
from moe_rl.weights.update import Broadcast, Received, WeightUpdate
from tests.weights.sending import ALONE, broadcast
from tests.weights.test_intake import BYTES, equal

BUCKET = 400  # bytes


@pytest.fixture(scope="module")
def open_sender():
    from moe_rl.weights.broadcast import Sender

    def start(workers=1, bucket=BUCKET):
        return Sender("127.0.0.1", workers, bucket, torch.device("cpu"))

    return start


def test_every_tensor_comes_in_buckets_update_after_update(taker, open_sender, weights, others):
    sender = open_sender()
    for version, tensors in ((1, others), (2, weights)):
        assert broadcast(taker, sender, tensors, version=version, replaces=version - 1)
        assert equal(taker.weights, tensors) and taker.intake.holding().version == version
    sizes = [tensor.nbytes for tensor in others.values()]
    assert sum(taker.places) == 2 * len(others) and sum(sizes) // BUCKET <= len(taker.places) // 2 <= len(others) // 2
    # a bucket is closed by the tensor that makes it too large
    assert all(count >= 2 for count in taker.places)


def test_buckets_follow_each_other_on_one_stream(taker, open_sender, others, monkeypatch):
    """On a GPU. With two streams, vLLM could read a bucket on one while the other refills its memory."""
    from vllm.distributed.weight_transfer import packed_tensor

    sender, asked, used = open_sender(), Counter(), []
    monkeypatch.setattr("moe_rl.weights.broadcast._lend_streams", lambda device: None)

    def streams(device, count):
        asked[threading.get_ident()] += count
        return [SimpleNamespace(synchronize=lambda at=at: used.append(at)) for at in range(count)]

    monkeypatch.setattr(packed_tensor, "_get_streams", streams)
    assert broadcast(taker, sender, others, version=1) and equal(taker.weights, others)
    assert list(asked.values()) == [1, 1] and len(used) > 2 * len(taker.places) > 6


@pytest.mark.parametrize("fault", BYTES)
def test_other_bytes_than_the_trainer_meant_are_refused(taker, open_sender, others, weights, fault):
    sender = open_sender()
    with pytest.raises(WeightSyncError, match="got other weights than were sent"):
        broadcast(taker, sender, others, stream=iter(BYTES[fault](others).items()), version=1)
    assert broadcast.sent is True and not equal(taker.weights, others), "the fault was not planted"
    assert not taker.intake.holding().whole
    assert broadcast(taker, sender, weights, version=2, changed=False) and taker.intake.holding().whole


@pytest.mark.parametrize("fault", ["another order", "one too many", "one too few"])
def test_a_stream_that_is_not_what_was_announced_is_broken_off(taker, open_sender, others, fault):
    """Each end cuts the stream by its own list, so the sampler would take the bytes for other tensors."""
    items = list(others.items())
    more = [*items, ("more", torch.ones(1))]
    stream = {"another order": items[::-1], "one too many": more, "one too few": items[:-1]}
    with pytest.raises(WeightSyncError, match="broke off|lack"):
        broadcast(taker, open_sender(), others, stream=iter(stream[fault]), version=1)
    assert "differs from its announcement" in broadcast.sent and not taker.intake.holding().version


def test_a_broadcast_that_breaks_off_leaves_nothing_whole(taker, open_sender, others):
    def half():
        yield from list(others.items())[:9]
        raise RuntimeError("the optimizer has gone")

    with pytest.raises(WeightSyncError, match="broadcast of weights broke off"):
        broadcast(taker, open_sender(), others, stream=half(), version=1)
    assert 0 < len(taker.weights) < len(others) and not taker.intake.holding().whole
    assert broadcast(taker, open_sender(), others, version=2)  # a trainer that is started again
    assert equal(taker.weights, others) and taker.intake.holding().whole


def test_a_trainer_does_not_wait_for_a_sampler_that_could_not_load(open_sender):
    tensors = {name: torch.zeros(8 << 20) for name in "abc"}  # more than a connection buffers

    def load(_):
        raise KeyError("layers.7")

    reader = Reader(Intake(dict.fromkeys(tensors, (8 << 20,))), load, torch.device("cpu"))
    with pytest.raises(KeyError, match="layers.7"):
        broadcast(SimpleNamespace(update_weights=reader.take), open_sender(), tensors, version=1)
    assert isinstance(broadcast.sent, str), "the trainer had sent everything before"


def test_what_is_not_confirmed_is_not_whole(taker, open_sender, others):
    assert broadcast(taker, open_sender(), others, version=1, parts=1)
    assert equal(taker.weights, others) and not taker.intake.holding().whole


@pytest.mark.parametrize("about", [{"version": 1, "replaces": 5}, {"version": 0, "replaces": 1}])
def test_a_refused_update_is_not_even_begun(taker, open_sender, others, about):
    sender = open_sender()
    with pytest.raises(WeightSyncError, match="does not hold the version that the trainer expects"):
        broadcast(taker, sender, others, **about)
    assert broadcast.sent is False and not taker.weights and taker.intake.holding().whole
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
    assert [address.ip for address in ours if address.port == sender.source().port] == ["127.0.0.1"]


def test_a_sampler_that_lost_workers_gets_a_way_of_its_own_and_the_old_one_is_closed(tmp_path, monkeypatch):
    from tests.weights.taking import sender_of

    policy = SimpleNamespace(moves=0, content=lambda dtype, updated: Content({}, torch.zeros(2, 0)))
    sender = sender_of(policy, tmp_path, "broadcast", ALONE)
    used, closed = [], []
    monkeypatch.setattr(sender, "_rounds", lambda *, host: [])
    monkeypatch.setattr("moe_rl.weights.sender.broadcast", lambda stream, way, *_: used.append(way) or 0)
    for workers in (2, 2, 1):
        sender.send(SimpleNamespace(workers=workers, address="127.0.0.1", wake=lambda part: None), len(used) + 1)
        monkeypatch.setattr(used[-1], "close", lambda way=used[-1]: closed.append(way))
    assert used[0] is used[1] and closed == used[:1] and [way.workers for way in used] == [2, 2, 1]


def test_weights_are_announced_as_changed_after_an_update_alone(tmp_path, monkeypatch):
    """The same bytes are refused as stale where they should have changed, and nowhere else."""
    from tests.weights.taking import sender_of

    told = []
    nothing = Content({}, torch.zeros(2, 0))
    policy = SimpleNamespace(moves=0, content=lambda dtype, updated: told.append(updated) or nothing)
    sender = sender_of(policy, tmp_path, "broadcast", ALONE)
    monkeypatch.setattr(sender, "_rounds", lambda *, host: [])
    announced = []

    def broadcast(stream, way, sampler, part, settle):
        announced.append(part(number=0, final=True, tensors=[], source=Received()).changed)
        return 0

    monkeypatch.setattr("moe_rl.weights.sender.broadcast", broadcast)
    sampler = SimpleNamespace(workers=1, address="127.0.0.1", wake=lambda part: None)
    for version, moves in ((1, 0), (2, 1), (3, 1), (4, 3)):
        policy.moves = moves
        sender.send(sampler, version)
    assert announced == told == [False, True, False, True]


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

    source = Broadcast("127.0.0.1", 1, 2, 1, BUCKET)
    sender = SimpleNamespace(send=send, close=closed.set, source=lambda: source)
    part = partial(WeightUpdate, version=1, replaces=0, changed=True)
    with pytest.raises((WeightSyncError, SamplerGone)) as error:
        sampler = SimpleNamespace(update_weights=update_weights)
        stream.broadcast(stream.WeightStream([], ALONE), sender, sampler, part, lambda: None)
    if isinstance(sampler_says, SamplerGone):
        assert error.value is sampler_says
    else:
        assert "failed on the trainer: Connection closed by peer" in str(error.value)
        assert sampler_says is None or str(error.value).startswith("vLLM did not load all new weights. ")


def second_rank(rounds):
    """A stream as rank 1 of two makes it, which alone has tensors: those of each dict are a round."""
    whole = [[(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()] for tensors in rounds]
    given = [stream.Round(one, iter(tensors.items())) for one, tensors in zip(whole, rounds, strict=True)]
    ranks = SimpleNamespace(gather=lambda message, kind: [kind([]), message], device=ALONE.device)
    return stream.WeightStream(given, ranks)


@pytest.fixture
def messages(monkeypatch):
    """What rank 1 sends to rank 0."""
    sent = []
    monkeypatch.setattr(stream.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(stream.dist, "send", lambda octets, to: sent.append(octets.clone()))
    return sent


def test_what_a_rank_hands_over_is_what_it_announced(messages):
    """Rank 0 takes tensors by the names that it was told: two experts that changed places would be right to it."""
    settled, tensors = [], {"up.0": torch.zeros(2, 3), "up.1": torch.ones(2, 3)}
    second_rank([tensors]).hand_over(lambda: settled.append(len(messages)))
    assert settled == [1], "when everything has been given"
    octets, told = messages[0].split([48, 32])
    assert torch.equal(octets.view(torch.float32), torch.arange(12) // 6.0)
    assert bytes(told.tolist()).hex() == "".join(tensor_digest(*item) for item in tensors.items())
    whole = second_rank([tensors])
    whole._rounds = [stream.Round([], iter(reversed(tensors.items())))]
    with pytest.raises(WeightSyncError, match="differs from its announcement.*got ..up.1.*expected ..up.0"):
        whole.hand_over(lambda: settled.append(2))
    assert len(messages) == 1 and settled == [1]


@pytest.fixture
def arriving(messages, monkeypatch):
    """The rounds that rank 0 has asked for and not yet waited for, and the most of them at a time."""
    seen = SimpleNamespace(asked=0, open=0, most=0)

    def irecv(octets, rank):
        octets.copy_(messages[seen.asked])
        seen.asked, seen.open = seen.asked + 1, seen.open + 1
        seen.most = max(seen.most, seen.open)

        def wait():
            seen.open -= 1

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(stream.dist, "irecv", irecv)
    return seen


def rounds_of(tensors, count):
    return [dict(run) for run in batched(tensors.items(), -(-len(tensors) // count))]


def test_the_next_round_of_another_rank_arrives_while_one_is_sent(messages, arriving, others):
    whole = second_rank(rounds_of(others, 4))
    whole.hand_over(lambda: None)
    assert equal(dict(iter(whole)), others)
    assert arriving.most == 2 and arriving.open == 0, "more than two would need more memory"


@pytest.mark.parametrize("flipped", [False, True])
def test_bytes_of_another_rank_that_changed_on_the_way_to_rank_0_are_refused(
    taker, open_sender, others, messages, arriving, flipped
):
    whole = second_rank(rounds_of(others, 4))
    whole.hand_over(lambda: None)
    messages[2][5] ^= flipped
    part = partial(WeightUpdate, version=1, replaces=0, changed=True)
    with pytest.raises(WeightSyncError, match="got other weights than were sent") if flipped else nullcontext():
        stream.broadcast(whole, open_sender(), taker, part, lambda: None)
    assert taker.intake.holding().whole is not flipped and equal(taker.weights, others) is not flipped


def test_a_trainer_that_is_gone_does_not_hold_the_worker_up(monkeypatch):
    """A source with an address that no socket accepts is refused as well."""
    from moe_rl.weights.broadcast import Receiver

    monkeypatch.setattr("moe_rl.weights.broadcast._REACHED", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"trainer cannot be reached.*127.0.0.1:{port}"):
        Receiver(Broadcast("127.0.0.1", port, 2, 1, BUCKET), 1, torch.device("cpu"))
    assert time.monotonic() - began < 20
    for wrong in ({"port": 70_000}, {"address": ""}, {"world_size": 1}, {"first_rank": 0}, {"bucket_bytes": 0}):
        plain = {"address": "a", "port": 1, "world_size": 2, "first_rank": 1, "bucket_bytes": 1, "type": "broadcast"}
        with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
            msgspec.convert(plain | wrong, Broadcast)
