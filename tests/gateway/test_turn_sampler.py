"""Tests where turns are sampled, with a place that is lost in the middle of a turn, over a real engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moe_rl.errors import EngineError, RequestRefused, SamplerGone, SessionError
from moe_rl.gateway.asking import SamplingWish
from moe_rl.gateway.finishing import check_session
from moe_rl.gateway.session_sequences import sequences_of
from moe_rl.gateway.sessions import Session
from moe_rl.gateway.turn_sampler import SamplerBounds, TurnSampler
from moe_rl.rollout.sampler import ServerLost
from moe_rl.trace import TraceStore
from tests.gateway.conftest import LONGEST, VOCAB
from tests.gateway.session_turns import WIDE, said
from tests.support.refusals import refused

BOUNDS = SamplerBounds(LONGEST, VOCAB, True, True, 2)


class TwoPlaces:
    """One engine as two places. A place that is to be lost fails when its call has sampled.

    `running` has the calls of each place, and `most` the most that it had at once.
    """

    def __init__(self, engine):
        self.engine = engine.sampler
        self.there, self.lost, self.running, self.most, self.at = [0, 1], set(), [0, 0], [0, 0], []

    @property
    def places(self):
        return tuple(self.there)

    async def sample(self, place, requests, *, shard, **more):
        self.running[place] += 1
        self.most[place] = max(self.most[place], self.running[place])
        self.at.append(place)
        try:
            sampled = await self.engine.sample(0, requests, shard=f"{shard}-server{place}", **more)
        finally:
            self.running[place] -= 1
        if place in self.lost and place in self.there:
            self.there = [one for one in self.there if one != place]
            raise ServerLost("lost", sum(len(one.token_ids) for one in sampled))
        return sampled

    def shard_at(self, place, shard):
        return f"{shard}-server{place}"


async def say(turns: TurnSampler, session: Session, prompt, most=6):
    place = session.begin(prompt, samples=1, max_tokens=most, now=0.0)
    try:
        (one,), continues = await turns.sample(session, place, SamplingWish(), asyncio.Event())
        return session.add(place, one, continues=continues)
    finally:
        session.drop(place)


def test_a_turn_of_a_lost_place_is_sampled_again_elsewhere(engine, settings):
    async def run():
        sampler = TwoPlaces(engine)
        turns = TurnSampler(sampler, BOUNDS, seed=5)
        session = Session("lost-place", "g", WIDE, 0.0)
        session.shard = "lost-place"
        await say(turns, session, [5, 6, 7])
        (home,) = sampler.at
        sampler.lost.add(home)
        await say(turns, session, [*session.ids(0), 9])
        await say(turns, session, [*session.ids(1), 9])
        assert sampler.at == [home, home, 1 - home, 1 - home]
        assert (turns.counts["sampled_again"], turns.counts["lost_tokens"]) == (1, len(session.turns[1].token_ids))
        assert [turn.continues for turn in session.turns] == [False, False, True]
        for place in (0, 1):
            await engine.sampler.publish(sampler.shard_at(place, session.shard))
        check_session(session.finish(), TraceStore(settings.trace_root))
        sampler.there = []
        with pytest.raises(SamplerGone):
            await say(turns, session, [1])
        assert not session.busy

    asyncio.run(run())


def test_turns_share_a_shard_at_a_place_and_do_not_continue_that_of_a_lost_one(engine, settings):
    async def run():
        sampler = TwoPlaces(engine)
        turns, sessions = TurnSampler(sampler, BOUNDS, seed=5), [Session(f"s{n}", "g", WIDE, 0.0) for n in range(2)]
        for session in sessions:
            session.shard = "shared"
        await asyncio.gather(*(say(turns, one, [5, 6, 7 + n]) for n, one in enumerate(sessions)))
        session = sessions[0]
        await say(turns, session, [*session.ids(0), 9])
        home = sampler.at[-1]
        sampler.lost.add(home)
        for turn in (1, 2):
            await say(turns, session, [*session.ids(turn), 9])
        assert [turn.continues for turn in session.turns] == [False, True, False, True]
        found = [turn.routes.parts[0].shard for turn in session.turns]
        assert found == [sampler.shard_at(place, "shared") for place in (home, home, 1 - home, 1 - home)]
        assert turns.counts["recorded_anew"] == 1 and not set(found) & set(TraceStore(settings.trace_root).shards())
        for name in set(found):
            await engine.sampler.publish(name)
        for one in sessions:
            check_session(one.finish(), TraceStore(settings.trace_root))
        session.tell_received([3])
        assert [len(one.turns or one.token_ids) for one in sequences_of(session.finish())] == [
            sum(len(turn.token_ids) for turn in session.turns[at : at + 2]) for at in (0, 2)
        ]

    asyncio.run(run())


def test_places_get_no_more_calls_than_they_may_run(engine):
    async def run():
        sampler = TwoPlaces(engine)
        turns = TurnSampler(sampler, BOUNDS, seed=6)
        sessions = [Session(f"many{number}", "g", WIDE, 0.0) for number in range(8)]
        await asyncio.gather(*(say(turns, one, [5, number]) for number, one in enumerate(sessions)))
        assert sampler.most == [2, 2] and len(sampler.at) == 8

    asyncio.run(run())


def test_a_prompt_that_cannot_be_sampled_is_refused_before_any_place_has_it(engine):
    sampler = TwoPlaces(engine)
    turns, session = TurnSampler(sampler, BOUNDS, seed=7), Session("never", "g", WIDE, 0.0)
    for prompt, wish in (([VOCAB], SamplingWish()), ([1], SamplingWish(temperature=9.0)), ([1], SamplingWish(top_p=0))):
        place = session.begin(prompt, samples=1, max_tokens=4, now=0.0)
        with pytest.raises(EngineError):
            turns.check(place, wish)
        session.drop(place)
    assert sampler.at == []


class ManyWeights:
    """One place without an engine. `version` is that of its weights."""

    places = (0,)

    def __init__(self):
        self.version, self.asked = 0, []

    async def sample(self, place, requests, *, shard, leave, keep_open):
        self.asked.append(requests[0])
        return [said(one.prompt_token_ids, [3], key=one.key, version=self.version) for one in requests]

    def shard_at(self, place, shard):
        return shard


def test_a_turn_that_begins_just_as_the_weights_change_is_sampled_again():
    async def run():
        sampler = ManyWeights()
        turns, session = TurnSampler(sampler, BOUNDS, seed=1), Session("changing", "g", WIDE, 0.0)
        session.shard = "changing"
        await say(turns, session, [1, 2])
        sampler.version = 1
        turn = await say(turns, session, [1, 2, 3, 4])
        assert [one.parent is None for one in sampler.asked] == [True, False, True]
        assert (turn.continues, turn.versions[0].weight_version, turns.version) == (False, 1, 1)
        assert (turns.counts["over_older_rows"], turns.counts["recorded_anew"]) == (1, 1)
        assert (await say(turns, session, [1, 2, 3, 4, 3, 5])).continues

    asyncio.run(run())


def test_no_turn_begins_while_weights_go_in():
    async def run():
        sampler = ManyWeights()
        turns, session = TurnSampler(sampler, BOUNDS, seed=1), Session("held", "g", WIDE, 0.0)
        await say(turns, session, [1, 2])
        turns.hold()
        waiting = asyncio.create_task(say(turns, session, [1, 2, 3, 4]))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done() and len(sampler.asked) == 1
        sampler.version = 1
        turns.updated(1)
        turn = await waiting
        assert len(sampler.asked) == 2 and not turn.continues and turns.counts["over_older_rows"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("waits_for", ["weights", "room"])
def test_a_request_that_is_left_before_it_begins_is_not_sampled(waits_for):
    class NeverEnds(ManyWeights):
        async def sample(self, place, requests, **more):
            self.asked.append(requests[0])
            await more["leave"].wait()
            return []

    async def run():
        sampler, session = NeverEnds(), Session("left", "g", WIDE, 0.0)
        turns = TurnSampler(sampler, replace(BOUNDS, at_once=1), seed=1)
        place = session.begin([1, 2], samples=1, max_tokens=3, now=0.0)
        before, leave = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(turns.sample(session, place, SamplingWish(), before))
        await asyncio.sleep(0)
        if waits_for == "weights":
            before.set()
            await running
            turns.hold()
        waiting = asyncio.create_task(turns.sample(session, place, SamplingWish(), leave))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        leave.set()
        async with asyncio.timeout(20):
            assert await waiting == ([], False) and len(sampler.asked) == 1
        before.set()
        await running

    asyncio.run(run())


@pytest.mark.long
def test_a_dialogue_may_have_500_turns(engine, settings):
    """A reader follows 64 records. The record of the turn after them is whole, and the sequence remains one."""

    async def run():
        turns = TurnSampler(engine.sampler, BOUNDS, seed=5)
        session = Session("long", "g", WIDE, 0.0)
        session.shard = "long"
        for turn in range(length):
            await say(turns, session, [*(session.ids(turn - 1) if turn else ()), 9 + turn % 50], most=2)
            if turn % 100 == 50:
                await engine.sampler.publish("long", keep_open=True)
        await engine.sampler.publish("long")
        session.tell_received([length - 1])
        return session

    length = 500
    session, store = asyncio.run(run()), TraceStore(settings.trace_root)
    assert [turn.parent for turn in session.turns] == [None, *range(length - 1)]
    assert all(turn.continues for turn in session.turns[1:])
    check_session(session.finish(), store)
    (sequence,) = sequences_of(session.finish())
    record = store.read(sequence.routes)
    assert record.token_ids.tolist() == list(session.ids(length - 1)[:-1])
    whole = [turn.number for turn in session.turns if store.info(turn.routes).parent is None]
    assert whole == list(range(0, length, 65))
    for turn in session.turns[::13]:
        rows = store.read(turn.routes)
        assert (rows.routes == record.routes[: len(rows.routes)]).all()
    wrong = replace(session.turns[65], routes=replace(session.turns[65].routes, parts=session.turns[64].routes.parts))
    session.turns[65] = wrong
    with refused(SessionError):
        check_session(session.finish(), store)


def test_a_turn_that_cannot_be_recorded_loses_no_place(engine):
    class Refuses(TwoPlaces):
        async def sample(self, place, requests, **more):
            self.at.append(place)
            raise RequestRefused("planted: this record cannot be made")

    async def run():
        sampler = Refuses(engine)
        turns, session = TurnSampler(sampler, BOUNDS, seed=5), Session("refused", "g", WIDE, 0.0)
        with refused(RequestRefused):
            await say(turns, session, [5, 6, 7])
        assert len(sampler.at) == 1 and sampler.places == (0, 1) and turns.counts["sampled_again"] == 0
        assert not session.busy and not session.turns

    asyncio.run(run())


def test_calls_begin_at_a_place_until_it_has_enough_samples():
    class Slow(ManyWeights):
        def __init__(self):
            super().__init__()
            self.goes = asyncio.Event()

        async def sample(self, place, requests, **more):
            self.asked.append(len(requests))
            await self.goes.wait()
            return [said(one.prompt_token_ids, [3], key=one.key) for one in requests]

    async def run():
        sampler, session = Slow(), Session("n", "g", WIDE, 0.0)
        turns = TurnSampler(sampler, replace(BOUNDS, at_once=4), seed=1)

        async def call(samples):
            place = session.begin([1, 2], samples=samples, max_tokens=1, now=0.0)
            return await turns.sample(session, place, SamplingWish(samples=samples), asyncio.Event())

        calls = [asyncio.create_task(call(samples)) for samples in (3, 9, 1, 9)]
        await asyncio.sleep(0.01)
        assert sampler.asked == [3, 9]
        sampler.goes.set()
        assert [len(sampled) for sampled, _ in await asyncio.gather(*calls)] == [3, 9, 1, 9]
        assert not +turns._running

    asyncio.run(run())
