"""Notices that all ranks live and none gets on, and finds out which of them the others wait for.

A flapping link or a collective that one rank never begins leaves every rank waiting, while its threads go on giving
signs of life. Rank 0 hears what each rank is at. When none has moved for too long, each rank writes a report with the
stacks of its threads and torch's record of its last collectives, and tells how many collectives of each group it has
begun. The rank that has begun fewer than the others of its group is late.

`tell` says why a rank ends: on its standard error, and in the file that torchrun gives to each rank. torchrun prints
that file in its table of failures, and `moe-rl train --ranks` reads the exit status there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "TORCHELASTIC_ERROR_FILE"


def tell(text: str, status: int, *, aloud: bool = True) -> None:
    """Write why this rank ends with this exit status. aloud: also print it.

    Ignores failures to write: stderr may be a file on a full disk.
    """
    if aloud:
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")  # in one piece: other ranks write there too
            sys.stderr.flush()
    if file := os.environ.get(FILE):
        # The form that torch's ProcessFailure reads.
        message = {"message": text, "errorCode": status, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def statuses(folder: Path) -> list[int]:
    """Return the exit statuses in the error files of a log folder of torch's launcher, in rank order."""
    files = sorted(folder.glob("*/attempt_0/*/error.json"), key=lambda file: int(file.parent.name))
    return [json.loads(file.read_text(encoding="utf-8"))["message"]["errorCode"] for file in files]


FOLDER = "hang"
# Phases in which rank 0 waits for samplers, verifiers or trackers, which have limits of their own.
_WAITS = frozenset({"rollout", "wait for rollout", "evaluate", "report", "finished", "stopped", "failed"})
_TIMES_SLOWEST = 3.0
# The first time, nothing says how long a part may take.
_TIMES_FIRST = 6.0
# NCCL's record may wait for a lock that the hang holds. The run must end without it then.
_EVIDENCE_SECONDS = 5.0

Place = tuple[str, str]
"""A phase and its part."""

START: Place = ("start", "")
"""The start, until rank 0 has started the sampler and the verifiers."""

Evidence = Callable[[], tuple[dict[str, int], bytes]]
"""Returns how many collectives of each process group this rank has begun, and torch's record of the last ones."""


def _waits(place: Place) -> bool:
    return place == START or place[0] in _WAITS


class Stillness:
    """Measures how long no rank has moved.

    Args:
        seconds: how long none may move, at least. More is allowed where ranks have been still for longer before: three
            times the longest time so far in the same part of a step, and six times `seconds` in a part that is new.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._slowest: dict[Place, float] = {}
        self._place, self._marks, self._still = START, object(), 0.0

    def look(self, place: Place, marks: object, passed: float) -> float | None:
        """Return for how many seconds no rank has moved, if that is too long.

        Args:
            place: where rank 0 is.
            marks: changes when any rank moves.
            passed: seconds since the last call in which this process ran.
        """
        self._still += passed
        if marks != self._marks or _waits(place):
            if not _waits(self._place):
                self._slowest[self._place] = max(self._slowest.get(self._place, 0.0), self._still)
            self._place, self._marks, self._still = place, marks, 0.0
        slowest = self._slowest.get(place)
        most = self._seconds * _TIMES_FIRST if slowest is None else max(self._seconds, _TIMES_SLOWEST * slowest)
        return self._still if self._still > most else None


def report(folder: Path, rank: int, evidence: Evidence) -> dict[str, int]:
    """Write what this rank is at, below the run folder. Returns how many collectives of each group it has begun."""
    collected: list[tuple[dict[str, int], bytes]] = []

    def collect() -> None:
        with suppress(Exception):  # a group may be broken
            collected.append(evidence())

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(_EVIDENCE_SECONDS)
    begun, record = collected[0] if collected else ({}, b"")
    path = folder / FOLDER / f"rank{rank:05d}"
    with suppress(OSError):  # the ranks end anyway, and their message says more than this error
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".stacks").write_text(_stacks(), encoding="utf-8")
        path.with_suffix(".collectives.json").write_bytes(record)
    return begun


def _stacks() -> str:
    """Return the stacks of all threads, that of the main thread first.

    `faulthandler` shows the 100 newest threads at most. No source is read: it may be on the disk that hangs.
    """
    names, main = {thread.ident: thread.name for thread in threading.enumerate()}, threading.main_thread().ident
    text = ""
    for thread, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        text += f"Thread {names.get(thread, thread)} (most recent call first):\n"
        for caller, line in traceback.walk_stack(frame):
            text += f'  File "{caller.f_code.co_filename}", line {line} in {caller.f_code.co_name}\n'
        text += "\n"
    return text


def late(states: Mapping[int, Mapping[str, Any]]) -> tuple[int, str]:
    """Return the rank that the others wait for, and why it is taken for that rank.

    Among ranks that have begun fewer collectives than others of their group, it is the one that stopped first.

    Args:
        states: what each rank has told: `begun`, see `report`, and `still`, the seconds since it last moved.
    """
    behind: dict[int, str] = {}
    for group in sorted({group for state in states.values() for group in state.get("begun", {})}):
        begun = {rank: state["begun"][group] for rank, state in states.items() if group in state.get("begun", {})}
        most = max(begun.values())
        for rank, count in begun.items():
            if count < most:
                behind.setdefault(rank, f"it has begun {count} collectives where others of its group have begun {most}")
    rank = max(behind or states, key=lambda rank: states[rank].get("still", 0.0))
    return rank, behind.get(rank, "it stopped first; all have begun the same number of collectives")
