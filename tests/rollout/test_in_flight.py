"""Tests new weights that go into a real engine while it samples, against `transformers` under both versions."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moe_rl.errors import EngineError, WeightSyncError
from moe_rl.trace import TraceStore
from tests.rollout.conftest import make_requests
from tests.rollout.in_flight import (
    ENDLESS,
    PROMPT,
    Change,
    by_broadcast,
    forwarded,
    keep,
    recompute,
    refuses_exchanged_versions,
)
from tests.weights.sending import by_disk

NAMES = (f"flight-{number}" for number in itertools.count())


@pytest.fixture
def flight(engine, weights, others, reference, other_reference, settings, tmp_path):
    """The shared engine as groups. It gets the other weights by `send`, and its own again after the test."""
    groups = engine.sampler
    (one,) = engine.generate(make_requests(1, 1, max_tokens=1), shard=next(NAMES))
    old = one.newest_version
    written = by_disk(tmp_path, others, version=old + 1, replaces=old)

    async def send(to, way="disk"):
        if way == "broadcast":
            await by_broadcast(to, len(engine.workers), others, version=old + 1, replaces=old)
        else:
            await to.take_weights(written)

    yield SimpleNamespace(
        groups=groups, engine=engine, send=send, store=TraceStore(settings.trace_root), folder=tmp_path,
        change=Change(reference, other_reference), old=old, new=old + 1, name=next(NAMES),
        others=others,
    )  # fmt: skip
    (one,) = engine.generate(make_requests(1, 1, max_tokens=1), shard=next(NAMES))
    if (held := one.newest_version) > old:
        engine.update_weights(by_disk(tmp_path, weights, version=held + 1, replaces=held))


@pytest.mark.seeds(3)
@pytest.mark.parametrize("way", ["disk", pytest.param("broadcast", marks=pytest.mark.long)])
def test_new_weights_go_in_while_requests_keep_their_keys_and_values(flight, way):
    send = lambda groups: flight.send(groups, way)  # noqa: E731
    sampled = asyncio.run(keep(flight.groups, send, flight.store, flight.change, old=flight.old, new=flight.new,
                               name=flight.name))  # fmt: skip
    refuses_exchanged_versions(sampled, flight.store, flight.folder / "exchanged", flight.old, flight.new)


@pytest.mark.seeds(3)
def test_a_group_that_was_left_goes_on_under_the_new_weights(flight):
    asyncio.run(recompute(flight.groups, flight.send, flight.store, flight.change, old=flight.old,
                          new=flight.new, name=flight.name))  # fmt: skip


def test_requests_that_ended_are_told_while_others_go_on(flight):
    async def run():
        requests = [replace(r, max_tokens=n) for r, n in zip(make_requests(1, 3), (2, 30, 5), strict=True)]
        told = []
        sampling = flight.groups.sample(
            0, requests, shard=f"{flight.name}-told", leave=asyncio.Event(), ended=lambda at, one: told.append(at)
        )
        sampled = await sampling
        assert [len(one.token_ids) for one in sampled] == [2, 30, 5] and told == [0, 2, 1]

    asyncio.run(run())


def test_what_a_pause_allows(flight):
    """Weights go in only while nothing is forwarded; a group may be left in a pause; torn weights are not resumed."""

    async def run():
        groups, leave = flight.groups, asyncio.Event()
        requests = make_requests(1, 2, prompt=PROMPT, max_tokens=ENDLESS)
        update = by_disk(flight.folder, flight.others, version=flight.new, replaces=flight.old)
        group = asyncio.ensure_future(groups.sample(0, requests, shard=f"{flight.name}-left", leave=leave))
        await forwarded(groups, 100)
        with pytest.raises(EngineError, match="without a pause"):
            await groups.take_weights(update)
        with pytest.raises(EngineError, match="samples alone"):
            await asyncio.to_thread(flight.engine.generate, requests, shard=f"{flight.name}-alone")
        await groups.pause()
        waiting = asyncio.ensure_future(groups.sample(0, requests, shard=f"{flight.name}-none", leave=leave))
        await asyncio.sleep(0)
        leave.set()
        assert [(one.finish_reason, one.versions, one.routes) for one in await waiting] == [("abort", (), None)] * 2
        assert all(one.routes.rows == len(one.prompt_token_ids + one.token_ids) - 1 for one in await group)
        await groups.take_weights(update)
        with pytest.raises(WeightSyncError, match=f"version {flight.new}, which the sampler holds"):
            await groups.take_weights(update)
        for call in (lambda: flight.engine.generate(requests, shard="never"), lambda: flight.engine.score([[1, 2, 3]])):
            with pytest.raises(EngineError, match="is paused"):
                await asyncio.to_thread(call)
        await groups.resume()

    asyncio.run(run())
