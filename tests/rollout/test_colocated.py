"""Tests several engines as one sampler, with stand-ins for them. In tests/end_to_end real ones run in test_brief.py,
and one of them dies in test_faults.py."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.errors import EngineError, SamplerGone, WeightSyncError
from moe_rl.rollout import colocated
from moe_rl.rollout.colocated import ColocatedEngines, start_engines
from moe_rl.rollout.sampler import Blocking, nobody
from moe_rl.types import Completion, GenerateRequest, ScoredTokens, sampled_by
from moe_rl.vllm.process import child_environment
from moe_rl.vllm.wire import EngineSettings
from moe_rl.weights.update import Broadcast, Files, Holding, SenderAt, WeightUpdate
from tests.support.refusals import refused

REQUESTS = [GenerateRequest(f"p{p}/c{c}", (p, 1, 2), 10 * p + c, 4, 1.0, ()) for p in range(4) for c in range(3)]


@dataclass(eq=False)
class Engine:
    """A stand-in for a running engine. It raises `fails` once it is called, and holds `digest` if that is set."""

    number: int
    fails: Exception | None = None
    digest: str = ""
    slow: bool = False
    shards: dict[str, list[str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    updates: list[WeightUpdate] = field(default_factory=list)
    cancelled: bool = False
    address: str = "127.0.0.1"
    vllm_version: str = "0.32.0"

    @property
    def workers(self) -> list[str]:
        return [f"engine{self.number}"]

    def name(self) -> str:
        return f"engine {self.number}"

    async def _called(self, what: str) -> None:
        self.calls.append(what)
        try:
            await asyncio.sleep(30 if self.slow else 0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.fails is not None:
            raise self.fails

    async def sample(self, place, requests, *, shard, leave=None, ended=nobody, keep_open=False):
        await self._called(f"sample open {shard}" if keep_open else "sample")
        assert place == 0 and shard not in self.shards
        self.shards[shard] = [request.key for request in requests]
        made = [
            Completion(r.key, r.prompt_token_ids, (r.seed,), np.zeros(1, np.float32), "stop", sampled_by(0, 1), None)
            for r in requests
        ]
        for at, one in enumerate(made):
            ended(at, one)
        return made

    async def score(self, runs, *, shard=None):
        await self._called(f"score {shard}")
        return [ScoredTokens([np.zeros(1, np.float32)], [], self.name())]

    async def publish(self, shard, *, keep_open):
        await self._called(f"publish {shard}" + " so far" * keep_open)
        return []

    async def counts(self):
        return {"forwarded": 1 + self.number}

    async def load(self, update):
        await self._called("load")
        self.updates.append(update)
        return Holding(update.version, self.digest or f"digest{update.version}", True)

    async def pause(self):
        await self._called("pause")

    async def resume(self):
        await self._called("resume")

    async def sleep(self, level):
        await self._called(f"sleep {level}")
        return self.number < 2

    async def wake(self, part):
        await self._called(f"wake {part}")

    def close(self):
        self.calls.append("close")


def update(version: int, *, final: bool = True, source=None) -> WeightUpdate:
    return WeightUpdate(version, version - 1, 0, final, True, [], source or Files(["part0"]))


def made(count: int = 2, **settings) -> tuple[Blocking, list[Engine]]:
    engines = [Engine(number, **settings) for number in range(count)]
    return Blocking(ColocatedEngines(engines)), engines


def test_engines_share_the_requests_and_each_has_its_own_shard():
    sampler, engines = made()
    told = {}
    completions = sampler.generate(REQUESTS, shard="step000007", ended=told.__setitem__)
    assert [(c.key, c.token_ids) for c in completions] == [(r.key, (r.seed,)) for r in REQUESTS]
    assert told == dict(enumerate(completions))
    assert [list(engine.shards) for engine in engines] == [["step000007-engine0"], ["step000007-engine1"]]
    assert sorted(key for one in engines for keys in one.shards.values() for key in keys) == [r.key for r in REQUESTS]
    assert [one.by for one in sampler.score([[1, 2]], shard="canary")] == ["engine 0", "engine 1"]
    sampler.score([[1, 2]])
    scored = [[call for call in engine.calls if call.startswith("score")] for engine in engines]
    assert scored == [[f"score canary-engine{n}", "score None"] for n in (0, 1)]
    assert sampler.counts() == {"forwarded": 3} and sampler.workers == ["engine0", "engine1"]


def test_a_shard_that_calls_share_is_published_where_they_were():
    sampler, engines = made(3)
    for place in (2, 0):
        sampler.run(sampler.sampler.sample(place, REQUESTS[:1], shard="turns", leave=asyncio.Event(), keep_open=True))
    for _ in range(2):
        assert sampler.run(sampler.sampler.publish("turns")) == []
    names = [[f"sample open turns-engine{n}", f"publish turns-engine{n}"] for n in range(3)]
    assert [engine.calls for engine in engines] == [names[0], [], names[2]]
    assert sampler.sampler.shard_at(2, "turns") == "turns-engine2"


def test_all_sleep_and_wake_and_pause_together():
    sampler, engines = made()
    assert sampler.sleep(2) is True
    sampler.wake("weights")
    sampler.run(sampler.sampler.pause())
    sampler.run(sampler.sampler.resume())
    assert [engine.calls for engine in engines] == [["sleep 2", "wake weights", "pause", "resume"]] * 2
    sampler, _ = made(3)
    assert sampler.sleep(1) is False, "one of them kept its memory"


def test_each_loads_every_part_and_in_a_broadcast_has_its_own_rank():
    sampler, engines = made(3)
    sender = SenderAt(0, "127.0.0.1", 9)
    sampler.update_weights(update(1, final=False, source=Broadcast([sender], [(0, 1)], 4, 1)))
    sampler.update_weights(update(1))
    assert [engine.updates[0].source.first_rank for engine in engines] == [1, 2, 3]
    assert [engine.updates[1].source.paths for engine in engines] == [["part0"]] * 3


def tries(sampler: Blocking):
    """Yield the calls that need whole weights."""
    yield lambda: sampler.generate(REQUESTS, shard="s")
    yield lambda: sampler.score([[1, 2]])
    yield lambda: sampler.run(sampler.sampler.resume())


def test_nothing_is_sampled_before_all_hold_the_same_weights():
    sampler, engines = made()
    sampler.update_weights(update(1, final=False))
    for call in tries(sampler):
        with pytest.raises(WeightSyncError, match="hold no weights that all have confirmed"):
            call()
    engines[1].digest = "another"
    with refused(WeightSyncError, got=("engine 0: version 1, digest digest1", "engine 1: version 1, digest another")):
        sampler.update_weights(update(1))
    engines[1].digest, engines[0].fails = "", WeightSyncError("torn")
    with pytest.raises(WeightSyncError, match="torn"):
        sampler.update_weights(update(2))
    engines[0].fails = None
    for call in tries(sampler):
        with pytest.raises(WeightSyncError, match="hold no weights"):
            call()
    sampler.update_weights(update(2))
    for call in tries(sampler):
        call()
    assert all("resume" in engine.calls and engine.shards for engine in engines)


def test_one_that_dies_ends_the_run_and_the_calls_of_the_others():
    sampler, engines = made()
    engines[0].slow, engines[1].fails = True, SamplerGone("engine 1 died")
    with pytest.raises(SamplerGone, match="engine 1 died"):
        sampler.generate(REQUESTS, shard="step000001")
    assert engines[0].cancelled and not engines[0].shards
    sampler.close()
    assert all(engine.calls[-1] == "close" for engine in engines)


@pytest.fixture
def starting(monkeypatch, tmp_path):
    """start(count, broken) starts stand-ins, and `spawned` lists them. Engine `broken` cannot start."""
    spawned = []

    def spawn(settings, number=0, engines=1, *, waits=True):
        one = Engine(number)
        one.log, one.of, one.waits = settings.log_path, engines, waits
        one.wait = lambda: one.calls.append("wait") if number != start.broken else broken(number)
        spawned.append(one)
        return one

    def broken(number):
        raise EngineError(f"engine {number} could not start")

    def start(count, broken=-1):
        start.broken = broken
        log = tmp_path / "engine.log"
        return start_engines(EngineSettings(tmp_path, "float32", 8, 1, 1, None, "", log, 20.0, 0), count)

    monkeypatch.setattr(colocated, "VllmEngine", spawn)
    return SimpleNamespace(start=start, spawned=spawned)


def test_engines_are_spawned_before_any_is_waited_for(starting):
    sampler = starting.start(3)
    assert sampler.places == range(3) and sampler.engines == starting.spawned
    assert [one.log.name for one in starting.spawned] == ["engine0.log", "engine1.log", "engine2.log"]
    assert all(not one.waits and one.of == 3 and one.calls == ["wait"] for one in starting.spawned)
    alone = starting.start(1)
    assert alone is starting.spawned[3] and alone.waits and alone.log.name == "engine.log"


def test_if_one_cannot_start_none_is_left(starting):
    with pytest.raises(EngineError, match="engine 1 could not start"):
        starting.start(3, broken=1)
    assert [one.calls for one in starting.spawned] == [["wait", "close"], ["close"], ["close"]]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, ["0", "1"]), ("4,5,6,7", ["4", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]), ("", ["", ""])],
)
def test_each_engine_sees_its_ranks_gpu_and_has_its_part_of_the_cores(monkeypatch, visible, gpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = [child_environment("patch", number, 2) for number in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in made] == gpus
    assert [one["OMP_NUM_THREADS"] for one in made] == ["4", "4"]
    alone = child_environment("patch")
    assert alone.get("CUDA_VISIBLE_DEVICES") == visible and alone["OMP_NUM_THREADS"] == "8"
