"""Sends a run to one tracker, from its own process: `python -m moe_rl.report.tracker_worker ...`.

The process follows metrics.jsonl and samples.jsonl of the run folder. It ends when its standard input is closed, after
sending the remaining lines. A line on standard input means that the run is finished and that its report must be sent
too. A call that exceeds the time limit ends the process, as does any error. `trackers.py` starts it
again.

Exit status: 0 done; 1 a call took too long; 2 an error, which is in the tracker's state.
"""

from __future__ import annotations

import faulthandler
import fcntl
import itertools
import json
import math
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moe_rl.report import lines, sample_lines, summary
from moe_rl.report.run_config import read_config
from moe_rl.report.sample_lines import SampleLine
from moe_rl.report.tracker_libraries import OPEN, TrackedRun, Tracker
from moe_rl.report.tracker_state import FOLDER, TrackerState, read_state, write_state

TOO_LONG, FAILED = 1, 2
_LOOK_SECONDS = 0.5
_ERROR_CHARACTERS = 500


class _Tail:
    """Reads the complete lines added to a file since the last read."""

    def __init__(self, path: Path, begin: int):
        self._path, self._skip, self._offset = path, begin, 0

    def lines(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            *found, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        found, self._skip = found[self._skip :], max(0, self._skip - len(found))
        return found


class _Worker:
    """Follows one run for one tracker."""

    def __init__(self, run_dir: Path, name: str, seconds: float, state: TrackerState):
        self._run, self._name, self._seconds, self._state = run_dir, name, seconds, state
        self._ended = self._finished = False

    def follow(self, metrics: int, samples: int) -> None:
        """Send the run until it has ended. metrics, samples: number of lines in the files at the start."""
        state = self._state
        back = metrics < state.metrics or samples < state.samples
        state.metrics, state.samples = min(state.metrics, metrics), min(state.samples, samples)
        path = self._run / lines.FILE
        known = path.read_bytes().splitlines()[:metrics] if path.exists() else []
        again = 1 + (json.loads(known[-1])["step"] if known else -1)
        config = read_config(self._run)
        facts = TrackedRun(self._run, self._run / FOLDER, config, state.id, again if back else None)
        with self._limited():
            tracker: Tracker = OPEN[self._name](facts)  # type: ignore[index]
        state.id, state.place, state.reported = tracker.id, tracker.place, False
        self._save()
        self._send(tracker, _Tail(path, state.metrics), _Tail(self._run / sample_lines.FILE, state.samples))

    def _send(self, tracker: Tracker, metrics: _Tail, samples: _Tail) -> None:
        while True:
            last = self._ended
            rows = [json.loads(line) for line in metrics.lines()]
            for row in rows:
                found = {key: math.nan if value is None else value for key, value in lines.values(row).items()}
                with self._limited():
                    tracker.metrics(row["step"], found)
                self._state.metrics += 1
            kept = [msgspec.json.decode(line, type=SampleLine) for line in samples.lines()]
            for step, group in itertools.groupby(kept, key=lambda line: line.step):
                of_step = list(group)
                with self._limited():
                    tracker.samples(step, of_step)
                self._state.samples += len(of_step)
            if rows or kept:
                self._save()
            if last:
                break
            self._wait()
        if self._finished:
            tracker.report(json.loads((self._run / summary.FILE).read_text(encoding="utf-8")))
        tracker.close(finished=self._finished)
        self._state.reported = self._finished
        self._save()

    def _wait(self) -> None:
        """Wait until the next poll or a signal from the run. One time limit covers the whole end."""
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
        if readable:
            said = os.read(sys.stdin.fileno(), 4096)
            self._finished = self._finished or bool(said)
            if not said:
                self._ended = True
                faulthandler.dump_traceback_later(self._seconds, exit=True)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """End the process if a call takes too long, even one that never releases the interpreter."""
        if self._ended:
            yield
            return
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _save(self) -> None:
        write_state(self._run, self._name, self._state)


def main(arguments: list[str]) -> int:
    """Send a run. arguments: run folder, tracker, time limit in seconds, lines of metrics.jsonl and samples.jsonl."""
    run_dir, name, seconds, metrics, samples = arguments
    folder = Path(run_dir)
    with (folder / FOLDER / f"{name}.lock").open("w") as lock:
        faulthandler.dump_traceback_later(float(seconds), exit=True)
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier process of this run may still be sending its last lines
        faulthandler.cancel_dump_traceback_later()
        state = read_state(folder, name)
        try:
            _Worker(folder, name, float(seconds), state).follow(int(metrics), int(samples))
        except BaseException as error:  # a library may also call sys.exit
            traceback.print_exc()
            state.failures += 1
            state.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            write_state(folder, name, state)
            return FAILED
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a library's exit handlers could wait for its server forever
