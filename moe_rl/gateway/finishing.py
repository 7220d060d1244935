"""Checks finished sessions against the trace store, and keeps them.

`sessions/NAME.session` holds the turns of a session: tokens, log-probabilities, weight versions, references to
records, digests. The routes are in the trace store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import batched
from pathlib import Path

import numpy as np

from moe_rl.errors import About, SessionError, TraceError
from moe_rl.gateway.sessions import FinishedSession, Session, Turn
from moe_rl.rollout import sealed
from moe_rl.trace import TraceStore
from moe_rl.trace.record import RouteRecord
from moe_rl.trace.spans import versions_of_rows
from moe_rl.types import RouteRef

_HEAD, _WHAT = "moe_rl session 2", "the turns of a session"
# How many records are read together; this bounds memory.
_AT_ONCE = 64

_Read = tuple[RouteRecord, RouteRef | None]
"""The record of a turn, and the record that it continues."""


class SessionKeeper:
    """Manages the session files in `folder`, whose records are in `store`."""

    def __init__(self, folder: Path, store: TraceStore):
        self._folder, self._store = folder, store

    def keep(self, finished: FinishedSession) -> Path:
        """Check a session and write its file. Returns the file.

        Raises:
            SessionError: a turn has changed, or its record is missing or belongs to another turn.
            DiskError: the file could not be written.
            TraceError: the store cannot be read now.
        """
        check_session(finished, self._store)
        path = self._folder / f"{finished.name}.session"
        sealed.save(path, _HEAD, finished, _WHAT)
        return path

    def load(self, name: str) -> FinishedSession:
        """Read a session and check it again.

        Raises:
            DataError: the file is missing, cut short or changed.
            SessionError: as `keep`.
        """
        finished = read_session(self._folder / f"{name}.session")
        check_session(finished, self._store)
        return finished

    def names(self) -> list[str]:
        """Return the names of the sessions that have a file."""
        return [path.stem for path in self._folder.glob("*.session")]

    def has(self, name: str) -> bool:
        """Return whether a session has a file."""
        return (self._folder / f"{name}.session").exists()

    def check_records(self, session: Session) -> None:
        """Check that each turn's record matches its tokens, versions and branch. Raises SessionError."""
        _check_records(session, self._store)


def read_session(path: Path) -> FinishedSession:
    """Read a session file. Checks neither its digest chain nor its records.

    Raises:
        DataError: the file is missing, cut short or changed.
    """
    return sealed.load(path, _HEAD, FinishedSession, _WHAT, "sample the session again")


def check_session(finished: FinishedSession, store: TraceStore) -> None:
    """Check the digests of a session, and that each turn's record matches its tokens, versions and branch.

    Raises:
        SessionError: names the session, the turn and the fault.
    """
    _check_records(Session.of(finished), store)


def _check_records(session: Session, store: TraceStore) -> None:
    """Check the records of all turns. They are read together, as each continues others."""
    for turns in batched(session.turns, _AT_ONCE):
        read: dict[int, _Read] = {}
        with suppress(TraceError):  # the checks below find the turn at fault
            read = _read(store, turns)
        for turn in turns:
            _check_record(session, turn, store, read)


def _read(store: TraceStore, turns: Sequence[Turn]) -> dict[int, _Read]:
    """Read the records of turns, without routes, and the records that they continue. Returns them by the turns'
    numbers."""
    refs = {turn.number: turn.routes for turn in turns if turn.routes is not None}
    store.check_published(part.shard for ref in refs.values() for part in ref.parts)
    records = store.read_each([(ref, None) for ref in refs.values()], layers=())
    return dict(zip(refs, zip(records, store.parents(list(refs.values())), strict=True), strict=True))


def _check_record(session: Session, turn: Turn, store: TraceStore, read: Mapping[int, _Read]) -> None:
    where: About = {"session": session.name, "turn": turn.number}

    def fault(what: str, name: str, got: object, expected: object = None) -> SessionError:
        return SessionError(what, where=where, got=got, expected=expected, fault=name)

    if (ref := turn.routes) is None:
        raise fault("A turn has no record", "no record", "no reference")
    try:
        record, parent = (read or _read(store, [turn]))[turn.number]
    except TraceError as error:
        if _is_of_the_system(error):
            raise
        raise fault("The record of a turn cannot be read", "no record", error) from error
    fed = np.asarray(session.ids(turn.number)[:-1])
    if len(fed) != len(record.token_ids) or (fed != record.token_ids).any():
        most = min(len(fed), len(record.token_ids))
        wrong = np.flatnonzero(fed[:most] != record.token_ids[:most])
        got = f"another token at position {wrong[0]}" if len(wrong) else f"{len(record.token_ids)} rows"
        raise fault("The record of a turn has other tokens", "other tokens", got, f"its {len(fed)} tokens")
    before = session.turns[turn.parent].routes if turn.parent is not None else None
    if turn.continues and (before is None or not _continues(store, ref, parent, before)):
        got = parent.key if parent is not None else "a record that continues none"
        raise fault(
            "The record of a turn belongs to another branch", "another branch", got, f"one after turn {turn.parent}"
        )
    rows = versions_of_rows(record.spans)[-len(turn.token_ids) :]
    versions = np.repeat([span.weight_version for span in turn.versions], [span.tokens for span in turn.versions])
    if (rows != versions).any():
        position = int(np.argmax(rows != versions))
        raise fault(
            "The rows of a turn come from other weights than its tokens",
            "other weights",
            f"version {rows[position]} for token {position}",
            f"version {versions[position]}",
        )


def _is_of_the_system(error: BaseException | None) -> bool:
    """Return whether a record could not be read for want of open files, or as a disk failed: it may be there."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and not isinstance(error, FileNotFoundError)


def _continues(store: TraceStore, ref: RouteRef, parent: RouteRef | None, before: RouteRef) -> bool:
    """Return whether a record continues the record `before` with all its rows, or has stored these rows again."""
    if parent is not None:
        return (parent.key, parent.rows, parent.parts) == (before.key, before.rows, before.parts)
    return before.rows <= ref.rows and bool(
        (store.read(ref, rows=(0, before.rows)).routes == store.read(before).routes).all()
    )
