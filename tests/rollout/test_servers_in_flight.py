"""Tests new weights that go into a real server while it samples, against `transformers` under both versions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moe_rl.errors import SamplerGone, WeightSyncError
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.sampler import Blocking
from tests.rollout.conftest import make_requests
from tests.rollout.in_flight import ENDLESS, PROMPT, Change, begin_late, by_broadcast, forwarded, keep, recompute
from tests.rollout.serving import serving
from tests.weights.sending import by_disk

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

AT_ONCE = 12


def test_a_server_samples_through_updates(checkpoint, weights, others, reference, other_reference, tmp_path):
    """One server, as it is slow to start: keys and values that are kept, by disk and by broadcast; a group that was
    left; and what a pause refuses."""
    with serving(checkpoint, tmp_path, "--max-num-seqs", str(AT_ONCE)) as server:
        root = Path(server.ready["trace_root"])
        client = server.client(alone=True, timeout_seconds=60)
        asyncio.run(client.adopt())
        groups = ServerFleet([client], root, "", workers=[1], max_lost=0, load_seconds=60)
        fleet, sync = Blocking(groups), root / "sync"
        sync.mkdir(parents=True)

        def update(version, tensors, **about):
            return by_disk(sync, tensors, version=version, replaces=version - 1, **about)

        fleet.update_weights(update(1, weights, changed=False))
        there = Change(reference, other_reference)
        asyncio.run(keep(groups, lambda to: to.take_weights(update(2, others)), server.store, there, old=1, new=2,
                         name="kept"))  # fmt: skip
        back = Change(other_reference, reference)
        asyncio.run(recompute(groups, lambda to: to.take_weights(update(3, weights)), server.store, back, old=2, new=3,
                              name="left"))  # fmt: skip
        asyncio.run(keep(groups, lambda to: by_broadcast(to, len(fleet.workers), others, version=4, replaces=3),
                         server.store, there, old=3, new=4, name="broadcast"))  # fmt: skip
        asyncio.run(begin_late(groups, lambda to: to.take_weights(update(5, weights)), server.store, back, old=4, new=5,
                               name="late", at_once=AT_ONCE))  # fmt: skip

        async def pauses():
            requests, leave = make_requests(1, 2, prompt=PROMPT, max_tokens=ENDLESS), asyncio.Event()
            group = asyncio.ensure_future(groups.sample(0, requests, shard="a", leave=leave))
            await forwarded(groups, 100)
            with pytest.raises(WeightSyncError, match="pause"):
                await groups.take_weights(update(6, others))
            await groups.pause()
            waiting = asyncio.ensure_future(groups.sample(0, requests, shard="b", leave=leave))
            await asyncio.sleep(0.3)
            leave.set()
            assert [(one.finish_reason, one.versions, one.routes) for one in await waiting] == [("abort", (), None)] * 2
            assert all(one.routes.rows == len(one.prompt_token_ids + one.token_ids) - 1 for one in await group)
            with pytest.raises(WeightSyncError, match="replaces version 6"):
                await groups.take_weights(update(7, others))
            with pytest.raises(WeightSyncError, match="all have confirmed"):
                await groups.resume()
            await groups.take_weights(update(6, others))
            await groups.resume()
            requests[0], told = replace(requests[0], max_tokens=5), []
            sampling = groups.sample(
                0, requests, shard="c", leave=asyncio.Event(), ended=lambda at, one: told.append(at)
            )
            group = asyncio.ensure_future(sampling)
            while not told:
                await asyncio.sleep(0.01)
            assert told == [0] and not group.done(), "the first request has ended, and the other goes on"
            started = server.processes()[1:]
            server.process.kill()
            with pytest.raises(SamplerGone):
                await group
            _, left = psutil.wait_procs(started, timeout=60)
            assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == [], "its engine outlives it"

        asyncio.run(pauses())
