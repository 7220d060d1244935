"""A session becomes sequences in which each sampled token is once, behind the tokens that it was sampled behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.errors import SessionError
from moe_rl.gateway.session_sequences import runs_of, sequences_of
from moe_rl.gateway.sessions import Session
from moe_rl.types import InsertedTokens, VersionSpan
from tests.gateway.session_turns import WIDE, said, take


@pytest.fixture
def session() -> Session:
    return Session("step000002-p0-c1", "g", WIDE, 0.0)


def numbers(session):
    return [[turn.number for turn in run] for run in runs_of(session)]


def test_turns_that_continue_each_other_are_one_sequence(session):
    take(session, [1, 2], [3, 4], key="a", version=1)
    take(session, [1, 2, 3, 4, 5, 6], [7], key="b", version=1)
    take(session, [1, 2, 3, 4, 5, 6, 7, 8], [9, 10], key="c", version=2)
    (one,) = sequences_of(session.finish())
    assert (one.key, one.routes.key, one.finish_reason) == ("c", "c", "stop")
    assert (one.prompt_token_ids, one.token_ids) == ((1, 2), (3, 4, 7, 9, 10))
    assert one.inserted == (InsertedTokens(2, (5, 6)), InsertedTokens(3, (8,)))
    assert one.ids == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert one.positions.tolist() == [2, 3, 6, 8, 9]
    assert one.forwarded == one.routes.rows == 9
    assert one.versions == (VersionSpan(3, 1), VersionSpan(2, 2))
    np.testing.assert_array_equal(one.logprobs, -np.array([3, 4, 7, 9, 10], np.float32) - 1)


def test_a_prompt_that_adds_nothing_inserts_nothing(session):
    take(session, [1], [2])
    take(session, [1, 2], [3])
    (one,) = sequences_of(session.finish())
    assert (one.token_ids, one.inserted, one.ids) == ((2, 3), (), (1, 2, 3))


def test_what_an_earlier_branch_has_is_the_prompt_of_a_later_one(session):
    take(session, [1], [2])
    take(session, [1, 2, 3], [4])
    take(session, [1, 2, 5], [6])
    take(session, [1, 2, 5, 6, 7], [8])
    assert numbers(session) == [[0, 1], [2, 3]]
    first, second = sequences_of(session.finish())
    assert (first.prompt_token_ids, first.ids) == ((1,), (1, 2, 3, 4))
    assert (second.prompt_token_ids, second.ids) == ((1, 2, 5), (1, 2, 5, 6, 7, 8))


def test_a_rewritten_history_is_a_sequence_of_its_own(session):
    take(session, [1], [2, 3])
    take(session, [1, 2, 9], [4])
    assert numbers(session) == [[0], [1]]
    assert sequences_of(session.finish())[1].prompt_token_ids == (1, 2, 9)


def test_a_turn_with_rows_of_its_own_begins_a_sequence(session):
    """The weights changed between the turns: the prefix has other rows, those that the second turn attended to."""
    take(session, [1], [2])
    place = session.begin([1, 2, 3], samples=1, max_tokens=1, now=0.0)
    session.tell_received([session.add(place, said([1, 2, 3], [4], key="b", version=1), continues=False).number])
    assert numbers(session) == [[0], [1]]
    second = sequences_of(session.finish())[1]
    assert (second.prompt_token_ids, second.token_ids, second.routes.rows) == ((1, 2, 3), (4,), 3)


def test_a_changed_session_is_not_made_into_sequences(session):
    take(session, [1], [2])
    finished = session.finish()
    finished.turns[0].logprobs[0] = 0.0
    with pytest.raises(SessionError, match="step000002-p0-c1"):
        sequences_of(finished)


ENDS = st.sampled_from(["received", "received", "lost", "abort"])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 3), st.booleans(), ENDS), max_size=12))
def test_each_received_token_is_in_one_sequence_behind_what_it_was_sampled_behind(steps):
    """Each step continues some earlier turn that had a reply, or the root, with some tokens."""
    session, fresh = Session("s", "g", WIDE, 0.0), iter(range(1, 1000))
    for at, new, length, continues, end in steps:
        replied = [turn.number for turn in session.turns if turn.finish_reason != "abort"]
        before = at % (len(replied) + 1)
        history = () if before == len(replied) else session.ids(replied[before])
        prompt = (*history, *(next(fresh) for _ in range(new if history else new + 1)))
        place = session.begin(prompt, samples=1, max_tokens=length, now=0.0)
        answer = said(prompt, [next(fresh) for _ in range(length)], finish_reason="abort" if end == "abort" else "stop")
        turn = session.add(place, answer, continues=place.parent is not None and continues)
        session.drop(place)
        if end == "received":
            session.tell_received([turn.number])
    continued = {turn.parent for turn in session.turns}
    assert all(turn.received or turn.number not in continued for turn in session.turns)
    seen = []
    for one, run in zip(sequences_of(session.finish()), runs_of(session), strict=True):
        ids = np.array(one.ids)
        assert one.forwarded == len(ids) - 1 == one.routes.rows
        assert ids.tolist() == list(session.ids(run[-1].number))
        assert tuple(ids[one.positions]) == one.token_ids
        own = {token for turn in run for token in turn.token_ids}
        assert set(one.token_ids) == own and all(turn.continues for turn in run[1:])
        seen += one.token_ids
    assert sorted(seen) == sorted(token for turn in session.received for token in turn.token_ids)
