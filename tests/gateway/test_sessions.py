"""Tests the prefix tree of a session against plain lists of token ids, and what its digests notice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl import messages
from moe_rl.errors import SessionError
from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.session_journal import SessionJournals
from moe_rl.gateway.session_keys import SessionBook
from moe_rl.gateway.sessions import FinishedSession, Session, SessionLimits
from moe_rl.trace import TraceStore
from moe_rl.types import VersionSpan
from tests.gateway.session_turns import WIDE, said, take
from tests.support.refusals import refused

# A few ids only, so that prompts often share tokens by chance.
IDS = st.lists(st.integers(0, 2), max_size=6)


@st.composite
def dialogues(draw) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions: each prompt continues an earlier turn, or cuts or changes what that turn has."""
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        prompt: list[int] = []
        if turns:
            prompt = sum(turns[draw(st.integers(0, len(turns) - 1))], [])
            prompt = prompt[: draw(st.integers(0, len(prompt)))] if draw(st.booleans()) else prompt
        prompt = prompt + draw(IDS)
        turns.append((prompt or [0], draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))))
    return turns


def common(one, other) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(dialogues())
def test_a_turn_continues_the_longest_history_that_its_prompt_begins_with(dialogue):
    session = Session("s", "g", WIDE, 0.0)
    for number, (prompt, completion) in enumerate(dialogue):
        turn = take(session, prompt, completion)
        earlier = [sum(one, []) for one in dialogue[:number]]
        whole = [len(ids) for ids in earlier if prompt[: len(ids)] == ids]
        held = 0 if turn.parent is None else len(earlier[turn.parent])
        assert held == max(whole, default=0) and (turn.parent is None) == (not whole)
        # What the tree has of the prompt, and whether the first token that it has not follows a prompt or is said.
        alike = [common(prompt, ids) for ids in earlier if ids[:held] == prompt[:held]]
        children = [at for at in range(number) if session.turns[at].parent == turn.parent]
        near = max((common(prompt, earlier[at]) for at in children), default=held)
        assert turn.shared == near and near <= max(alike, default=0)
        if not children:
            assert turn.kind == ("continued" if whole else "first")
        else:
            inside = [at for at in children if common(prompt, earlier[at]) == near]
            within_prompt = {near < len(dialogue[at][0]) or near == len(prompt) for at in inside}
            assert turn.kind in {"forked" if within else "rewritten" for within in within_prompt}
    for number, (prompt, completion) in enumerate(dialogue):
        assert (list(session.prompt(number)), list(session.ids(number))) == (prompt, prompt + completion)
    ends = {branch[-1].number for branch in session.branches()}
    assert ends == set(range(len(dialogue))) - {turn.parent for turn in session.turns}
    assert sum(len(turn.ids) for turn in session.turns) <= sum(len(p) + len(c) for p, c in dialogue)
    again = Session.of(messages.decode(messages.encode(session.finish()), FinishedSession))
    assert again.finish().digest == session.finish().digest and again.kinds == session.kinds


def branched() -> Session:
    """Three turns, a tool result of another kind behind the second, and a history whose first answer was edited."""
    session = Session("s", "g", WIDE, 0.0)
    take(session, [1, 2], [3, 4], key="a")
    take(session, [1, 2, 3, 4, 5], [6], key="b")
    take(session, [1, 2, 3, 4, 5, 6, 7, 7], [8], key="c", version=2)
    take(session, [1, 2, 3, 4, 5, 6, 7, 9], [8], key="d")
    take(session, [1, 2, 3, 0], [8], key="e")
    take(session, [1, 5], [8], key="f")
    take(session, [1, 2], [3, 5], key="g")
    return session


def test_each_kind_of_turn_is_told_apart():
    session = branched()
    told = [(turn.parent, turn.kind, turn.shared) for turn in session.turns]
    assert told == [
        (None, "first", 0),
        (0, "continued", 4),
        (1, "continued", 6),
        (1, "forked", 7),
        (None, "rewritten", 3),
        (None, "forked", 1),
        (None, "forked", 2),
    ]
    assert [[turn.number for turn in branch] for branch in session.branches()] == [[0, 1, 2], [0, 1, 3], [4], [5], [6]]


CHANGES = {
    "a token of the prompt": lambda turn: replace(turn, input_ids=(0, *turn.input_ids[1:])),
    "a token": lambda turn: replace(turn, token_ids=(0, *turn.token_ids[1:])),
    "a token from prompt to completion": lambda turn: replace(
        turn, input_ids=turn.input_ids[:-1], token_ids=(turn.input_ids[-1], *turn.token_ids)
    ),
    "a log-probability": lambda turn: replace(turn, logprobs=turn.logprobs + np.float32(1e-6)),
    "a version": lambda turn: replace(turn, versions=(VersionSpan(len(turn.token_ids), 9),)),
    "the end": lambda turn: replace(turn, finish_reason="length"),
    "another record": lambda turn: replace(turn, routes=replace(turn.routes, key="z")),
    "fewer rows": lambda turn: replace(turn, routes=replace(turn.routes, rows=turn.routes.rows - 1)),
    "a record of its own": lambda turn: replace(turn, continues=not turn.continues),
    "no record": lambda turn: replace(turn, routes=None),
    "another branch": lambda turn: replace(turn, parent=None if turn.parent is not None else 0),
    "another kind": lambda turn: replace(turn, kind="first" if turn.kind != "first" else "forked"),
}


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_turn_is_named(what, number):
    finished = branched().finish()
    finished.turns[number] = CHANGES[what](finished.turns[number])
    with refused(SessionError, session="s", turn=number, fault="chain"):
        Session.of(finished)


