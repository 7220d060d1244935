"""Tests which turns count as received when clients hang up, ask again, or ask the same several times."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import anthropic
import httpx2
import openai
import pytest

from moe_rl.gateway import listening
from moe_rl.gateway.session_sequences import sequences_of
from moe_rl.gateway.sessions import Session, SessionLimits
from moe_rl.gateway.web import GatewayApp
from tests.gateway.conftest import chat_tokenizer
from tests.gateway.scripted import OWNER, served
from tests.gateway.session_turns import WIDE

HI = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
ONE, TWO = "hello<|im_end|>", "you<|im_end|>"
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(made)
    return made


def played(folder, play, *texts, **more):
    """Run `play(running, opened, client)` against a gateway that says the texts. Returns the session."""

    async def run():
        limits = more.pop("limits", None)
        async with served(folder, *(texts or (ONE, TWO)), **more) as running:
            opened = running.open(limits)
            async with aiohttp.ClientSession() as client:
                await play(running, opened, client)
            await quiet(opened.session)
            return opened.session

    return asyncio.run(run())


async def quiet(session: Session) -> None:
    async with asyncio.timeout(20):
        while session.busy:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def post(running, opened, client, path="/v1/chat/completions", body=None, **headers) -> str:
    url = f"{running.url}/s/{opened.key}{path}"
    async with client.post(url, json=HI if body is None else body, headers=headers) as answer:
        told = await answer.json()
        assert answer.status == 200, told
    return told["choices"][0]["message"]["content"] if "choices" in told else told["content"][0]["text"]


async def hang_up(running, opened, client, *, body=None) -> None:
    """Ask, and go away before there is a reply."""
    asked = len(running.sampler.asked)
    running.sampler.goes.clear()
    waiting = asyncio.ensure_future(post(running, opened, client, body=body))
    while len(running.sampler.asked) == asked:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await quiet(opened.session)
    running.sampler.goes.set()


def sampled(session: Session) -> list[tuple[bool, str]]:
    return [(turn.received, turn.finish_reason) for turn in session.turns]


def in_the_loss(session: Session) -> int:
    return sum(len(one.token_ids) for one in sequences_of(session.finish()))


def test_what_was_aborted_is_recorded_and_counts_nowhere(folder):
    async def play(running, opened, client):
        await hang_up(running, opened, client)
        await hang_up(running, opened, client)
        assert await post(running, opened, client) == "you"
        body = HI | {"messages": [*HI["messages"], {"role": "user", "content": "more"}]}
        await hang_up(running, opened, client, body=body)
        assert await post(running, opened, client, body=body) == "you"
        async with client.get(f"{running.url}/sessions", headers={"Authorization": "Bearer " + "o" * 43}) as answer:
            (told,) = (await answer.json())["sessions"]
        assert (told["turns"], told["undelivered"], told["kinds"]) == (2, 3, {"first": 1, "forked": 1})
        with pytest.raises(AssertionError, match="limit of turns"):
            await post(running, opened, client)

    session = played(folder, play, ONE, ONE, TWO, limits=SessionLimits(400, 2, 1e6))
    assert sampled(session) == [(False, "abort")] * 2 + [(True, "stop"), (False, "abort"), (True, "stop")]
    assert in_the_loss(session) == sum(len(turn.token_ids) for turn in session.received)
    assert [branch[-1].number for branch in session.branches()] == [2, 4]
    rewarded = sequences_of(session.finish(), (0.5, 1.5))
    assert [[(turn.number, turn.reward) for turn in one.turns] for one in rewarded] == [[(2, 0.5)], [(4, 1.5)]]
    finished = session.finish()
    finished.turns[0] = type(finished.turns[0])(
        **{name: getattr(finished.turns[0], name) for name in finished.turns[0].__slots__} | {"received": True}
    )
    with pytest.raises(Exception, match="another turn of it was received"):
        Session.of(finished)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("package", [openai, anthropic])
def test_the_packages_own_attempts_are_one_turn(folder, package, stream):
    """Their clients give up after a third of a second, and ask again."""

    async def play(running, opened, client):
        running.sampler.goes.clear()

        async def answer_the_second() -> None:
            while len(running.sampler.asked) < 2:
                await asyncio.sleep(0.01)
            running.sampler.goes.set()

        answering = asyncio.create_task(answer_the_second())
        http = httpx2.AsyncClient(trust_env=False)
        if package is openai:
            own = openai.AsyncOpenAI(
                base_url=f"{running.url}/s/{opened.key}/v1", api_key="x", timeout=0.3, max_retries=9, http_client=http
            )
            reply = await own.chat.completions.create(**HI, stream=stream)
        else:
            own = anthropic.AsyncAnthropic(
                base_url=f"{running.url}/s/{opened.key}", api_key="x", timeout=0.3, max_retries=9
            )
            reply = await own.messages.create(**HI, stream=stream)
        if stream:
            assert [event async for event in reply]
        await own.close()
        await answering

    session = played(folder, play, ONE, limits=SessionLimits(400, 1, 1e6))
    assert len(session.turns) > 1 and len(session.received) == 1
    assert session.kinds == {"first": 1} and in_the_loss(session) == len(session.received[0].token_ids)


LONG = HI | {"max_tokens": 40_000, "logprobs": True, "n": 3}


async def never_read(running, opened) -> socket.socket:
    """Ask for more than a connection holds, ask again on that connection, and read nothing. Returns the connection.

    The first reply waits in the gateway's memory, and the second one waits for the first.
    """
    connection, session = raw(running, opened, body=LONG), opened.session
    connection.sendall(written(opened))
    async with asyncio.timeout(120):
        while len(session.turns) < 4 or session.under_way:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert session.busy
    return connection


def test_a_client_that_never_reads_is_cut_off(folder, monkeypatch):
    """Until then the owner cannot finish the session."""
    monkeypatch.setattr(listening, "_UNREAD_SECONDS", 5)

    async def play(running, opened, client):
        with await never_read(running, opened):
            await quiet(opened.session)

    assert sampled(played(folder, play, *["x" * 30_000] * 3, ONE))[3:] == [(False, "stop")]


@pytest.mark.parametrize("sent", [b"", b"POST /s/", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_client_that_sends_no_request_is_cut_off(folder, monkeypatch, sent):
    monkeypatch.setattr(listening, "_SILENT_SECONDS", 0.5)

    async def play(running, opened, client):
        address = running.url.removeprefix("http://").split(":")
        read, write = await asyncio.open_connection(address[0], int(address[1]))
        write.write(sent)
        assert await asyncio.wait_for(read.read(), 20) == b""
        with raw(running, opened) as slow:  # a request that has begun may take longer
            await quiet(opened.session)
            await asyncio.sleep(0.6)
            assert slow.recv(12) == b"HTTP/1.1 200"
        write.close()

    sampled(played(folder, play, ONE))


def raw(running, opened, *, body=None, **headers) -> socket.socket:
    """Send a request on a connection of its own, and leave the reply unread."""
    address = running.url.removeprefix("http://").split(":")
    made = socket.create_connection((address[0], int(address[1])))
    made.sendall(written(opened, body=body, **headers))
    return made


def written(opened, *, body=None, **headers) -> bytes:
    content = json.dumps(HI if body is None else body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /s/{opened.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def go_unread(running, opened) -> None:
    """Ask, and close the connection just when the sampler is done, before the event loop can hear of it."""
    running.sampler.goes.clear()
    connection = raw(running, opened)
    while not running.sampler.asked:
        await asyncio.sleep(0.01)
    running.sampler.goes.set()
    connection.close()
    await quiet(opened.session)


@pytest.mark.parametrize("way", ["closed", "reset", "just before", "stream"])
def test_a_reply_that_nobody_read_is_sent_again_as_the_same_turn(folder, way):
    """Also without a word of the client that it asks again."""

    async def play(running, opened, client):
        if way == "just before":
            await go_unread(running, opened)
        else:
            connection = raw(running, opened, body=HI | {"stream": True} if way == "stream" else HI)
            while not opened.session.turns:
                await asyncio.sleep(0.01)
            await quiet(opened.session)
            assert sampled(opened.session) == [(True, "stop")]
            if way == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            await quiet(opened.session)
        assert sampled(opened.session) == [(False, "stop")] and in_the_loss(opened.session) == 0
        if way != "stream":
            assert await post(running, opened, client) == "hello"
            assert len(running.sampler.asked) == 1 and running.gateway.counts["repeated"] == 1

    session = played(folder, play)
    assert sampled(session) == [(way != "stream", "stop")]


def test_the_same_asked_several_times_is_several_turns(folder):
    async def play(running, opened, client):
        running.sampler.goes.clear()
        asked = [asyncio.ensure_future(post(running, opened, client)) for _ in range(3)]
        while len(running.sampler.asked) < 3:
            await asyncio.sleep(0.01)
        running.sampler.goes.set()
        assert sorted(await asyncio.gather(*asked)) == ["hello", "you", "you"]
        await post(running, opened, client)  # one after the other, too
        await post(running, opened, client, body=HI | {"n": 2})

    session = played(folder, play)
    assert sampled(session) == [(True, "stop")] * 6


def test_a_client_that_says_that_it_asks_again_gets_the_same_turn(folder):
    """Though the gateway wrote the whole reply: a proxy may have taken it."""

    async def play(running, opened, client):
        assert await post(running, opened, client) == "hello"
        assert await post(running, opened, client, **AGAIN) == "hello"
        assert await post(running, opened, client) == "you"
        assert await post(running, opened, client, **AGAIN) == "you"
        key = {"Idempotency-Key": "k"}
        assert [await post(running, opened, client, **key) for _ in range(2)] == ["third"] * 2
        other = HI | {"max_tokens": 8}
        assert await post(running, opened, client, body=other, **key) == "fourth"
        assert await post(running, opened, client, path="/v1/messages", **AGAIN) == "fourth"

    texts = (ONE, TWO, "third<|im_end|>", "fourth<|im_end|>")
    assert sampled(played(folder, play, *texts)) == [(True, "stop")] * 5


def test_a_client_asks_again_while_a_proxy_still_waits(folder):
    async def play(running, opened, client):
        running.sampler.goes.clear()
        first = asyncio.ensure_future(post(running, opened, client))
        while not running.sampler.asked:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(post(running, opened, client, **AGAIN))
        await asyncio.sleep(0.1)
        first.cancel()  # this must not abort what the second waits for
        await asyncio.sleep(0.1)
        running.sampler.goes.set()
        assert await second == "hello"

    assert sampled(played(folder, play)) == [(True, "stop")]


def test_a_turn_that_one_client_got_stays_received_when_another_leaves_it_unread(folder):
    """A proxy and a client that asked again wait for one reply."""

    async def play(running, opened, client):
        running.sampler.goes.clear()
        proxy = raw(running, opened)
        while not running.sampler.asked:
            await asyncio.sleep(0.01)
        again = raw(running, opened, **AGAIN)
        await asyncio.sleep(0.1)
        running.sampler.goes.set()
        await quiet(opened.session)
        for connection, received in ((again, True), (proxy, False)):
            connection.close()
            await asyncio.sleep(0.1)
            assert sampled(opened.session) == [(received, "stop")]

    assert len(played(folder, play).turns) == 1


@pytest.mark.parametrize("recovered", [False, True])
def test_a_session_is_not_deleted_while_a_lost_server_holds_its_records(folder, tmp_path, recovered):
    async def run():
        async with served(folder, ONE, kept=tmp_path) as running, aiohttp.ClientSession() as client:
            opened = running.open()
            await post(running, opened, client)
            lost = set() if recovered else {"gateway-server1"}
            running.gateway.shard = SimpleNamespace(unrecovered=lost, publish=quietly)
            url = f"{running.url}/sessions/{opened.session.name}/finish"
            for _ in range(2):
                async with client.post(url, headers={"Authorization": f"Bearer {OWNER}"}) as answer:
                    told = await answer.json()
                    assert answer.status == (409 if recovered else 500), told
                if recovered:
                    break
            known = running.gateway.book.named(opened.session.name)
            assert (known, [*tmp_path.iterdir()] == []) == (None if recovered else opened.session, recovered)

    asyncio.run(run())


async def quietly() -> None:
    """Publish nothing."""


def test_an_unread_reply_uses_the_limits_once_it_is_read(folder):
    async def play(running, opened, client):
        await go_unread(running, opened)
        assert await post(running, opened, client, body=HI | {"max_tokens": 8}) == "you"
        with pytest.raises(AssertionError, match="limit of turns"):
            await post(running, opened, client)

    assert sampled(played(folder, play, limits=SessionLimits(400, 1, 1e6))) == [(False, "stop"), (True, "stop")]


def test_a_turn_that_another_continues_was_received(folder):
    async def play(running, opened, client):
        await go_unread(running, opened)
        said = {"role": "assistant", "content": "hello"}
        more = [*HI["messages"], said, {"role": "user", "content": "more"}]
        await post(running, opened, client, body=HI | {"messages": more})

    session = played(folder, play)
    assert sampled(session) == [(True, "stop")] * 2 and session.turns[1].parent == 0


def test_a_killed_gateway_knows_what_was_received(folder, tmp_path):
    """The journal says it, and a client that asks again after the kill has not got what it asked for before."""

    async def before(running, opened, client):
        await hang_up(running, opened, client)
        await post(running, opened, client)

    async def run():
        from moe_rl.gateway.session_journal import SessionJournals

        async with served(folder, ONE, TWO, kept=tmp_path) as running:
            opened = running.open()
            async with aiohttp.ClientSession() as client:
                await before(running, opened, client)
                told = SessionJournals(tmp_path).read(opened.session.name, now=0.0, clock=0.0)
                assert sampled(told.session) == sampled(opened.session) == [(False, "abort"), (True, "stop")]
                connection = raw(running, opened, body=HI | {"max_tokens": 8})
                await quiet(opened.session)
                connection.close()
                await quiet(opened.session)
        found = SessionJournals(tmp_path).read(opened.session.name, now=0.0, clock=0.0)
        assert sampled(found.session) == [(False, "abort"), (True, "stop"), (False, "stop")]
        assert found.session.finish().digest == opened.session.finish().digest
        async with served(folder, "third<|im_end|>", kept=tmp_path) as running:
            assert running.gateway.reopen(EverythingIsRight()) == []
            session = running.gateway.book.named(opened.session.name)
            async with aiohttp.ClientSession() as client:
                assert await post(running, opened, client, **AGAIN) == "third"
            assert sampled(session) == [(False, "abort"), (False, "stop"), (False, "stop"), (True, "stop")]
            again = SessionJournals(tmp_path).read(session.name, now=0.0, clock=0.0).session
            assert again.finish().digest == session.finish().digest

    asyncio.run(run())


@pytest.mark.parametrize("way", ["ended", "aborted"])
def test_a_request_whose_session_ends_while_its_body_is_sent_is_refused(folder, way):
    """Also if the owner has kept and forgotten the session before the chat is rendered."""

    async def play(running, opened, client):
        session, gateway, begun, forgotten = opened.session, running.gateway, threading.Event(), threading.Event()

        def render_late(*chat, **more):
            begun.set()
            forgotten.wait(20)
            return (1, 2, 3)

        gateway._renderer = SimpleNamespace(render=render_late, reads_tools=True)
        body = json.dumps(HI | {"messages": [{"role": "user", "content": "x" * (1 << 15)}]}).encode()
        known, sent, find = asyncio.Event(), asyncio.Event(), gateway.book.find
        gateway.book.find = lambda key: known.set() or find(key)

        async def slowly():
            yield body[:9]
            await sent.wait()
            yield body[9:]

        url = f"{running.url}/s/{opened.key}/v1/chat/completions"
        asking = asyncio.create_task(client.post(url, data=slowly(), headers={"content-type": "application/json"}))
        await known.wait()
        gateway.abort(session) if way == "aborted" else gateway.end(session)
        sent.set()
        while not (begun.is_set() or asking.done()):
            await asyncio.sleep(0.01)
        gateway.forget(session)
        forgotten.set()
        answer = await asking
        told = await answer.json()
        assert (answer.status, told["error"]["code"]) == (400, "session_limit"), told
        assert not running.sampler.asked

    assert sampled(played(folder, play)) == []


class EverythingIsRight:
    """Is a keeper that finds no fault with records that there are not."""

    def has(self, name):
        return False

    def names(self):
        return []

    def check_records(self, session):
        assert session.limits == WIDE


def test_sessions_whose_time_is_over_make_room_for_others(folder):
    """Their agents may be gone. Nobody else's session is touched, and one that has turns is kept."""

    async def run():
        async with served(folder, ONE) as running, aiohttp.ClientSession() as client:
            gone, book = replace(WIDE, seconds=2.0), running.gateway.book
            played = running.open(gone)
            await post(running, played, client)
            await quiet(played.session)
            for _ in range(97):
                running.open(gone)
            lives = running.open()
            finished, owner = [], {"Authorization": f"Bearer {OWNER}"}
            GatewayApp._finished, real = lambda _, session: told(finished, book, session), GatewayApp._finished
            try:
                for refused in (True, False):  # before and after the time is over
                    answer = await client.post(f"{running.url}/sessions", json={}, headers=owner)
                    assert (answer.status == 409) is refused, await answer.text()
                    await asyncio.sleep(2.2)
            finally:
                GatewayApp._finished = real
            assert finished == [played.session.name] and len(book) == 2 and book.find(lives.key) is lives.session

    async def told(finished, book, session):
        finished.append(session.name)
        book.close(session)

    asyncio.run(run())
