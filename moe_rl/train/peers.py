"""Watches that all ranks are alive, handles requests to stop, and gives one reason when a run ends.

Ranks exchange heartbeats through the store that torchrun keeps for them (MASTER_ADDR, MASTER_PORT). Each rank writes
its own key twice a second. It reads the keys of the ranks on its node and of rank 0, and rank 0 reads all keys, so the
load grows with the number of ranks and not with its square. If the heartbeat of a rank stops for too long, or its
process on this host is gone, the run ends: a collective would wait for that rank forever. Heartbeats are counted, and
timed on the reader's own monotonic clock, so clocks that jump or differ do no harm. The first rank that ends the run
writes the reason into the store, so that all nodes report the same reason.

A call to a store that was stopped never returns, whatever its timeout. Therefore one thread talks to the store, and a
second thread watches without ever waiting for the first: the run also ends when the store is gone or silent.

SIGTERM asks the run to stop: torchrun forwards it to the ranks, and schedulers send it before they kill. The watching
thread notices it at once, even while the main thread waits in a collective. It tells the other ranks, and makes sure
that the run has ended `grace_seconds` later, with or without a checkpoint. SIGINT ends the run immediately.

Heartbeats also say what each rank is at. If all ranks live and none gets on, the run ends too: see `hangs`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.errors import MoeRLError, Stopped
from moe_rl.train import hangs
from moe_rl.train.hangs import tell
from moe_rl.whereabouts import HERE

if TYPE_CHECKING:
    from torch.distributed import Store

_INTERVAL = 0.5
# Signals less than this many seconds apart are one request: a scheduler signals torchrun and the ranks, and torchrun
# signals the ranks again.
_SAME_REQUEST = 3.0
# A dying process closes its connections up to this long before the kernel has removed it.
_DYING_SECONDS = 5.0
# Seconds that the ranks of a run that hangs have for their reports.
_REPORT_SECONDS = 10.0
# Seconds that rank 0 may take to publish a checkpoint whose parts are all written.
_PUBLISHING_SECONDS = 5.0
_OVER = ("finished", "stopped")
EXIT_CODE = 3
STOPPED = 5


class StopRequested(BaseException):
    """Raised inside `Peers.to_be_left` when the run is asked to stop. A BaseException, so that `except Exception`
    ignores it."""


def connect(folder: Path, environment: Mapping[str, str] = os.environ) -> Store:
    """Connect to the part of torchrun's store that belongs to the run in `folder`.

    The keys are each rank's number, with its state as JSON; "asked", which is "1" once the run was asked to stop;
    "hangs", which is "1" once no rank gets on; and "ended", with the reason why the run ends.

    Args:
        environment: The environment variables of a rank of the run.
    """
    # imported here because the exit codes above must be usable without torch
    from torch.distributed import PrefixStore, TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    return PrefixStore(f"{folder.name}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class _Wire(threading.Thread):
    """Sends this rank's state to the store and fetches the state of the others.

    Its calls hang while the store hangs. So no other thread calls the store, or waits for this thread without a limit.
    """

    def __init__(self, folder: Path, rank: int, others: list[int], state: Callable[[int], dict[str, Any]]):
        super().__init__(name="peers' wire", daemon=True)
        self._folder, self._rank, self._others, self._state = folder, rank, others, state
        self._news, self._hurry, self._begun, self._ended = threading.Event(), False, 0, 0
        # What this rank tells the others, and later what the store says.
        self.asked, self.hangs, self.why = False, False, ""
        self.heard: tuple[float, dict[int, dict[str, Any]]] = 0.0, {}  # when the store last answered, and its answer
        self.broken = False

    def run(self) -> None:
        try:
            with suppress(RuntimeError):  # torch raises this for a store that is gone
                self._talk(connect(self._folder))
        finally:
            self.broken = True

    def beat(self) -> None:
        """Send the state now."""
        self._news.set()

    def exchange(self, seconds: float = 1.0) -> None:
        """Send the state and fetch that of the others; return when this is done or after `seconds`."""
        goal, limit = self._begun + 1, time.monotonic() + seconds
        while self._ended < goal and not self.broken and time.monotonic() < limit:
            self._hurry = True
            self.beat()
            time.sleep(0.005)

    def _talk(self, store: Store) -> None:
        keys = [str(other) for other in self._others]
        for key in (*keys, "asked", "hangs", "ended"):
            store.compare_set(key, "", "")  # reading a missing key would wait for it
        listened = 0.0
        while True:
            self._begun += 1
            store.set(str(self._rank), json.dumps(self._state(self._begun)))
            if self.asked:
                store.set("asked", "1")
            if self.hangs:
                store.set("hangs", "1")
            if self.why:
                # keep the reason that was stored first, so that all ranks report the same one
                self.why = store.compare_set("ended", "", self.why).decode()
            if self._hurry or time.monotonic() > listened + _INTERVAL:
                self._hurry, listened = False, time.monotonic()
                *states, asked, still, why = store.multi_get([*keys, "asked", "hangs", "ended"])
                self.heard = listened, {r: json.loads(s) for r, s in zip(self._others, states, strict=True) if s}
                self.asked, self.hangs = self.asked or bool(asked), self.hangs or bool(still)
                self.why = why.decode() or self.why
                self._ended = self._begun
            self._news.wait(_INTERVAL)
            self._news.clear()


class Peers:
    """Sends and watches heartbeats in threads, as a context manager. Enter it on the main thread."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        *,
        timeout_seconds: float,
        grace_seconds: float,
        hang_seconds: float,
        evidence: hangs.Evidence,
        near: range | None = None,
    ):
        """Prepare the threads; `__enter__` starts them.

        Args:
            folder: The run folder.
            timeout_seconds: A rank that is silent for this long is lost.
            grace_seconds: Time from a request to stop to the end of the process.
            hang_seconds: Time in which some rank must get on, see `hangs.Stillness`.
            evidence: Tells about this rank's collectives.
            near: The ranks on this node; None means all ranks.
        """
        self.folder, self.rank = folder, rank
        near = range(ranks) if near is None else near
        others = [other for other in range(ranks) if other != rank and (0 in (rank, other) or other in near)]
        self._several_nodes = len(near) < ranks
        self.timeout, self.grace = timeout_seconds, grace_seconds
        self.ranks, self.save_seconds = ranks, 0.0
        (self._phase, self._part), self._step, self._due = hangs.START, 0, 0.0
        self._asked: float | None = None
        self._left, self._late = False, 0.0
        self._nudged = self._nudging = False  # whether it has sent a signal to itself, and has not heard it yet
        self._parent = os.getppid()
        self._done, self._said = threading.Event(), threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._failed_since: dict[int, float] = {}
        self._answer, self._looked, self._unanswered = 0.0, time.monotonic(), 0.0
        self._stillness, self._evidence = hangs.Stillness(hang_seconds), evidence
        self._moved = HERE.moves, time.monotonic()
        self._report: dict[str, Any] = {}
        self._reported = 0.0
        self._wire = _Wire(folder, rank, others, self._state)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def __enter__(self) -> Peers:
        self._wire.start()
        self._wire.exchange(self.timeout)
        # The interpreter writes each signal's number to this socket, whatever the main thread is doing.
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
            # Most likely a collective failed because a peer is gone; then that peer is the reason to report.
            # A peer that failed may still be about to report why, and a killed one may be about to disappear. A failure
            # on another node is known only once a rank there reports it, or by silence.
            patience = time.monotonic()
            if isinstance(error, RuntimeError):
                patience += _DYING_SECONDS + (self.timeout if self._several_nodes else 0.0)
            while (lost := self._lost()) is None and (self._failed_since or time.monotonic() < patience):
                time.sleep(_INTERVAL / 5)
            if lost is not None:
                self._end(lost)
        signal.set_wakeup_fd(self._wakeup)
        self._signals.close()
        self._signalled.close()
        for number, handler in self._handlers.items():
            # While the ranks stop on request, ignore the SIGTERM that torchrun sends when the first of them ends.
            signal.signal(number, signal.SIG_IGN if isinstance(error, Stopped) else handler)
        self._phase = "stopped" if isinstance(error, Stopped) else "failed" if error is not None else "finished"
        self._wire.exchange()

    @contextmanager
    def phase(self, name: str, step: int, *, seconds: float = 0.0) -> Iterator[None]:
        """Announce what this rank is doing. If the rank is lost meanwhile, the error message names the phase.

        Args:
            seconds: Expected duration, if the phase must finish before a requested stop.
        """
        self._phase, self._part, self._step, self._due = name, "", step, time.monotonic() + seconds
        HERE.leave()
        self._wire.beat()
        yield

    def part(self, name: str) -> None:
        """Announce the part of the phase that this rank is in."""
        self._part = name
        HERE.leave()
        self._wire.beat()

    @property
    def asked(self) -> bool:
        """Return whether this rank was asked to stop. Ranks learn of a request at different times."""
        return self._asked is not None

    @contextmanager
    def to_be_left(self, *, late: bool = False) -> Iterator[None]:
        """Run work that may be interrupted anywhere: StopRequested is raised in it once this rank is asked to stop.

        late: this leaves half of the grace period, after the time that saving takes, to the work.
        """
        self._left, self._late = True, max(0.0, self.grace - self.save_seconds) / 2 if late else 0.0
        try:
            if self._must_leave:
                raise StopRequested
            yield
        finally:
            self._left = False

    @property
    def _must_leave(self) -> bool:
        return self._left and self._asked is not None and time.monotonic() >= self._asked + self._late

    def save_took(self, seconds: float) -> None:
        """Record how long the last checkpoint took."""
        self.save_seconds = seconds

    def stopped(self) -> None:
        """Record that the run has done all it could before stopping, so that the grace period no longer applies."""
        self._asked = float("inf")

    def _state(self, beats: int = 0) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beats": beats,
            "phase": self._phase,
            "part": self._part,
            "step": self._step,
            "microbatch": HERE.microbatch,
            "layer": HERE.layer,
            "moves": HERE.moves,
            **self._report,
        }

    def _watch(self) -> None:
        while not self._done.is_set():
            looked = time.monotonic()
            readable, _, _ = select.select([self._signals], [], [], _INTERVAL)
            for number in self._signals.recv(64) if readable else b"":
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._hear(signal.Signals(number))
            lost = self._lost()
            if lost is not None:
                self._end(lost)
            if self._must_leave and self._late and not self._nudged:
                self._nudged = self._nudging = True
                os.kill(os.getpid(), signal.SIGTERM)
            # Count only the time in which this process ran: while it was suspended, it could not hear of the others.
            self._look_for_hang(min(time.monotonic() - looked, 2 * _INTERVAL))
            if self._asked is not None and time.monotonic() > self._asked + self.grace:
                self._end(
                    f"{self._here} was asked to stop and did not end within checkpoint.grace_seconds = {self.grace:g}; "
                    f"{self._standing}",
                    STOPPED,
                )

    def _look_for_hang(self, passed: float) -> None:
        """End the run if no rank gets on. Rank 0 notices it, all ranks report, and rank 0 says which of them is late.

        passed: Seconds since the last call.
        """
        now = time.monotonic()
        if self._moved[0] != HERE.moves:
            self._moved = HERE.moves, now
        states = {**self._wire.heard[1], self.rank: self._state()}
        if self.rank == 0 and not self._wire.hangs:
            marks = [(state["phase"], state["part"], state["step"], state["moves"]) for state in states.values()]
            still = self._stillness.look((self._phase, self._part), marks, passed)
            self._wire.hangs = still is not None
        elif self._wire.hangs and not self._report:
            begun = hangs.report(self.folder, self.rank, self._evidence)
            self._report, self._reported = {"begun": begun, "still": now - self._moved[1]}, now
            self._wire.beat()
        elif self.rank == 0 and (
            all("begun" in state for state in states.values()) or now > self._reported + _REPORT_SECONDS
        ):
            late, why = hangs.late(states)
            self._end(
                f"no rank has moved for {now - self._moved[1]:.0f} s, and all live: {_who(late, states[late])}, is "
                f"late: {why}; the stacks of all ranks are in {self.folder / hangs.FOLDER}"
            )

    def _interrupt(self, number, frame) -> None:
        if number == signal.SIGTERM and self._left and (not self._late or self._must_leave):
            raise StopRequested

    def _hear(self, number: signal.Signals) -> None:
        # torchrun sends SIGTERM to the other ranks when one dies: then the reason is that rank, not the signal.
        lost = self._lost()
        if lost is not None:
            self._end(lost)
        now = time.monotonic()
        if number != signal.SIGTERM or self._phase == hangs.START[0]:
            code = STOPPED if number == signal.SIGTERM else EXIT_CODE
            self._end(f"{self._here} was ended by {number.name}; {self._standing}", code)
        if self._asked is None:
            self._asked, self._wire.asked = now, True
            self._wire.beat()
            needed = max(0.0, self._due - now) + self.save_seconds
            if needed > self.grace:
                self._end(
                    f"{self._here} was asked to stop ({number.name}), but finishing the step and saving would take "
                    f"about {needed:.1f} s, more than checkpoint.grace_seconds = {self.grace:g}; {self._standing}",
                    STOPPED,
                )
        elif self._nudging:
            self._nudging = False
        elif now > self._asked + _SAME_REQUEST:
            self._end(f"{self._here} was asked to stop a second time ({number.name}); {self._standing}", STOPPED)

    @property
    def _here(self) -> str:
        return f"rank {self.rank}, {_doing(self._state())},"

    @property
    def _standing(self) -> str:
        checkpoints.settle(self.folder / checkpoints.FOLDER, self.ranks, _PUBLISHING_SECONDS)
        saved = max((step for step, _ in checkpoints.complete(self.folder / checkpoints.FOLDER)), default=0)
        if not saved:
            return "there is no checkpoint yet" + (", so all steps are lost" if self._step else "")
        if self._step <= saved:
            return f"the last checkpoint is after step {saved}"
        return f"the last checkpoint is after step {saved}, steps {saved + 1} to {self._step} will be repeated"

    def _lost(self) -> str | None:
        """Return a sentence about the first peer that is gone; "" if a peer failed and has had time to report why; None
        if all is well."""
        if os.getppid() != self._parent:
            return f"torchrun (pid {self._parent}), which started rank {self.rank}, died"
        if self._wire.asked and not self.asked and self._phase != hangs.START[0]:
            os.kill(os.getpid(), signal.SIGTERM)  # the main thread and the watching thread both receive it
        answer, states = self._wire.heard
        dead = {rank for rank, state in states.items() if _died(state)}
        if dead:
            self._wire.exchange()  # its last message may say that it failed, or why the run ends
            answer, states = self._wire.heard
        if self._wire.why:
            return self._wire.why
        for rank, state in states.items():
            if state["phase"] in _OVER:
                self._seen.pop(rank, None)
                continue
            if state["phase"] == "failed":
                # The failed rank is about to report its error. If this rank ended first, torchrun would kill the failed
                # rank before it reports.
                since = self._failed_since.setdefault(rank, time.monotonic())
                if rank in dead or time.monotonic() - since > self.timeout:
                    return ""
                continue
            if rank in dead:
                return f"{_who(rank, state)}, died"
            beats, since = self._seen.get(rank, (-1, 0.0))
            if beats != state["beats"]:
                self._seen[rank] = state["beats"], answer
            elif answer - since > self.timeout:
                if state["host"] == socket.gethostname():  # a stopped or hung process would outlive the run
                    with suppress(ProcessLookupError):
                        os.kill(state["pid"], signal.SIGKILL)
                # When a node is gone, ranks that wait for it may fall silent before its own ranks do. So name all
                # silent ranks.
                others = [r for r, (_, s) in sorted(self._seen.items()) if r != rank and answer - s > self.timeout / 2]
                too = "".join(f", nor lately rank {other} on {states[other]['host']}" for other in others)
                return f"{_who(rank, state)}, gave no sign of life for {self.timeout:g} s{too}"
        return self._store_lost(answer, states)

    def _store_lost(self, answer: float, states: dict[int, dict[str, Any]]) -> str | None:
        """Return a sentence if the store, which lives in the torchrun of rank 0's node, is gone or silent; else
        None."""
        now = time.monotonic()
        # Count only the time in which this process ran: a process that was suspended could not have received answers.
        self._unanswered = 0.0 if answer != self._answer else self._unanswered + min(now - self._looked, 2 * _INTERVAL)
        self._answer, self._looked = answer, now
        first = states.get(0, {"phase": self._phase})
        if self._unanswered < (2 * _INTERVAL if self._wire.broken else self.timeout) or first["phase"] in (
            *_OVER,
            "failed",
        ):
            return None
        store = f"torchrun's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        beside = f", beside {_who(0, first)}," if "pid" in first else ""
        return f"{store}{beside} " + ("is gone" if self._wire.broken else f"gave no answer for {self.timeout:g} s")

    def _end(self, why: str, code: int = EXIT_CODE) -> None:
        with self._said:  # never released: the process ends here
            if code == STOPPED:
                self._phase = "stopped"
            else:
                self._wire.why = self._wire.why or why
            self._wire.exchange()
            if code == EXIT_CODE:
                why = self._wire.why  # another rank may have been the first to give a reason
            if why:
                checkpoints.settle(self.folder / checkpoints.FOLDER, self.ranks, _PUBLISHING_SECONDS)
                tell(f"moe_rl: {why}; the run stops: {checkpoints.to_go_on(self.folder / checkpoints.FOLDER)}", code)
            if self._several_nodes:
                # torchrun ends with this rank and takes the store with it: give all nodes time to read the reason
                time.sleep(2 * _INTERVAL)
            # Child processes die with this one: the kernel signals them (PR_SET_PDEATHSIG), and their sockets close.
            os._exit(code)


def _doing(state: dict[str, Any]) -> str:
    phase, part, microbatch, layer = state["phase"], state["part"], state["microbatch"], state["layer"]
    of = f"in phase {phase}" + ("" if part in ("", phase) else f" ({part})") + f" of step {state['step']}"
    of += "" if microbatch is None else f", microbatch {microbatch}"
    return of + ("" if layer is None else f", layer {layer}")


def _who(rank: int, state: dict[str, Any]) -> str:
    return f"rank {rank} (pid {state['pid']} on {state['host']}), {_doing(state)}"


def _died(state: dict[str, Any]) -> bool:
    """Return whether the state belongs to a process of this host that is gone without a final report."""
    if state["phase"] in _OVER or state["host"] != socket.gethostname():
        return False
    try:
        return Path(f"/proc/{state['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
