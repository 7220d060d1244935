"""Opens sessions and finds them by their keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from moe_rl.errors import SessionError
from moe_rl.gateway.sessions import Session, SessionLimits


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """Holds a new session and its key, which cannot be guessed and is stored nowhere else."""

    session: Session
    key: str


class SessionBook:
    """Holds the open sessions. A key belongs to one session, and so to one group.

    Args:
        most: how many sessions may be open at once.
        limits: default limits of a session.
    """

    def __init__(self, most: int, limits: SessionLimits):
        self.limits = limits
        self._most = most
        # A restarted gateway uses the same trace store, so names must differ between starts.
        self._start = secrets.token_hex(4)
        self._opened = 0
        self._open: dict[str, tuple[bytes, Session]] = {}

    def number_after(self, names: Iterable[str]) -> None:
        """Number new sessions after these, so that their seeds differ."""
        numbers = [int(number) for name in names if (number := name.rpartition("-")[2]).isdecimal()]
        self._opened = max([self._opened, *(number + 1 for number in numbers)])

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Return whether no other session can be opened."""
        return len(self._open) >= self._most

    def all(self) -> list[Session]:
        """Return the open sessions, oldest first."""
        return [session for _, session in self._open.values()]

    def open(
        self, group: str, *, now: float, limits: SessionLimits | None = None, name: str | None = None
    ) -> OpenedSession:
        """Open a session of a group.

        Args:
            name: must be unused by open sessions and have no dots; None: one that is new in this store.

        Raises:
            SessionError: too many are open.
        """
        if self.full:
            raise SessionError(
                "Too many sessions are open",
                got=len(self._open),
                expected=f"at most gateway.max_sessions = {self._most}",
                do="finish some, or raise the key",
                fault="limit",
            )
        key = secrets.token_urlsafe(32)
        if name is None:
            name = f"s{self._start}-{self._opened:06d}"
            self._opened += 1
        assert name not in self._open and "." not in name
        session = Session(name, group, limits or self.limits, now)
        self._open[name] = (hash_key(f"{name}.{key}"), session)
        # The name finds the session, and the secret after it is compared in constant time.
        return OpenedSession(session, f"{name}.{key}")

    def reopen(self, session: Session, key_hash: bytes) -> None:
        """Take over an open session of a killed gateway, however many are open. key_hash: see `hash_key`."""
        self._open[session.name] = (key_hash, session)

    def find(self, key: str) -> Session | None:
        """Return the open session of a key; None if there is none."""
        name, _, _ = key.partition(".")
        told, session = self._open.get(name, (b"", None))
        return session if hmac.compare_digest(told, hash_key(key)) else None

    def named(self, name: str) -> Session | None:
        """Return an open session by its name."""
        return self._open[name][1] if name in self._open else None

    def close(self, session: Session) -> None:
        """Forget a session. Its key becomes invalid."""
        self._open.pop(session.name, None)


def hash_key(key: str) -> bytes:
    """Return the sha256 of a key, which verifies a key but does not reveal it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
