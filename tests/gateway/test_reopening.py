"""Tests a gateway that starts again in the folder of a killed one: which sessions it opens, and which not."""

from __future__ import annotations

from contextlib import contextmanager

import openai
import pytest

from moe_rl.gateway.finishing import SessionKeeper, check_session
from moe_rl.gateway.sessions import Session
from tests.gateway.conftest import ADD, start_gateway
from tests.gateway.test_openai import ask, client_of

SUM = [{"role": "user", "content": "2+3?"}]


@pytest.fixture
def started(engine, settings, running, tmp_path):
    """Starts gateways over the shared engine, in one folder. Each ends as if it was killed."""

    @contextmanager
    def start():
        gateway, stop = start_gateway(engine.sampler, settings, tmp_path)
        gateway.gateway.turns.version = running.gateway.turns.version
        try:
            yield gateway
        finally:
            stop()

    return start


def result(call, content="5") -> dict:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def test_a_dialogue_goes_on_with_its_key_turn_and_limits(started, router):
    with started() as first:
        opened, other = first.open(turns=4), first.open()
        reply = ask(client_of(first, opened), SUM, [ADD]).choices[0].message
    # A client need not send the reasoning back.
    asked = [*SUM, reply.model_dump(include={"role", "tool_calls"}), result(reply.tool_calls[0])]
    with started() as second:
        assert (second.problems, second.gateway.counts["reopened"]) == ([], 2)
        said = ask(client_of(second, opened), asked, [ADD]).choices[0].message
        assert said.content.strip() == "5."
        session = second.session(opened)
        assert [turn.kind for turn in session.turns] == ["first", "continued"] and session.turns[1].continues
        assert second.gateway.counts["unstable"] == 0
        ask(client_of(second, opened), SUM, [ADD], max_tokens=3)
    with started() as third:
        ask(client_of(third, opened), [*SUM, reply, result(reply.tool_calls[0], "7")], [ADD], max_tokens=3)
        session = third.session(opened)
        assert [turn.kind for turn in session.turns] == ["first", "continued", "forked", "forked"]
        assert len({turn.routes.key for turn in session.turns}) == 4
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client_of(third, opened), SUM)
        assert caught.value.code == "session_limit"
        check_session(session.finish(), third.store)
        third.agrees(session, router)
        assert third.session(other).turns == []
        told = third.owner("POST", f"/sessions/{opened['session']}/finish").json()
        assert told["turns"] == 4
    kept = SessionKeeper(third.folder / "sessions", third.store).load(opened["session"])
    assert Session.of(kept).finish().digest == told["digest"]
    with started() as fourth:
        assert fourth.session(opened) is None and fourth.session(other).reopened == 3
        with pytest.raises(openai.AuthenticationError):
            ask(client_of(fourth, opened), SUM)


def test_a_session_that_was_finished_as_the_gateway_was_killed_is_not_opened(started):
    with started() as first:
        opened = first.open()
        ask(client_of(first, opened), SUM, max_tokens=2)
        journal = first.folder / "sessions" / f"{opened['session']}.journal"
        before = journal.read_bytes()
        assert first.owner("POST", f"/sessions/{opened['session']}/finish").status_code == 200
        assert not journal.exists()
    journal.write_bytes(before)  # it was killed before it deleted this
    with started() as second:
        assert (second.problems, second.session(opened)) == ([], None) and not journal.exists()


def test_a_changed_journal_or_a_lost_record_is_named_and_the_others_are_opened(started):
    with started() as first:
        changed, lost, good = [first.open() for _ in range(3)]
        for opened in (changed, good, lost):
            reply = ask(client_of(first, opened), SUM, [ADD]).choices[0].message
            first.session(opened)  # publishes: the last turn has a shard of its own
            ask(client_of(first, opened), [*SUM, reply, result(reply.tool_calls[0])], [ADD])
        session = first.session(lost)
    journal = first.folder / "sessions" / f"{changed['session']}.journal"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 4
    journal.write_bytes(content)
    first.store.remove(session.turns[1].routes.parts[0].shard)
    with started() as second:
        counts = second.gateway.counts
        assert (counts["reopened"], counts["not_reopened"]) == (1, 2)
        told = "\n".join(second.problems)
        assert str(journal) in told and f"session {lost['session']}, turn 1" in told, told
        for opened in (changed, lost):
            with pytest.raises(openai.AuthenticationError):
                ask(client_of(second, opened), SUM)
        ask(client_of(second, good), SUM, max_tokens=2)
        assert len(second.session(good).turns) == 3 and journal.read_bytes() == content


def test_a_journal_that_cannot_be_written_keeps_the_reply_back(started):
    """The turn is written with the next one, so none is missing."""
    with started() as first:
        opened = first.open()
        journal = first.folder / "sessions" / f"{opened['session']}.journal"
        away = journal.rename(journal.with_suffix(".away"))
        with pytest.raises(openai.InternalServerError, match="journal"):
            ask(client_of(first, opened), SUM, max_tokens=2)
        away.rename(journal)
        ask(client_of(first, opened), SUM, max_tokens=3)
    with started() as second:
        assert [len(turn.token_ids) for turn in second.session(opened).turns] == [2, 3]
