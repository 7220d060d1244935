"""Tests who may call what, limits, clients that go away, many sessions at once, and how a session is finished."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import replace

import httpx
import openai
import pytest

from moe_rl.errors import SessionError
from moe_rl.gateway.finishing import SessionKeeper, check_session
from moe_rl.gateway.sessions import Session
from moe_rl.trace.files import LocalFolder
from tests.gateway.conftest import ADD
from tests.gateway.session_turns import WIDE
from tests.gateway.test_openai import ask, client_of
from tests.rollout.in_flight import forwarded
from tests.support.refusals import refused

HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "any", "messages": HI, "max_tokens": 4, "temperature": 0}
CALLS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("GET", "/v1/models"),
    ("POST", "/sessions"),
    ("GET", "/sessions"),
    ("POST", "/sessions/s000000/finish"),
]


def call(running, method, path, *, key="", **more) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, running.url + path, headers=headers, timeout=60, trust_env=False, **more)


def settled(running, opened) -> Session:
    """Wait until no request of a session is under way."""
    session, deadline = running.session(opened), time.monotonic() + 60
    while session.busy:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return session


def left_while_sampled(running, opened, engine, meanwhile=None) -> Session:
    """Ask for a completion that nothing ends for seconds, and go away once it is sampled and `meanwhile` is done."""

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            client = openai.AsyncOpenAI(api_key=opened["key"], base_url=f"{running.url}/v1", http_client=http)
            asked = asyncio.ensure_future(client.completions.create(model="any", prompt="ab", max_tokens=3000))
            await forwarded(engine.sampler, 40)
            if meanwhile is not None:
                await meanwhile()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(ask_and_leave())
    return settled(running, opened)


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_no_route_without_its_key(running, method, path):
    opened = running.open()
    name, _, secret = opened["key"].partition(".")
    wrong = ["", name, secret, f"{name}.{secret[:-1]}", "x" * 43]
    wrong += [opened["key"]] if "sessions" in path else []  # a session's key is not the owner's token
    for key in wrong:
        answer = call(running, method, path, key=key, **({"json": CHAT} if method == "POST" else {}))
        assert answer.status_code == 401 and "error" in answer.json(), (key, answer.text)
        if path.startswith("/v1"):
            told = call(running, method, f"/s/{key or 'x'}{path}", key=opened["key"])
            assert told.status_code == 401, "the key in the address counts"
    assert running.session(opened).turns == []


def test_health_and_nothing_else_is_for_everybody(running):
    assert call(running, "GET", "/health").json() == {"status": "ok"}
    paths = ("/", "/docs", "/openapi.json", "/metrics", "/moe_rl/stats", "/inference/v1/generate", "/s/x")
    for path in (*paths, "/v1/models/"):  # the last is no redirect to what the Host header says
        assert call(running, "GET", path).status_code == 404
    assert call(running, "GET", "/v1/completions").status_code == 405


def test_a_key_is_taken_from_address_header_or_api_key(running):
    opened = running.open()
    assert opened["base_url"] == f"{running.url}/s/{opened['key']}/v1"
    assert call(running, "GET", "/v1/models", key=opened["key"]).json()["data"][0]["id"] == "talker"
    named = httpx.get(f"{running.url}/v1/models", headers={"x-api-key": opened["key"]}, trust_env=False)
    assert named.status_code == 200
    client = openai.OpenAI(api_key="not needed", base_url=opened["base_url"])
    ask(client, HI, max_tokens=2)
    assert len(running.session(opened).turns) == 1


def test_bodies_have_limits(running):
    key = running.open()["key"]
    post = lambda **more: call(running, "POST", "/v1/chat/completions", key=key, **more)  # noqa: E731
    assert post(content=b"x" * ((1 << 20) + 1)).status_code == 413
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 100_000, 400)):
        answer = post(content=body)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_session_ends_at_its_limits(running):
    opened = running.open(turns=2, tokens=60)
    client = client_of(running, opened, retries=2)
    ask(client, HI, max_tokens=4)
    reply = ask(client, [{"role": "user", "content": "ab"}], max_tokens=64)
    session = running.session(opened)
    assert reply.choices[0].finish_reason in ("stop", "length") and sum(len(one.ids) for one in session.turns) <= 60
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, HI)
    assert caught.value.code == "session_limit" and len(session.turns) == 2
    late = running.open(seconds=0.05)
    time.sleep(0.1)
    with pytest.raises(openai.BadRequestError, match="seconds"):
        ask(client_of(running, late), HI)
    told = call(running, "GET", "/v1/models", key=late["key"])  # for nothing else either, though nobody has finished it
    assert (told.status_code, told.json()["error"]["code"]) == (400, "session_limit")
    told = call(running, "POST", "/v1/messages/count_tokens", key=late["key"], json=CHAT)
    assert told.status_code == 400 and "seconds" in told.json()["error"]["message"]


def test_a_client_that_goes_away_ends_its_request(running, engine, router):
    """What was sampled until then is kept with its rows, and was received by nobody; a retry is the session's turn."""
    opened, left = running.open(), running.gateway.counts["left"]
    session = left_while_sampled(running, opened, engine)
    assert running.gateway.counts["left"] == left + 1, "it had ended before its client went"
    (turn,) = session.turns
    assert turn.finish_reason == "abort" and turn.token_ids
    client_of(running, opened).completions.create(model="any", prompt="ab", max_tokens=5)
    session = running.session(opened)  # asked in the gateway's loop, which has then noted that its reply was received
    assert [(one.kind, one.received) for one in session.turns] == [("first", False), ("first", True)]
    check_session(session.finish(), running.store)
    running.agrees(session, router)


