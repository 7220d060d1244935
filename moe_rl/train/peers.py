"""Who is alive, and who was asked to stop: every rank beats, every rank listens, one message says why a run ends.

Each rank rewrites `ranks/rank<r>.json` in the run folder from a thread of its own. A beat that stops for too long, or a
process of this host that is gone, ends the run: a collective would only wait. Beats are counted and timed on the
listener's own monotonic clock, so clocks that jump or differ do no harm.

Rank 0 listens to all, the others to rank 0 and to the ranks of their node: a folder that many nodes share is not asked
for every rank by every rank. Who ends the run leaves the reason in its file, so that all nodes soon give the same one.

SIGTERM asks the run to stop: torchrun forwards the one that it gets, schedulers send it before they kill. The thread
hears of it at once, also while the main thread waits in a collective, tells the other ranks with its next beat, and
sees to it that the run has ended `grace_seconds` later, with a checkpoint or without. SIGINT ends it there and then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_rl.errors import MoeRLError, Stopped

_INTERVAL = 0.5
# A scheduler signals torchrun and its ranks, and torchrun them again: one request.
_SAME_REQUEST = 3.0
# From where a dying process has closed its connections to where the kernel has done with it.
_DYING_SECONDS = 5.0
EXIT_CODE = 3
STOPPED = 5


class StopRequested(BaseException):
    """Raised within `Peers.to_be_left`. Not an Exception: what handles those has no business with it."""


class Peers:
    """Context manager that beats and listens from a thread until it is left. Entered on the main thread."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        *,
        timeout_seconds: float,
        grace_seconds: float,
        near: range | None = None,
    ):
        """near: the ranks of this node, None: all are."""
        self.folder, self.rank = folder, rank
        near = range(ranks) if near is None else near
        self._heard = [other for other in range(ranks) if other != rank and (0 in (rank, other) or other in near)]
        self._several_nodes = len(near) < ranks
        self._ended = ""
        self._hosts: dict[int, str] = {}
        self.timeout, self.grace = timeout_seconds, grace_seconds
        self.saved, self.save_seconds = 0, 0.0
        self._phase, self._part, self._step, self._beats, self._due = "start", "", 0, 0, 0.0
        self._asked: float | None = None
        self._left = False
        self._parent = os.getppid()
        self._done = threading.Event()
        self._said, self._writing = threading.Lock(), threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._failed_since: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def __enter__(self) -> Peers:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        # The interpreter writes each signal's number there, whatever the main thread is doing.
        self._signals, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGTERM, signal.SIGINT)}
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._done.set()
        self._signalled.send(b"\0")
        self._thread.join()
        if error is not None and not isinstance(error, MoeRLError):
            # Most likely a collective broke off because a peer is gone: then that is what there is to say.
            # One that failed may still be about to say why, one that was killed about to die, and of one on another
            # node it is known only when a rank there has said it, or by its silence.
            patience = time.monotonic()
            if isinstance(error, RuntimeError):
                patience += self.timeout + 2 * _INTERVAL if self._several_nodes else _DYING_SECONDS
            while (lost := self._lost()) is None and (self._failed_since or time.monotonic() < patience):
                time.sleep(_INTERVAL / 5)
                with suppress(OSError):
                    self._beat()  # who waits here is not the one that is gone
            if lost is not None:
                self._end(lost)
        signal.set_wakeup_fd(self._wakeup)
        self._signals.close()
        self._signalled.close()
        for number, handler in self._handlers.items():
            # Ranks that stop as they were asked to are not hurried by the first that is done.
            signal.signal(number, signal.SIG_IGN if isinstance(error, Stopped) else handler)
        self._phase = "stopped" if isinstance(error, Stopped) else "failed" if error is not None else "finished"
        with suppress(OSError):  # a full disk may be what `error` is about to tell
            self._beat()

    @contextmanager
    def phase(self, name: str, step: int, *, seconds: float = 0.0) -> Iterator[None]:
        """Say what this rank is doing; it stands in the message if the rank is lost meanwhile. seconds: how long it is
        expected to take, where a run that is asked to stop ends it first."""
        self._phase, self._part, self._step, self._due = name, "", step, time.monotonic() + seconds
        with suppress(OSError):
            self._beat()
        yield

    def part(self, name: str) -> None:
        """Say which part of the phase this rank is at."""
        self._part = name
        with suppress(OSError):
            self._beat()

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop. The ranks hear of it one after the other."""
        return self._asked is not None

    @contextmanager
    def to_be_left(self) -> Iterator[None]:
        """Work that may end anywhere: StopRequested is raised in it as soon as this rank is asked to stop."""
        self._left = True
        try:
            if self.asked:
                raise StopRequested
            yield
        finally:
            self._left = False

    def save_done(self, step: int, seconds: float) -> None:
        """There is a checkpoint after `step` steps, and it took so long."""
        self.saved, self.save_seconds = step, seconds

    def stopped(self) -> None:
        """The run has done all that it could for the request to stop."""
        self._asked = float("inf")

    def _beat(self) -> None:
        with self._writing:
            self._write()

    def _write(self) -> None:
        self._beats += 1
        path = self.folder / f"rank{self.rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._state()))
        os.replace(temporary, path)

    def _state(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beats": self._beats,
            "phase": self._phase,
            "part": self._part,
            "step": self._step,
            "asked": self.asked,
            "ended": self._ended,
        }

    def _watch(self) -> None:
        while not self._done.is_set():
            readable, _, _ = select.select([self._signals], [], [], _INTERVAL)
            for number in self._signals.recv(64) if readable else b"":
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._hear(signal.Signals(number))
            with suppress(OSError):  # a full disk must not be taken for a dead rank
                self._beat()
            lost = self._lost()
            if lost is not None:
                self._end(lost)
            if self.asked and time.monotonic() > self._asked + self.grace:
                self._end(
                    f"{self._here} was asked to stop and did not within checkpoint.grace_seconds = {self.grace:g}; "
                    f"{self._standing}",
                    STOPPED,
                )

    def _interrupt(self, number, frame) -> None:
        if number == signal.SIGTERM and self._left:
            raise StopRequested

    def _hear(self, number: signal.Signals) -> None:
        # torchrun ends the other ranks with SIGTERM when one dies: then that rank is the reason, not the signal.
        lost = self._lost()
        if lost is not None:
            self._end(lost)
        now = time.monotonic()
        if number != signal.SIGTERM or self._phase == "start":
            code = STOPPED if number == signal.SIGTERM else EXIT_CODE
            self._end(f"{self._here} was ended by {number.name}; {self._standing}", code)
        if self._asked is None:
            self._asked = now
            needed = max(0.0, self._due - now) + self.save_seconds
            if needed > self.grace:
                self._end(
                    f"{self._here} was asked to stop ({number.name}), and to come to a stop and save would take about "
                    f"{needed:.1f} s, more than checkpoint.grace_seconds = {self.grace:g}; {self._standing}",
                    STOPPED,
                )
        elif now > self._asked + _SAME_REQUEST:
            self._end(f"{self._here} was asked to stop a second time ({number.name}); {self._standing}", STOPPED)

    @property
    def _here(self) -> str:
        return f"rank {self.rank}, {_doing(self._state())},"

    @property
    def _standing(self) -> str:
        if not self.saved:
            return "there is no checkpoint yet" + (", what was done is lost" if self._step else "")
        if self._step <= self.saved:
            return f"the checkpoint after step {self.saved} stands"
        return f"the checkpoint after step {self.saved} stands, steps {self.saved + 1} to {self._step} are done again"

    def _lost(self) -> str | None:
        """A sentence about the first peer that is gone; "" when it failed and has had time to say so; None when all is
        well."""
        if os.getppid() != self._parent:
            return f"torchrun (pid {self._parent}), which started rank {self.rank}, died"
        for rank in self._heard:
            with suppress(OSError, ValueError):
                state = json.loads((self.folder / f"rank{rank}.json").read_text())
                if state["asked"] and not self.asked and self._phase != "start":
                    os.kill(os.getpid(), signal.SIGTERM)  # heard by both threads
                if state["phase"] in ("finished", "stopped"):
                    self._seen.pop(rank, None)
                    continue
                if state["ended"]:
                    return state["ended"]
                who = f"rank {rank} (pid {state['pid']} on {state['host']})"
                where = f"{who}, {_doing(state)}"
                self._hosts[rank] = state["host"]
                local = state["host"] == socket.gethostname()
                if state["phase"] == "failed":
                    # It is about to say why. Were this rank to end first, torchrun would end that one unheard.
                    since = self._failed_since.setdefault(rank, time.monotonic())
                    if (local and not _running(state["pid"])) or time.monotonic() - since > self.timeout:
                        return ""
                    continue
                if local and not _running(state["pid"]):
                    return f"{where}, died"
                beats, since = self._seen.get(rank, (-1, 0.0))
                if beats != state["beats"]:
                    self._seen[rank] = state["beats"], time.monotonic()
                elif time.monotonic() - since > self.timeout:
                    if local:  # stopped or hung: it would outlive the run
                        with suppress(ProcessLookupError):
                            os.kill(state["pid"], signal.SIGKILL)
                    return f"{where}, gave no sign of life for {self.timeout:g} s{self._silent_too(rank)}"
        return None

    def _silent_too(self, first: int) -> str:
        """Others that are about to be missed: when a node is gone, a rank that waits for it may fall silent before."""
        now = time.monotonic()
        ranks = [r for r, (_, since) in sorted(self._seen.items()) if r != first and now - since > self.timeout / 2]
        return "".join(f", nor lately rank {rank} on {self._hosts[rank]}" for rank in ranks)

    def _end(self, why: str, code: int = EXIT_CODE) -> None:
        with self._said:  # never released: the process ends here
            if code == STOPPED:
                self._phase = "stopped"
            else:
                self._ended = why
            with suppress(OSError):
                self._beat()
            if why:
                again = f"--resume {self.folder.parent}" + ("" if self.saved else " --step 0")
                print(
                    f"moe_rl: {why}; the run stops. Continue it with {again}",
                    file=sys.stderr,
                    flush=True,
                )
            # Children die with this process: the kernel signals them (PR_SET_PDEATHSIG), and their sockets close.
            os._exit(code)


def _doing(state: dict[str, object]) -> str:
    phase, part, step = state["phase"], state["part"], state["step"]
    return f"in phase {phase} of step {step}" if part in ("", phase) else f"in phase {phase} ({part}) of step {step}"


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
