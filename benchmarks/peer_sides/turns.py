"""Lets two sides of a comparison work in turns: a process does its work once for each line that it reads, and prints
the seconds that it took.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Self

_MARK = "took seconds:"


def asked() -> Iterator[None]:
    """Yield once for each piece of work that the other end asks for, until it closes the pipe."""
    for _ in sys.stdin:
        yield


def answer(seconds: float) -> None:
    """Tell the other end what the work took."""
    print(_MARK, seconds, flush=True)


class Side:
    """Holds the processes of one side. The first of them is asked and answers."""

    def __init__(self, command: list[str], environments: list[dict[str, str]]):
        first, *others = [{**os.environ, **environment} for environment in environments]
        self.first = subprocess.Popen(
            [sys.executable, *command], env=first, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.others = [
            subprocess.Popen([sys.executable, *command], env=other, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            for other in others
        ]

    def work(self) -> float:
        """Ask for one piece of work, and return its seconds."""
        self.first.stdin.write("\n")
        self.first.stdin.flush()
        for line in self.first.stdout:
            if line.startswith(_MARK):
                return float(line.removeprefix(_MARK))
        raise SystemExit(f"{' '.join(self.first.args)} ended with {self.first.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.first.stdin.close()
        for process in (self.first, *self.others):
            if error:
                process.terminate()
            process.wait()
