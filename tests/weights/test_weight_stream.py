"""Tests how ranks share the sending of a stream, hand tensors over to a sender, and end when that fails."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import batched
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from moe_rl.errors import WeightSyncError
from moe_rl.planning import sampler_memory
from moe_rl.weights import stream
from moe_rl.weights.broadcast import Sender
from moe_rl.weights.digest import tensor_digest
from moe_rl.weights.update import WeightUpdate
from tests.support.refusals import refused
from tests.weights.sending import ALONE
from tests.weights.test_intake import equal


def streams(*rounds_of_ranks, senders=1, stages=None):
    """The streams that ranks make whose tensors these are: each dict is a round."""
    stages = stages or [0] * len(rounds_of_ranks)
    everyone = [
        [
            stream.Round([(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], iter(tensors.items()))
            for tensors in rounds
        ]
        for rounds in rounds_of_ranks
    ]
    announced = []
    for rounds, stage in zip(everyone, stages, strict=True):
        gather = lambda message, kind: announced.append(message) or [message]  # noqa: E731
        ranks = SimpleNamespace(gather=gather, device=ALONE.device, stage=lambda stage=stage: stage)
        stream.WeightStream(rounds, ranks)
    made = []
    for rank, rounds in enumerate(everyone):
        with patch.object(stream.dist, "get_rank", return_value=rank):
            ranks = SimpleNamespace(**vars(ALONE) | {"gather": lambda message, kind: announced})
            made.append(stream.WeightStream(rounds, ranks, senders=senders))
    return made


@pytest.mark.parametrize(
    ("most", "senders", "turns"),
    [(1, [0], [0] * 6), (2, [0, 2], [0, 0, 1, 0, 0, 0]), (9, [0, 1, 2], [0, 1, 2, 0, 1, 0])],
)
def test_ranks_with_tensors_share_the_senders(most, senders, turns):
    """Rank 3 has none, and rank 1 has an empty round, in which it helps others."""
    names = iter("abcdef")
    one = lambda: {next(names): torch.zeros(1)}  # noqa: E731
    rounds = [[one(), one(), one()], [one(), one(), {}], [one()], [{}]]
    made = streams(*rounds, senders=most)
    for whole in made:
        assert whole.senders == senders and [at for at, _ in whole.buckets] == turns
        assert [info.name for info in whole.infos] == ["a", "d", "f", "b", "e", "c"]
    assert [whole.sends for whole in made] == [rank in senders for rank in range(4)]
    sent = {rank: [infos[0].name for infos in made[rank].own] for rank in senders}
    assert sent == {rank: [info.name for info, (at, _) in zip(made[0].infos, made[0].buckets, strict=True) if at == n]
                    for n, rank in enumerate(senders)}  # fmt: skip


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_worker_holds_few_incomplete_layers_however_many_stages_there_are(virtual):
    """16 layers on 4 stages of 2 ranks; each rank has half of a layer's experts, and a round has 3 of them."""
    layers, stages, experts = 16, 4, 8
    run = layers // stages // virtual
    rounds_of_ranks = []
    for stage in range(stages):
        own = [layer for layer in range(layers) if layer // run % stages == stage]
        for half in range(2):
            names = [f"layers.{n}.experts.{half * 4 + e}" for n in own for e in range(experts // 2)]
            rounds_of_ranks.append([dict.fromkeys(some, torch.zeros(25)) for some in batched(names, 3)])
    whole = streams(*rounds_of_ranks, stages=[0, 0, 1, 1, 2, 2, 3, 3])[0]
    held, most, at = {}, 0, 0
    for _, count in whole.buckets:
        infos, at = whole.infos[at : at + count], at + count
        for info in infos:
            layer = int(info.name.split(".")[1])
            held.setdefault(layer, []).append(info.size)
        # A layer that is complete is loaded once the bucket has come.
        most = max(most, sum(map(sum, held.values())))
        held = {layer: sizes for layer, sizes in held.items() if len(sizes) < experts}
    assert not held and len(whole.infos) == layers * experts
    a_layer, bucket = 4 * 25 * experts, 4 * 25 * 3
    facts = SimpleNamespace(moe_layers=range(1))
    counts = {"parameter_count": SimpleNamespace(expert=25 * experts), "layer_weights": ()}
    with ExitStack() as stack:
        for name, value in counts.items():
            stack.enter_context(patch.object(sampler_memory, name, lambda *_, value=value: value))
        planned = sampler_memory.sync_bytes(facts, "float32", 1, exporting=2, bucket=bucket, largest=bucket)
    assert a_layer <= most <= planned == a_layer + 3 * bucket


@pytest.fixture
def messages(monkeypatch):
    """What other ranks hand over to their sender."""
    sent = []
    monkeypatch.setattr(stream.dist, "send", lambda octets, to: sent.append((to, octets.clone())))
    return sent


def test_what_a_rank_hands_over_is_what_it_announced(messages):
    """Its sender takes tensors by the names that it was told: two experts that changed places would be right to it."""
    tensors = {"up.0": torch.zeros(2, 3), "up.1": torch.ones(2, 3)}
    _, whole = streams([], [tensors])
    whole.hand_over()
    ((to, octets),) = messages
    octets, told = octets.split([48, 32])
    assert to == 0 and torch.equal(octets.view(torch.float32), torch.arange(12) // 6.0)
    assert bytes(told.tolist()).hex() == "".join(tensor_digest(*item) for item in tensors.items())
    _, whole = streams([], [tensors])
    whole._rounds = [stream.Round([], iter(reversed(tensors.items())))]
    with pytest.raises(WeightSyncError, match="differs from its announcement.*got ..up.1.*expected ..up.0"):
        whole.hand_over()
    assert len(messages) == 1


@pytest.fixture
def arriving(messages, monkeypatch):
    """The rounds that a sender has asked for and not yet waited for, and the most of them at a time."""
    seen = SimpleNamespace(asked=0, open=0, most=0)

    def irecv(octets, rank):
        octets.copy_(messages[seen.asked][1])
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
    first, second = streams([], rounds_of(others, 4))
    second.hand_over()
    assert equal(dict(iter(first)), others)
    assert arriving.most == 2 and arriving.open == 0, "more than two would need more memory"


def test_nothing_is_asked_for_while_a_rank_makes_its_own_round(messages, arriving, others):
    """The other ranks may need it there before they can send. With NCCL an early receive keeps the GPU busy."""
    first, *rest = streams(rounds_of({f"own.{n}": torch.ones(1) for n in range(3)}, 3), *[rounds_of(others, 4)] * 2)
    for one in rest:
        one.hand_over()
    messages[:] = [messages[number] for turn in range(4) for number in (turn, turn + 4)]  # round by round
    open_in_own = []
    first._rounds = [
        stream.Round(one.whole, (open_in_own.append(arriving.open) or item for item in one.tensors))
        for one in first._rounds
    ]
    assert dict(iter(first)).keys() == {"own.0", "own.1", "own.2", *others}
    assert open_in_own == [0, 0, 0] and arriving.asked == 8
    assert arriving.most == 2, "within a round of all ranks, the next one still arrives early"


@pytest.mark.parametrize("flipped", [False, True])
def test_bytes_of_another_rank_that_changed_on_the_way_to_its_sender_are_refused(
    taker, others, messages, arriving, flipped
):
    first, second = streams([], rounds_of(others, 4))
    second.hand_over()
    messages[2][1][5] ^= flipped
    part = partial(WeightUpdate, version=1, replaces=0, changed=True)
    sender = Sender(0, "127.0.0.1", 1, ALONE.device())
    with pytest.raises(WeightSyncError, match="got other weights than were sent") if flipped else nullcontext():
        stream.broadcast(first, sender, [sender.at], taker, ALONE, part, lambda: None)
    assert taker.intake.holding().whole is not flipped and equal(taker.weights, others) is not flipped


@pytest.mark.parametrize("error", [ConnectionError("closed by peer"), RuntimeError("no memory")])
def test_a_sender_whose_workers_are_gone_lets_rank_0_say_which(monkeypatch, error):
    """Rank 0 knows the server. What the sender itself finds wrong, it says at once."""
    told = []

    def send(*_):
        raise error

    monkeypatch.setattr(stream, "time", SimpleNamespace(sleep=told.append))
    sender = SimpleNamespace(send=send, close=lambda: told.append("closed"))
    whole = streams([], [{"a": torch.zeros(1)}], senders=2)[1]
    with pytest.raises(WeightSyncError, match=f"failed on rank 1 of the trainer: {error}"):
        stream.take_part(whole, sender, ALONE, lambda: told.append("settled"))
    assert told == (["closed"] if isinstance(error, RuntimeError) else ["closed", 20.0])


def test_a_rank_that_does_not_hand_its_weights_over_is_named():
    def wait():
        raise RuntimeError("Connection closed by peer\nand more")

    with refused(WeightSyncError, rank=3, got=("Connection closed by peer",)):
        stream._arrived(3, SimpleNamespace(wait=wait), torch.zeros(1))
