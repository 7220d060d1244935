"""Who is alive: every rank beats, every rank listens, and the first to miss one says who and in which phase.

Each rank rewrites `ranks/rank<r>.json` in the run folder once a second from a thread of its own. A beat that stops for
too long, or a process of this host that is gone, ends the run: a collective would only wait. Beats are counted and
timed on the listener's own monotonic clock, so clocks that jump or differ do no harm.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_rl.errors import MoeRLError

_INTERVAL = 0.5
EXIT_CODE = 3


class Peers:
    """Context manager that beats and listens from a thread until it is left."""

    def __init__(self, folder: Path, rank: int, ranks: int, *, timeout_seconds: float):
        self.folder, self.rank, self.ranks, self.timeout = folder, rank, ranks, timeout_seconds
        self._phase, self._step, self._beats = "start", 0, 0
        self._done = threading.Event()
        self._said, self._writing = threading.Lock(), threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._failed_since: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def __enter__(self) -> Peers:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._handlers = {s: signal.signal(s, self._asked_to_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._done.set()
        self._thread.join()
        if error is not None and not isinstance(error, MoeRLError):
            # Most likely a collective broke off because a peer is gone: then that is what there is to say.
            # One that failed may still be about to say why.
            while (lost := self._lost()) is None and self._failed_since:
                time.sleep(_INTERVAL / 5)
            if lost is not None:
                self._end(lost)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._phase = "failed" if error is not None else "finished"
        self._beat()

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Say what this rank is doing; it stands in the message if the rank is lost meanwhile."""
        self._phase, self._step = name, step
        with suppress(OSError):
            self._beat()
        yield

    def _beat(self) -> None:
        with self._writing:
            self._write()

    def _write(self) -> None:
        self._beats += 1
        state = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beats": self._beats,
            "phase": self._phase,
            "step": self._step,
        }
        path = self.folder / f"rank{self.rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, path)

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL):
            with suppress(OSError):  # a full disk must not be taken for a dead rank
                self._beat()
            lost = self._lost()
            if lost is not None:
                self._end(lost)

    def _lost(self) -> str | None:
        """A sentence about the first peer that is gone; "" when it failed and has had time to say so; None when all is
        well."""
        for rank in range(self.ranks):
            if rank == self.rank:
                continue
            with suppress(OSError, ValueError):
                state = json.loads((self.folder / f"rank{rank}.json").read_text())
                if state["phase"] == "finished":
                    continue
                who = f"rank {rank} (pid {state['pid']} on {state['host']})"
                where = f"{who}, in phase {state['phase']} of step {state['step']}"
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
                    return f"{where}, gave no sign of life for {self.timeout:g} s"
        return None

    def _asked_to_stop(self, number, frame) -> None:
        # torchrun ends the other ranks with SIGTERM when one dies: then that rank is the reason, not the signal.
        lost = self._lost()
        if lost is None:
            name = signal.Signals(number).name
            lost = f"rank {self.rank} was ended by {name} in phase {self._phase} of step {self._step}"
        self._end(lost)

    def _end(self, why: str) -> None:
        with self._said:  # never released: the process ends here
            if why:
                print(
                    f"moe_rl: {why}; the run stops. Continue it with --resume {self.folder.parent}",
                    file=sys.stderr,
                    flush=True,
                )
            # Children die with this process: the kernel signals them (PR_SET_PDEATHSIG), and their sockets close.
            os._exit(EXIT_CODE)


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