def test_turns_that_are_gone_exchanged_or_of_another_session_are_noticed():
    finished = branched().finish()
    with refused(SessionError, session="s", fault="chain"):
        Session.of(replace(finished, turns=finished.turns[:-1]))
    with refused(SessionError, session="other", fault="chain"):
        Session.of(replace(finished, name="other"))
    with refused(SessionError, session="s", turn=5, fault="chain"):
        Session.of(replace(finished, turns=[*finished.turns[:5], finished.turns[6], finished.turns[5]]))
    with refused(SessionError, session="s", turn=2, fault="chain"):
        moved = replace(finished.turns[2], parent=0)
        Session.of(replace(finished, turns=[*finished.turns[:2], moved, *finished.turns[3:]]))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(0, 30)), max_size=12))
def test_no_turn_goes_beyond_a_limit(asks):
    session = Session("s", "g", SessionLimits(tokens=60, turns=7, seconds=10.0), 0.0)
    places = []
    for samples, most, used in asks:
        prompt = (*(session.ids(len(session.turns) - 1) if session.turns else ()), 1)
        try:
            places.append((session.begin(prompt, samples=samples, max_tokens=most, now=1.0), used))
        except SessionError as error:
            assert error.message.fault == "limit"
        if len(places) == 2:  # two requests are under way at once
            for place, used in places:
                for _ in range(place.samples):
                    sampled = said(place.prompt, [1] * max(1, min(used, place.max_tokens)))
                    session.tell_received([session.add(place, sampled, continues=False).number])
                session.drop(place)
            places = []
    assert sum(len(turn.ids) for turn in session.turns) <= 60 and len(session.turns) <= 7


def test_limits_name_themselves_and_grants_are_given_back():
    session = Session("s", "g", SessionLimits(tokens=20, turns=2, seconds=5.0), 100.0)
    place = session.begin([1] * 8, samples=1, max_tokens=50, now=100.0)
    assert place.max_tokens == 12
    with refused(SessionError, session="s", fault="limit") as told:
        session.begin([2], samples=1, max_tokens=1, now=100.0)
    assert "limit of tokens" in str(told.value)
    session.drop(place)
    with refused(SessionError, fault="limit") as told:
        session.begin([2], samples=3, max_tokens=1, now=100.0)
    assert "limit of turns" in str(told.value)
    with refused(SessionError, fault="limit") as told:
        session.begin([2], samples=1, max_tokens=1, now=106.0)
    assert "limit of seconds" in str(told.value)


def test_what_was_continued_stays_received():
    """Also if what continues it was aborted, or if its connection broke while that was sampled."""
    session = Session("s", "g", WIDE, 0.0)
    take(session, [1], [2])
    place = session.begin([1, 2, 3], samples=1, max_tokens=1, now=0.0)
    assert session.tell_received([0], False) == [0]
    session.add(place, said([1, 2, 3], [4], finish_reason="abort"), continues=True)
    session.drop(place)
    assert session.tell_received([0], False) == session.tell_received([1]) == []
    assert [turn.received for turn in Session.of(session.finish()).turns] == [True, False]


def test_a_gateway_that_goes_on_in_a_folder_numbers_on(tmp_path):
    """The seeds of a session derive from its number: a group that spans the restart would consist of copies."""
    (tmp_path / "s0123abcd-000004.session").touch()
    (tmp_path / "s0123abcd-000007.journal").touch()
    (tmp_path / "other.journal").touch()
    book, journals = SessionBook(9, WIDE), SessionJournals(tmp_path)
    gateway = AgentGateway("m", SimpleNamespace(stop_token_ids=()), None, None, book, journals, ())

    async def reopen():
        return gateway.reopen(SessionKeeper(tmp_path, TraceStore(tmp_path)))

    problems = asyncio.run(reopen())
    assert len(problems) == 2, "both journals are empty"
    assert [book.open("g", now=0.0).session.seed for _ in range(2)] == ["000008", "000009"]


def test_a_session_answers_to_its_own_key_alone():
    book = SessionBook(3, WIDE)
    opened = [book.open(group, now=0.0) for group in ("one", "one", "two")]
    assert len({one.key for one in opened}) == 3 and min(len(one.key) for one in opened) > 43
    for one in opened:
        assert book.find(one.key) is one.session
    first, second, _ = opened
    name, _, secret = first.key.partition(".")
    wrong = [
        "",
        name,
        f"{name}.",
        secret,
        f"{second.session.name}.{secret}",
        first.key + "x",
        first.key[:-1],
        "é.\udcff",
    ]
    for key in wrong:
        assert book.find(key) is None
    with refused(SessionError, fault="limit"):
        book.open("three", now=0.0)
    book.close(first.session)
    assert book.find(first.key) is None and book.open("three", now=0.0).session.name != first.session.name
