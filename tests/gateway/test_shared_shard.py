"""Tests when the shard that a gateway's turns share is published."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from moe_rl.errors import EngineError, SamplerGone
from moe_rl.gateway import shared_shard
from moe_rl.gateway.shared_shard import SharedShard
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore


class Places:
    """Is a sampler that notes what it is to publish. Its places are lost when it is gone."""

    def __init__(self, *fails: EngineError, lost=()):
        self.fails, self.lost, self.published, self.places = list(fails), list(lost), [], (0, 1)

    def shard_at(self, place, shard):
        return f"{shard}-{place}"

    async def publish(self, shard, *, keep_open):
        self.published.append(keep_open)
        await asyncio.sleep(0.01)
        if self.fails:
            error = self.fails.pop()
            if isinstance(error, SamplerGone):
                self.places = ()
            raise error
        return self.lost


@pytest.fixture
def recovered(monkeypatch):
    names = []
    monkeypatch.setattr(shared_shard, "recover_shard", lambda root, name, seconds: not names.append(name))
    return names


def test_sessions_that_are_finished_together_share_a_publication(tmp_path):
    async def run():
        sampler = Places()
        shard = SharedShard(sampler, tmp_path)
        await shard.publish(last=True)
        assert sampler.published == [], "nothing was sampled"
        shard.fresh = True
        await asyncio.gather(*(shard.publish() for _ in range(9)))
        running = asyncio.create_task(shard.publish())
        shard.fresh = True  # a turn ends
        await asyncio.gather(running, shard.publish())
        assert sampler.published == [True, True]
        await shard.publish(last=True)
        assert sampler.published == [True, True, False]

    asyncio.run(run())


def test_what_a_lost_place_wrote_is_recovered(tmp_path, recovered):
    async def run(sampler, *, last):
        shard = SharedShard(sampler, tmp_path)
        shard.fresh = True
        await shard.publish(last=last)
        return shard.name

    asyncio.run(run(Places(lost=["a-1"]), last=False))
    assert recovered == ["a-1"]
    with pytest.raises(SamplerGone):
        asyncio.run(run(Places(SamplerGone("died")), last=False))
    name = asyncio.run(run(Places(SamplerGone("died")), last=True))
    assert recovered == ["a-1", f"{name}-0", f"{name}-1"]


def test_what_a_lost_place_holds_while_its_process_lives_is_recovered_later(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_shard, "DYING_SECONDS", 0.0)
    living = ShardWriter(tmp_path, "a-1", TraceSpec("model", 4, 2, "m"))
    (path,) = tmp_path.glob(".a-1.*.tmp")

    async def run():
        sampler = Places(lost=["a-1"])
        shard = SharedShard(sampler, tmp_path)
        shard.fresh = True
        await shard.publish()
        sampler.lost = []  # a lost place is told once
        await shard.publish()
        assert shard.unrecovered == {"a-1"} and not TraceStore(tmp_path).shards()
        written = path.read_bytes()
        living.abandon()
        path.write_bytes(written)  # as the kernel leaves it: nobody holds its lock
        await shard.publish()
        assert not shard.unrecovered and TraceStore(tmp_path).shards() == ["a-1"]
        assert sampler.published == [True]

    asyncio.run(run())


def test_turns_whose_publication_failed_are_published_again(tmp_path):
    async def run():
        sampler = Places(EngineError("planted: no room"))
        shard = SharedShard(sampler, tmp_path)
        shard.fresh = True
        with pytest.raises(EngineError):
            await shard.publish()
        for _ in range(2):
            await shard.publish()
        assert sampler.published == [True, True], "the second succeeded"

    asyncio.run(run())


def test_new_turns_are_published_in_time_and_an_error_ends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shared_shard, "_PUBLISH_SECONDS", 0.01)

    async def run():
        error = EngineError("planted: no room")
        sampler, failed = Places(error), []
        shard = SharedShard(sampler, tmp_path)
        tending = asyncio.create_task(shard.tend(failed.append))
        shard.fresh = True
        while shard.fresh:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        tending.cancel()
        with suppress(asyncio.CancelledError):
            await tending
        assert sampler.published == [True, True] and failed == [error]

    asyncio.run(run())
    assert "planted: no room" in capsys.readouterr().err
