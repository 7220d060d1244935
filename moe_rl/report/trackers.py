"""Starts and watches the processes that send a run to experiment trackers.

A tracker follows the files of the run folder in its own process (`tracker_worker.py`), so a step never waits for a
tracker, and a slow tracker loses nothing. A tracker that fails is restarted after a pause, and continues with the first
line that it has not received. No failure ends the run: it is counted, logged once, and shown in the report.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from moe_rl.config.schema import TrackerName
from moe_rl.errors import MoeRLError
from moe_rl.report import lines, sample_lines
from moe_rl.report.tracker_worker import FAILED, FOLDER, TOO_LONG, TrackerState, complete_lines, read_state, write_state

_LONGEST_PAUSE = 64  # multiple of the time limit


class Trackers:
    """Sends a run to its trackers. Used on one rank; nothing in it raises because of a tracker.

    Args:
        seconds: time limit of a call to a tracker, and of the end of the run for all trackers together.
        note: prints a line into the log of the run.
    """

    def __init__(self, run_dir: Path, names: Sequence[TrackerName], *, seconds: float, note: Callable[[str], None]):
        self._all = [_Followed(Path(run_dir), name, seconds, note) for name in names]
        self._seconds = seconds

    def look(self) -> None:
        """Start the trackers that are not running, and report those that failed. Returns at once.

        A resumed run must call it first after its files are cut and before a new line is written.
        """
        for tracker in self._all:
            tracker.look()

    def finish(self) -> None:
        """Let the trackers send the rest and the report, and wait for them within the time limit."""
        deadline = time.monotonic() + self._seconds
        for tracker in self._all:
            tracker.end(report=True)
        for tracker in self._all:
            tracker.wait(deadline)

    def close(self) -> None:
        """Let the trackers send the rest, without waiting: each ends within its time limit."""
        for tracker in self._all:
            tracker.end(report=False)


class _Followed:
    """Watches the process of one tracker."""

    def __init__(self, run_dir: Path, name: TrackerName, seconds: float, note: Callable[[str], None]):
        self._run, self._name, self._seconds, self._note = run_dir, name, seconds, note
        self._process: subprocess.Popen[bytes] | None = None
        self._told, self._in_a_row, self._not_before = False, 0, 0.0
        self.state = TrackerState()
        self._read()
        self._begun = self.state

    def look(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.returncode)
        if self._process is None and time.monotonic() >= self._not_before:
            self._start()

    def end(self, *, report: bool) -> None:
        """Tell the process that the run has ended. With `report`, restart a process that has failed."""
        if report:
            self._not_before = 0.0
            self.look()
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):  # it may have just failed
                if report:
                    self._process.stdin.write(b"report\n")
                self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        if self._process is None:
            return
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = TOO_LONG
        self._ended(status)

    def _start(self) -> None:
        self._begun = self.state
        log = self._run / FOLDER / f"{self._name}.log"
        counts = [complete_lines(self._run / file) for file in (lines.FILE, sample_lines.FILE)]
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "moe_rl.report.tracker_worker", str(self._run.absolute())]
                    + [self._name, str(self._seconds), *map(str, counts)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            self._failed(f"its process could not be started: {error}")

    def _ended(self, status: int) -> None:
        """Record how the process ended."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._process = None
        self._read()
        if status == FAILED and self.state.failures > self._begun.failures:
            self._failed(self.state.error, counted=True)
        elif status == TOO_LONG:
            self._failed(f"no answer within {self._seconds:g} s")
        elif status:
            self._failed(f"its process ended with status {status}")

    def _failed(self, error: str, *, counted: bool = False) -> None:
        state = self.state
        if not counted:
            state.failures, state.error = state.failures + 1, error
            with suppress(MoeRLError, OSError):
                write_state(self._run, self._name, state)
        more = (state.metrics, state.samples) != (self._begun.metrics, self._begun.samples)
        self._in_a_row = 0 if more else self._in_a_row + 1
        self._not_before = time.monotonic() + self._seconds * min(2**self._in_a_row, _LONGEST_PAUSE)
        if not self._told:
            log = self._run / FOLDER / f"{self._name}.log"
            self._note(f"tracker {self._name} failed, and the run continues without it: {error} (see {log})")
        self._told = True

    def _read(self) -> None:
        with suppress(OSError):
            self.state = read_state(self._run, self._name)
