"""What a step trains on is checked against the sessions that it came from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import DataError, SessionError
from moe_rl.gateway import finishing
from moe_rl.gateway.session_sequences import check_trained, sequences_of
from moe_rl.gateway.sessions import Session
from moe_rl.rollout import sealed
from moe_rl.types import InsertedTokens, Sequence
from tests.gateway.session_turns import WIDE, take
from tests.support.refusals import refused

NAME = "step000002-p0-c1"


@pytest.fixture
def session() -> Session:
    """Three turns, of which the last is a branch."""
    session = Session(NAME, "g", WIDE, 0.0)
    take(session, [1, 2], [3, 4], key="a", version=1)
    take(session, [1, 2, 3, 4, 5], [6, 7], key="b", version=1)
    take(session, [1, 2, 3, 4, 8], [9], key="c", version=1)
    return session


def keep(session, folder):
    """Write the session's file without looking at its records."""
    sealed.save(folder / f"{NAME}.session", finishing._HEAD, session.finish(), finishing._WHAT)


@pytest.fixture
def trained(session, tmp_path):
    """The sequences of a step, whose session is kept in tmp_path."""
    keep(session, tmp_path)
    return [Sequence.of(one, 1.0, NAME) for one in sequences_of(session.finish())]


def test_the_sequences_of_a_session_pass(trained, tmp_path):
    assert len(trained) == 2
    check_trained(trained, tmp_path)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (lambda one: replace(one, prompt_token_ids=(1, 3)), "prompt"),
        (lambda one: replace(one, token_ids=(3, 4, 6, 8)), "tokens"),
        (lambda one: replace(one, inserted=(InsertedTokens(2, (6,)),)), "inserted tokens"),
        (lambda one: replace(one, rollout_logprobs=one.rollout_logprobs + np.float32(1e-6)), "log-probabilities"),
        (lambda one: replace(one, versions=(replace(one.versions[0], weight_version=2),)), "versions"),
        (lambda one: replace(one, routes=replace(one.routes, key="c")), "record"),
    ],
)
def test_a_changed_sequence_is_named_with_what_differs(trained, tmp_path, changed, field):
    with refused(SessionError, session=NAME, got=f"other {field}", expected="b"):
        check_trained([changed(trained[0]), trained[1]], tmp_path)


def test_the_parts_of_several_ranks_are_all_sessions(trained, tmp_path):
    others = [replace(one, segment_of="lost") for one in trained]
    check_trained([*trained, *others], tmp_path, (0, 2))
    with pytest.raises(DataError, match="lost"):
        check_trained([*trained, *others], tmp_path, (1, 2))


def test_a_sequence_that_is_lost_or_of_another_place_is_named(trained, tmp_path):
    for sequences in (trained[:1], trained[::-1]):
        with refused(SessionError, session=NAME):
            check_trained(sequences, tmp_path)


def test_a_turn_whose_digest_does_not_hold_is_named(session, trained, tmp_path):
    session.turns[1] = replace(session.turns[1], token_ids=(6, 8))
    keep(session, tmp_path)
    with refused(SessionError, session=NAME, turn=1, fault="chain"):
        check_trained(trained, tmp_path)


def test_a_session_that_was_deleted_is_named(trained, tmp_path):
    (tmp_path / f"{NAME}.session").unlink()
    with pytest.raises(DataError, match=NAME):
        check_trained(trained, tmp_path)
