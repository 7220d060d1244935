"""Keeps the state of open sessions, so that a gateway can continue them after it was killed.

`sessions/NAME.journal` is the line `moe_rl journal 2`, then a line for each event of the session:

    <xxh3-128 of the digest of the line before and this value> <the value in the encoding of `messages.py`, in base64>

A line is written before the client gets the reply that it describes, so no client has the reply of a line that was torn
when the gateway died. The receipt of a reply is written afterwards: if the gateway dies in between, the turn counts as
not received until a request continues it. Lines reach the kernel but are not synced: they survive the death of the
process, but a power cut may lose the last ones. The file holds only the hash of the session's key.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from moe_rl import messages
from moe_rl.disk import writing
from moe_rl.errors import About, DataError, DiskError
from moe_rl.gateway.sessions import Session, SessionLimits, Turn
from moe_rl.messages import Message

_HEAD, _SUFFIX, _WHAT = b"moe_rl journal 2", ".journal", "the journal of a session"


class OpenedEntry(Message, frozen=True):
    """The first entry. opened: seconds since 1970. key_hash: see `session_keys.hash_key`."""

    name: str
    group: str
    limits: SessionLimits
    key_hash: bytes
    opened: float


class TurnsEntry(Message, frozen=True):
    """Records the turns of one request. request: its digest, see `exchanges.ClientCall`."""

    turns: list[Turn]
    request: bytes


class ReceivedEntry(Message, frozen=True):
    """Records whether the agent got turns, by their numbers."""

    turns: list[int]
    received: bool


class RepliesEntry(Message, frozen=True):
    """Records which messages continue which turn, as `Dialogues.add` returns it."""

    turns: dict[bytes, int]


class ReopenedEntry(Message, frozen=True):
    """Records that a gateway reopened the session."""


_Entry = OpenedEntry | TurnsEntry | ReceivedEntry | RepliesEntry | ReopenedEntry
_ENTRIES: msgspec.msgpack.Decoder[_Entry] = messages.decoder(_Entry)


@dataclass(frozen=True, slots=True)
class JournaledSession:
    """Holds the content of a journal.

    Attributes:
        replies: which messages continue which turn, for `Dialogues.restore`.
        requests: the turns of each request, by its digest.
        whole: bytes of the file without a torn last line.
        digest: the last whole line's digest.
    """

    session: Session
    key_hash: bytes
    replies: Mapping[bytes, int]
    requests: list[tuple[bytes, list[int]]]
    whole: int
    digest: str


class SessionJournals:
    """Manages the journals of open sessions in `folder`. Every method that writes raises DiskError if it cannot.

    An entry that could not be written is written with the session's next entry, so that none is missing in between.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._digests: dict[str, str] = {}
        self._unsent: dict[str, bytearray] = {}

    def open(self, session: Session, key_hash: bytes, opened: float) -> None:
        """Begin the journal of a session. opened: seconds since 1970."""
        entry = OpenedEntry(session.name, session.group, session.limits, key_hash, opened)
        path = self._path(session.name)
        try:
            with writing(f"{_WHAT} could not be created", path):
                self._folder.mkdir(exist_ok=True)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            self._digests[session.name] = _digest("", _HEAD)
            self._unsent[session.name] = bytearray(_HEAD + b"\n")
            self.add(session, entry)
        except BaseException:
            with suppress(DiskError):
                self.remove(session.name)
            raise

    def remove(self, name: str) -> None:
        """Delete the journal of a session, so that it is not reopened."""
        self._digests.pop(name, None)
        self._unsent.pop(name, None)
        with writing(f"{_WHAT} could not be deleted", self._path(name)):
            self._path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of the sessions that have a journal, sorted."""
        return sorted(path.stem for path in self._folder.glob(f"*{_SUFFIX}"))

    def read(self, name: str, *, now: float, clock: float) -> JournaledSession:
        """Read the journal of a session.

        Args:
            now: seconds since 1970. clock: the same moment on the clock of the session's limits.

        Raises:
            DataError: the journal is missing or changed.
            SessionError: its turns do not fit together.
        """
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{_WHAT} cannot be read", where={"file": path}, got=error.strerror) from error
        entries, digest, whole = _read(path, content)
        if not entries or not isinstance(first := entries[0], OpenedEntry) or first.name != name:
            raise _damaged(path, 2, f"no entry that opens {name}")
        session = Session(name, first.group, first.limits, clock - max(0.0, now - first.opened))
        replies: dict[bytes, int] = {}
        requests: list[tuple[bytes, list[int]]] = []
        for entry in entries[1:]:
            match entry:
                case TurnsEntry(turns, request):
                    for turn in turns:
                        session.restore(turn)
                    requests.append((request, [turn.number for turn in turns]))
                case ReceivedEntry(numbers, received):
                    session.tell_received(numbers, received)
                case RepliesEntry(histories):
                    replies |= histories
                case ReopenedEntry():
                    session.reopened += 1
        return JournaledSession(session, first.key_hash, replies, requests, whole, digest)

    def go_on(self, journaled: JournaledSession) -> None:
        """Cut off a torn last line, and record that the session is reopened."""
        session = journaled.session
        path = self._path(session.name)
        with writing(f"{_WHAT} could not be cut", path):
            os.truncate(path, journaled.whole)
        self._digests[session.name], self._unsent[session.name] = journaled.digest, bytearray()
        session.reopened += 1
        self.add(session, ReopenedEntry())

    def add(self, session: Session, entry: _Entry) -> None:
        """Record an event of a session."""
        payload = base64.b64encode(messages.encode(entry))
        digest = self._digests[session.name] = _digest(self._digests[session.name], payload)
        unsent, path = self._unsent[session.name], self._path(session.name)
        unsent += f"{digest} ".encode() + payload + b"\n"
        with writing(f"{_WHAT} could not be written", path, size=len(unsent)):
            # Files are not kept open: there may be more sessions than a process may open files.
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                while unsent:
                    del unsent[: os.write(fd, unsent)]
            finally:
                os.close(fd)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


def _read(path: Path, content: bytes) -> tuple[list[_Entry], str, int]:
    """Return the entries of a journal, the digest of the last one, and the bytes up to its end. Raises DataError."""
    *lines, torn = content.split(b"\n")
    if not lines or lines[0] != _HEAD:
        raise _damaged(path, 1, repr(content[:40]))
    digest = _digest("", _HEAD)
    entries: list[_Entry] = []
    for number, line in enumerate(lines[1:], 2):
        told, _, payload = line.partition(b" ")
        digest = _digest(digest, payload)
        if told != digest.encode():
            raise _damaged(path, number, f"an entry with digest {digest}")
        try:
            entries.append(_ENTRIES.decode(base64.b64decode(payload, validate=True)))
        except (msgspec.MsgspecError, ValueError) as error:
            where: About = {"file": path, "line": number}
            raise DataError(f"{_WHAT} was written by another version of moe_rl", where=where, got=error) from error
    told, _, payload = torn[:-1].partition(b" ")
    if told == _digest(digest, payload).encode():
        raise _damaged(path, len(lines) + 1, "a whole entry with another end")  # a torn one lacks more, or has no end
    return entries, digest, len(content) - len(torn)


def _damaged(path: Path, line: int, got: str) -> DataError:
    return DataError(
        f"{_WHAT} is damaged",
        where={"file": path, "line": line},
        got=got,
        expected="what the gateway wrote",
        do="delete the file and open a new session",
        fault="damaged",
    )


def _digest(before: str, payload: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(before.encode() + payload)
