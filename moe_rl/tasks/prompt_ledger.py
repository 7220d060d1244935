"""Keeps which prompts every step consumed, durable and checkable: a resumed run can prove that each was used once.

One JSON line a step. A line carries an xxh3-64 checksum of the rest of it and is accepted only if it is, byte for byte,
what `record` would have written; what lies after the last newline is the torn end of a crash and counts as unwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from moe_rl.disk import sync, write_all, write_whole, writing
from moe_rl.errors import About, DataError, Problem, describe
from moe_rl.tasks.prompts import PromptSource

FILE = "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class StepPrompts:
    """One step, counted from 0: the cursor before it, the ids of its prompts, the digest of what was sampled."""

    step: int
    cursor: int
    prompts: list[str]
    completions: str

    @property
    def next_cursor(self) -> int:
        return self.cursor + len(self.prompts)

    def line(self) -> bytes:
        body = asdict(self)
        checksum = xxhash.xxh3_64_hexdigest(json.dumps(body).encode("ascii"))
        return json.dumps(body | {"checksum": checksum}).encode("ascii")


def _parse(line: bytes) -> StepPrompts:
    """ValueError if this is not exactly a line of ours."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        record = json.loads(line)
        record.pop("checksum")
        entry = StepPrompts(**record)
        if entry.line() == line:
            return entry
    raise ValueError("damaged line: it does not carry the checksum of its content")


class PromptLedger:
    """Append-only JSONL at `path`, written by one process. A missing file is an empty ledger."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._expected: tuple[int, int] | None = None  # (step, cursor) that the next record must have; None: read it

    @property
    def torn(self) -> Problem | None:
        """Describes the torn last line that a crash left, if there is one; `rewind` drops it."""
        lines, tail = self._read()
        return self._torn(len(lines) + 1, tail) if tail else None

    def record(self, step: int, cursor_before: int, prompt_ids: Iterable[str], completion_digest: str) -> None:
        """Append one step's prompts; durable on return. Raises DataError if it does not follow the last line."""
        entry = StepPrompts(int(step), int(cursor_before), list(prompt_ids), completion_digest)
        expected = self._expected or self._end()
        if (entry.step, entry.cursor) != expected:
            raise DataError(
                describe(
                    "this step does not follow the prompt ledger's last one",
                    where={"file": self.path},
                    got=f"step {entry.step} at cursor {entry.cursor}",
                    expected=f"step {expected[0]} at cursor {expected[1]}",
                    do="rewind the ledger and seek the prompt source to the checkpoint that the run resumes from",
                    fault="order",
                )
            )
        self._expected = None
        new = not self.path.exists()
        data = entry.line() + b"\n"
        with (
            writing("a line of the prompt ledger could not be written", self.path, size=len(data)),
            open(self.path, "ab", buffering=0) as file,
        ):
            write_all(file.fileno(), data)
            os.fsync(file.fileno())
            if new:
                sync(self.path.parent)
        self._expected = (entry.step + 1, entry.next_cursor)

    def find(self, step: int) -> StepPrompts | None:
        """The line of a step; None when it has none, or a damaged one."""
        lines, _ = self._read()
        with contextlib.suppress(IndexError, ValueError):
            entry = _parse(lines[step])
            return entry if entry.step == step else None
        return None

    def check(self, steps: int) -> None:
        """Raises DataError, naming the line, unless the lines of the first so many steps are there and whole."""
        self._checked(steps)

    def _checked(self, steps: int) -> tuple[list[bytes], bytes]:
        """What `_read` gives, once `check` finds nothing."""
        lines, tail = self._read()
        if len(lines) < steps:
            raise DataError(
                describe(
                    "the prompt ledger has lost lines",
                    where={"file": self.path},
                    got=f"{len(lines)} whole lines" + (" and a torn one" if tail else ""),
                    expected=f"the {steps} steps before the checkpoint",
                    fault="lost",
                )
            )
        for _ in self._entries(lines[:steps]):
            pass
        return lines, tail

    def digest(self, steps: int) -> str:
        """xxh3-128, hex, of the lines of the first so many steps: what a checkpoint after them was preceded by."""
        return xxhash.xxh3_128_hexdigest(b"\n".join(self._read()[0][:steps]))

    def rewind(self, step: int) -> int:
        """Keep the steps before `step`, drop the rest, a torn line included; return the number of lines dropped.

        Raises DataError if the steps to keep are not all there and whole.
        """
        if step < 0:
            raise ValueError(describe("a ledger is rewound to a step", got=step, expected="0 or more"))
        lines, tail = self._checked(step)
        kept = lines[:step]
        dropped = len(lines) - step + bool(tail)
        if dropped:
            write_whole(self.path, b"".join(line + b"\n" for line in kept), "the prompt ledger")
        self._expected = None
        return dropped

    def verify(self, source: PromptSource, steps: int | None = None) -> None:
        """Prove that every prompt of the source was consumed exactly once, in order, from cursor 0 to the last line.

        `steps`, if given, is how many lines there must be: without it, lines lost at the end cannot be noticed. Raises
        DataError naming the first line that is wrong. Leaves the source's cursor alone.
        """
        lines, tail = self._read()
        for number, entry in enumerate(self._entries(lines), start=1):
            expected = [prompt.id for prompt in source.peek(entry.cursor, len(entry.prompts))]
            if entry.prompts != expected:
                at = next(i for i, (got, want) in enumerate(zip(entry.prompts, expected, strict=True)) if got != want)
                raise self._wrong(number, "prompt", entry.prompts[at], f"{expected[at]}, at cursor {entry.cursor + at}")
        if tail:
            raise DataError(
                self._torn(len(lines) + 1, tail, "rewind the ledger to the checkpoint that the run resumes from")
            )
        if steps is not None and len(lines) != steps:
            raise self._wrong(min(len(lines), steps) + 1, "number of steps", len(lines), steps)

    def _torn(self, number: int, tail: bytes, do: str = "") -> Problem:
        where: About = {"file": self.path, "line": number}
        return describe("torn line, a crash while writing", where=where, got=f"{len(tail)} bytes", do=do, fault="torn")

    def _wrong(self, number: int, what: str, got: object, expected: object) -> DataError:
        return DataError(
            describe(f"wrong {what}", where={"file": self.path, "line": number}, got=got, expected=expected, fault=what)
        )

    def _read(self) -> tuple[list[bytes], bytes]:
        """Whole lines, and what follows the last newline."""
        try:
            *lines, tail = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], b""
        return lines, tail

    def _entries(self, lines: Sequence[bytes]) -> Iterator[StepPrompts]:
        """The lines' entries, each proved whole and contiguous with the one before; DataError names the first wrong."""
        cursor = 0
        for number, line in enumerate(lines, start=1):
            try:
                entry = _parse(line)
            except ValueError as error:
                raise DataError(
                    describe(str(error), where={"file": self.path, "line": number}, fault="damaged")
                ) from error
            if entry.step != number - 1:
                raise self._wrong(number, "step", entry.step, number - 1)
            if entry.cursor != cursor:
                raise self._wrong(number, "cursor", entry.cursor, cursor)
            cursor = entry.next_cursor
            yield entry

    def _end(self) -> tuple[int, int]:
        lines, tail = self._read()
        if tail:
            raise DataError(self._torn(len(lines) + 1, tail, "rewind the ledger before it is written again"))
        entries = list(self._entries(lines))
        return (entries[-1].step + 1, entries[-1].next_cursor) if entries else (0, 0)