def test_a_hundred_sessions_at_once(running, router):
    """Each has two turns of its own, and none gets another's."""

    async def agent(client: httpx.AsyncClient, opened, number: int):
        own = openai.AsyncOpenAI(api_key=opened["key"], base_url=f"{running.url}/v1", http_client=client, timeout=120)
        messages = [{"role": "user", "content": f"{number}?"}]
        for _ in range(2):
            reply = await own.chat.completions.create(model="any", messages=messages, max_tokens=3, temperature=1)
            messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": str(number)}]

    async def all_of(opened):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as client:
            await asyncio.gather(*(agent(client, one, number) for number, one in enumerate(opened)))

    opened = [running.open() for _ in range(100)]
    asyncio.run(all_of(opened))
    sessions = [running.session(one) for one in opened]
    for session in sessions:
        assert [turn.kind for turn in session.turns] == ["first", "continued"]
        check_session(session.finish(), running.store)
    assert len({session.prompt(0) for session in sessions}) == 100
    for session in sessions[::20]:
        running.agrees(session, router)


def test_a_session_is_finished_once_and_can_be_read_again(running):
    opened = running.open()
    client = client_of(running, opened)
    reply = ask(client, [{"role": "user", "content": "2+3?"}], [ADD]).choices[0].message
    assert reply.tool_calls
    listed = {one["session"]: one for one in running.owner("GET", "/sessions").json()["sessions"]}
    assert listed[opened["session"]]["sampled_tokens"] == 55
    session = running.session(opened)
    place = session.begin([1], samples=1, max_tokens=1, now=0.0)
    assert running.owner("POST", f"/sessions/{opened['session']}/finish").status_code == 409
    session.drop(place)
    told = running.owner("POST", f"/sessions/{opened['session']}/finish").json()
    assert (told["turns"], told["kinds"], told["group"]) == (1, {"first": 1}, "g")
    kept = SessionKeeper(running.folder / "sessions", running.store).load(opened["session"])
    assert kept.digest == told["digest"] and kept.turns[0].token_ids == session.turns[0].token_ids
    assert running.owner("POST", f"/sessions/{opened['session']}/finish").status_code == 404
    with pytest.raises(openai.AuthenticationError):
        ask(client, HI)


def test_a_session_is_finished_later_if_no_file_can_be_opened_now(running, monkeypatch):
    opened = running.open()
    ask(client_of(running, opened), HI, max_tokens=3)
    running.session(opened)

    def no_file(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as changed:
        changed.setattr(LocalFolder, "open", no_file)
        told = running.owner("POST", f"/sessions/{opened['session']}/finish")
        assert told.status_code == 500 and "Too many open files" in told.text
    assert running.owner("POST", f"/sessions/{opened['session']}/finish").status_code == 200


def test_a_session_is_finished_while_others_are_sampled_and_turns_share_shards(running, engine, router):
    first, other = running.open(), running.open()
    ask(client_of(running, first), [{"role": "user", "content": "ab"}], max_tokens=3)
    running.session(first)
    before = set(running.store.shards())

    async def finish() -> None:
        for _ in range(5):
            await asyncio.to_thread(ask, client_of(running, first), HI, max_tokens=3)
        told = await asyncio.to_thread(running.owner, "POST", f"/sessions/{first['session']}/finish")
        assert told.status_code == 200, told.text

    session = left_while_sampled(running, other, engine, finish)
    assert len(set(running.store.shards()) - before) == 1, "five turns"
    (turn,) = running.session(other).turns
    assert turn.finish_reason == "abort"
    running.agrees(session, router)
    assert len(set(running.store.shards()) - before) == 2


def moved(session: Session, number: int, **changes) -> Session:
    """Return a session in which one turn is another one, with digests that fit."""
    made = Session(session.name, session.group, WIDE, 0.0)
    for completion, turn in zip(session.turns, session.turns, strict=True):
        given = replace(turn, **changes) if turn.number == number else completion
        place = made.begin(session.prompt(turn.number), samples=1, max_tokens=1, now=0.0)
        made.tell_received([made.add(replace(place, parent=turn.parent), given, continues=given.continues).number])
        made.drop(place)
    return made


def test_a_record_that_is_not_the_turns_is_named(running):
    opened = running.open()
    client = client_of(running, opened)
    first = [{"role": "user", "content": "2+3?"}]
    reply = ask(client, first, [ADD]).choices[0].message
    tool = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"}
    ask(client, [*first, reply, tool], [ADD])
    ask(client, first, [ADD])
    ask(client, [*first, reply, {**tool, "content": "7"}], [ADD], max_tokens=3)
    session, store = running.session(opened), running.store
    check_session(moved(session, 0).finish(), store)
    # The answer to a retry said the same, so its tokens are those of the first turn. Its record is another one.
    assert session.turns[0].token_ids == session.turns[2].token_ids
    gone = replace(session.turns[1].routes.parts[0], shard="session-never")
    for number, changes, fault in (
        (1, {"routes": session.turns[3].routes}, "other tokens"),
        (1, {"routes": replace(session.turns[1].routes, rows=session.turns[1].routes.rows - 1)}, "other tokens"),
        (0, {"routes": session.turns[2].routes}, "another branch"),
        (2, {"routes": None}, "no record"),
        (1, {"routes": replace(session.turns[1].routes, parts=(gone,))}, "no record"),
        (1, {"versions": (replace(session.turns[1].versions[0], weight_version=99),)}, "other weights"),
    ):
        # A record that is not the first turn's own is of another branch for the turn that continues it.
        named = 1 if fault == "another branch" else number
        with refused(SessionError, session=session.name, turn=named, fault=fault):
            check_session(moved(session, number, **changes).finish(), store)
