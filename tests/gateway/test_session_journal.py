"""Tests the journals of open sessions: what comes back, what is cut off, and that no changed byte goes unnoticed."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

from moe_rl.errors import DataError, DiskError, SessionError
from moe_rl.gateway.session_journal import ReceivedEntry, RepliesEntry, SessionJournals, TurnsEntry
from moe_rl.gateway.session_keys import hash_key
from moe_rl.gateway.sessions import Session, SessionLimits
from tests.gateway.session_turns import take
from tests.support.refusals import refused

LIMITS = SessionLimits(tokens=20, turns=5, seconds=10.0)
KEY = hash_key("s.secret")


def add(journals, session, *turns) -> None:
    """Write down the turns of a request, and that they were received."""
    journals.add(session, TurnsEntry([replace(turn, received=False) for turn in turns], b"asked"))
    journals.add(session, ReceivedEntry([turn.number for turn in turns], True))


def written(folder) -> tuple[SessionJournals, Session]:
    """Write the journal of a session: a turn, one that continues it, and two samples of another prompt."""
    journals, session = SessionJournals(folder), Session("s", "g", LIMITS, 0.0)
    journals.open(session, KEY, 1000.0)
    add(journals, session, take(session, [1, 2], [3, 4], key="a"))
    journals.add(session, RepliesEntry({b"hi": 0}))
    add(journals, session, take(session, [1, 2, 3, 4, 5], [6], key="b", version=2))
    journals.add(session, RepliesEntry({b"hi": 1, b"more": 1}))
    add(journals, session, take(session, [7], [8], key="c"), take(session, [7], [9], key="d"))
    return journals, session


def read(folder, *, now=1000.0, clock=50.0):
    return SessionJournals(folder).read("s", now=now, clock=clock)


def test_a_session_comes_back_as_it_was(tmp_path):
    _, session = written(tmp_path)
    found = read(tmp_path)
    assert found.session.finish().digest == session.finish().digest and found.session.kinds == session.kinds
    assert (found.session.limits, found.key_hash, found.replies) == (LIMITS, KEY, {b"hi": 1, b"more": 1})
    assert SessionJournals(tmp_path).names() == ["s"]
    assert (
        b"secret" not in (tmp_path / "s.journal").read_bytes() and (tmp_path / "s.journal").stat().st_mode & 0o77 == 0
    )


def test_what_was_used_of_the_limits_counts_on(tmp_path):
    written(tmp_path)
    session = read(tmp_path, now=1007.0, clock=50.0).session
    session.drop(session.begin([1], samples=1, max_tokens=1, now=52.9))
    for what, prompt, samples, now in (
        ("seconds", [1], 1, 53.1),  # 7 were used before it came back
        ("turns", [1], 2, 50.0),  # 4 of 5
        ("tokens", [1] * 11, 1, 50.0),  # 9 of 20
    ):
        with refused(SessionError, what, session="s", fault="limit"):
            session.begin(prompt, samples=samples, max_tokens=1, now=now)
    # A clock that was set back gives no time.
    assert read(tmp_path, now=900.0).session.begin([1], samples=1, max_tokens=1, now=59.9)
    with refused(SessionError, "seconds"):
        read(tmp_path, now=900.0).session.begin([1], samples=1, max_tokens=1, now=60.1)


def test_a_session_goes_on_and_comes_back_again(tmp_path):
    _, session = written(tmp_path)
    for times in (1, 2):
        journals = SessionJournals(tmp_path)
        found = journals.read("s", now=1000.0, clock=0.0)
        journals.go_on(found)
        assert found.session.reopened == times
    add(journals, found.session, take(found.session, [1, 2, 3, 4, 5, 6, 7], [8], key="e"))
    again = read(tmp_path).session
    assert len(again.turns) == 5 and again.turns[4].parent == 1 and again.reopened == 2
    assert again.turns[:4] != [] and again.finish().digest == found.session.finish().digest != session.finish().digest
    journals.remove("s")
    assert journals.names() == [] and list(tmp_path.iterdir()) == []


def test_a_torn_last_line_is_cut_off(tmp_path):
    """Wherever the file is cut, what stands before the torn line comes back, and the session goes on behind it."""
    _, session = written(tmp_path)
    path = tmp_path / "s.journal"
    whole = path.read_bytes()
    begin = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    ends = [at + 1 for at in range(begin, len(whole)) if whole[at : at + 1] == b"\n"]
    has = dict(zip([begin, *ends], [0, 1, 1, 1, 2, 2, 2, 4, 4], strict=True))  # turns
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut < begin:
            with refused(DataError, file=path, fault="damaged"):
                read(tmp_path)
            continue
        journals = SessionJournals(tmp_path)
        found = journals.read("s", now=0.0, clock=0.0)
        kept = max(end for end in has if end <= cut)
        assert (len(found.session.turns), found.whole) == (has[kept], kept)
        assert [turn.digest for turn in found.session.turns] == [turn.digest for turn in session.turns][: has[kept]]
        if cut % 7 == 0:
            journals.go_on(found)
            add(journals, found.session, take(found.session, [9], [9]))
            assert len(read(tmp_path).session.turns) == has[kept] + 1


def test_any_changed_byte_is_named_with_its_line(tmp_path):
    written(tmp_path)
    path = tmp_path / "s.journal"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with refused(DataError, file=path, fault="damaged", line=1 + whole[:at].count(b"\n")):
            read(tmp_path)


def test_lines_that_are_gone_doubled_exchanged_or_of_another_session_are_noticed(tmp_path):
    written(tmp_path)
    path = tmp_path / "s.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in (
        [*lines[:3], *lines[4:]],
        [*lines[:3], lines[2], *lines[3:]],
        [*lines[:3], lines[4], lines[3], *lines[5:]],
        lines[:1],
        [],
    ):
        path.write_bytes(b"".join(wrong))
        with refused(DataError, file=path, fault="damaged"):
            read(tmp_path)
    path.write_bytes(b"".join(lines))
    path.rename(tmp_path / "other.journal")
    with refused(DataError, file=tmp_path / "other.journal", fault="damaged"):
        SessionJournals(tmp_path).read("other", now=0.0, clock=0.0)
    with refused(DataError, file=path):
        read(tmp_path)


def test_what_a_full_disk_kept_out_is_written_next_time(tmp_path, monkeypatch):
    journals, session = written(tmp_path)
    write, room = os.write, [20]

    def full(fd, data) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, bytes(data[: room[0]]))
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", full)
    turn = take(session, [5], [5])
    with refused(DiskError, file=tmp_path / "s.journal", fault="ENOSPC"):
        add(journals, session, turn)
    assert len(read(tmp_path).session.turns) == 4  # the rest of the line is missing: it is torn
    room[0] = 1 << 20
    journals.add(session, RepliesEntry({b"late": 4}))
    found = read(tmp_path)
    assert len(found.session.turns) == 5 and found.replies[b"late"] == 4
    room[0] = 0
    with refused(DiskError, fault="ENOSPC"):
        journals.open(Session("t", "g", LIMITS, 0.0), KEY, 0.0)
    assert journals.names() == ["s"]
