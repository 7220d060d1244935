"""Records which prompts each step consumed, so that a resumed run can prove that each prompt was used once.

The file has one JSON line per step. Each line carries an xxh3-64 checksum of its other content. A line is accepted only
if it equals, byte for byte, what `record` would write. Text after the last newline is the torn end of a crash and
counts as unwritten.
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
    """Describes one step, counted from 0: the cursor before it, the ids of its prompts, and a digest of its samples."""

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
    """Parse a line. Raises ValueError if `record` would not have written it exactly so."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        record = json.loads(line)
        record.pop("checksum")
        entry = StepPrompts(**record)
        if entry.line() == line:
            return entry
    raise ValueError("damaged line: the checksum does not match the content")


class PromptLedger:
    """Appends JSON lines to the file at `path`. One process writes it. A missing file is an empty ledger."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._expected: tuple[int, int] | None = None  # (step, cursor) required of the next record; None: not read yet

    @property
    def torn(self) -> Problem | None:
        """Describes the torn last line that a crash left, if there is one; `rewind` drops it."""
        lines, tail = self._read()
        return self._torn(len(lines) + 1, tail) if tail else None

    def record(self, step: int, cursor_before: int, prompt_ids: Iterable[str], completion_digest: str) -> None:
        """Append one step's prompts. The line is durable on return.

        Raises:
            DataError: the step does not follow the last line.
        """
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
        """Return the line of a step; None if it is missing or damaged."""
        lines, _ = self._read()
        with contextlib.suppress(IndexError, ValueError):
            entry = _parse(lines[step])
            return entry if entry.step == step else None
        return None

    def check(self, steps: int) -> None:
        """Check that the lines of the first `steps` steps are present and whole.

        Raises:
            DataError: naming the line.
        """
        self._checked(steps)

    def _checked(self, steps: int) -> tuple[list[bytes], bytes]:
        """Return what `_read` gives, after `check` has found nothing."""
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
        """Return the xxh3-128 (hex) of the lines of the first `steps` steps, for a checkpoint taken after them."""
        return xxhash.xxh3_128_hexdigest(b"\n".join(self._read()[0][:steps]))

    def rewind(self, step: int) -> int:
        """Keep the steps before `step`, drop the rest including a torn line, and return the number of dropped lines.

        Raises:
            DataError: the steps to keep are not all present and whole.
        """
        if step < 0:
            raise ValueError(describe("a ledger can only be rewound to a step", got=step, expected="0 or more"))
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
        """Return whole lines, and what follows the last newline."""
        try:
            *lines, tail = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], b""
        return lines, tail

    def _entries(self, lines: Sequence[bytes]) -> Iterator[StepPrompts]:
        """Return the entries of the lines, each proved whole and contiguous with the one before.

        Raises DataError, which names the first wrong line.
        """
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
