"""Tests in which order the pool answers, with stand-ins for rank 0, the sampler and the verifiers."""

from __future__ import annotations

import asyncio
import queue
import socket
import struct
from collections import defaultdict
from types import SimpleNamespace

from moe_rl.config.load import load_config
from moe_rl.errors import RewardError
from moe_rl.messages import Channel
from moe_rl.rollout import pool_client as wire
from moe_rl.rollout.pool import _Pool, _PoolLine, _port
from moe_rl.vllm.wire import Alive, Close


class Line:
    """Stands in for the socket to rank 0."""

    def __init__(self):
        self.calls, self.said = queue.Queue(), []
        self.receive, self.send, self.answer = self.calls.get, self.said.append, self.said.append

    def beat(self):
        pass


class Rollouts:
    """Samples and judges each step when the test allows it."""

    def __init__(self):
        self.sampled, self.judged = defaultdict(asyncio.Event), defaultdict(asyncio.Event)
        self.sampler, self.player, self.retained = SimpleNamespace(), None, []
        store = SimpleNamespace(shards=list)
        self.kept, self.ledger = SimpleNamespace(store=store, unneeded=self._unneeded), None

    def _unneeded(self, steps):
        return lambda: self.retained.append(steps)

    async def open(self):
        pass

    async def close(self):
        pass

    async def sample(self, step, clock):
        await self.sampled[step].wait()
        return SimpleNamespace(step=step)

    async def keep(self, unjudged, clock):
        await self.judged[unjudged.step].wait()
        if unjudged.step == 3:
            raise RewardError("planted")

    async def evaluate(self, step):
        return {"eval/pass_rate": 0.5}


def test_only_a_feed_has_numbers_to_serve():
    def port(*overrides):
        return _port(load_config("tiny_moe_cpu", [*overrides]))

    served = "report.prometheus_port=9400"
    assert port(served, "pipeline.mode=async") == 9401
    assert port("pipeline.mode=async") is port(served) is port(served, "pipeline.mode=one_step_off") is None
    assert port(served, "pipeline.mode=async", "pipeline.max_staleness=0") is None


def test_a_step_is_judged_while_the_next_is_sampled_and_files_are_deleted_at_once(tmp_path):
    async def main():
        line, rollouts = Line(), Rollouts()
        serving = asyncio.create_task(_Pool(line, rollouts, tmp_path, {}).serve())

        async def said(*expected):
            async with asyncio.timeout(20):
                while len(line.said) < len(expected):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            shown = [(type(one).__name__, getattr(one, "step", getattr(one, "kind", None))) for one in line.said]
            assert shown == [*expected]
            line.said.clear()

        for call in (wire.TakeBatch(1), wire.TakeBatch(2), wire.EvaluatePolicy(0), wire.RetainSteps({1})):
            line.calls.put(call)
        await said(("StepsRetained", None))
        assert rollouts.retained == [{1}]
        rollouts.sampled[1].set()
        await said(("BatchSampled", 1))
        rollouts.judged[2].set()
        rollouts.sampled[2].set()
        await said(("BatchSampled", 2), ("PolicyEvaluated", None))
        rollouts.judged[1].set()
        await said(("BatchTaken", 1), ("BatchTaken", 2))
        for event in (rollouts.sampled[3], rollouts.judged[3]):
            event.set()
        line.calls.put(wire.TakeBatch(3))
        await said(("BatchSampled", 3), ("PoolFailed", "RewardError"))
        line.calls.put(Close())
        await serving

    asyncio.run(main())


def test_signs_of_life_never_wait_for_a_rank_that_does_not_read():
    """While it trains, the pool's event loop must go on. What the pool has to tell still has room."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))  # in the pool: no limit
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # some hosts have 4 MiB
        line, rank0 = _PoolLine(Channel(theirs, wire.CALLS)), Channel(ours, wire.REPLIES)
        rank0.send(wire.TakeBatch(2))
        line.receive()
        for _ in range(1000):
            line.beat()
        news = [wire.BatchSampled(2, [("sample", 1.0, 2.0)] * 1000), wire.BatchTaken(2, [])]
        line.send(news[0])
        line.answer(news[1])
        heard = []
        while heard[-2:] != news:
            heard.append(rank0.receive())
        assert 10 < len(heard) < 1000 and set(map(type, heard[:-2])) == {Alive}
        rank0.send(wire.TakeBatch(3))
        line.receive()
        line.beat()
        assert rank0.receive() == Alive()
