"""Records which prompts each step consumed, so that a resumed run can prove that each prompt ended exactly once.

A prompt is identified by its cursor, its place in the order of all prompts. It ends when a step trains on it, or when
it is dropped for a reason. Steps of a synchronous run take the prompts in order. An asynchronous run takes them as
their completions arrive, so the cursors of a line may be in any order, and prompts before them may still be sampled.

The file has one JSON line per step. Each line carries an xxh3-64 checksum of its other content. A line is accepted only
if it equals the output of `record` byte for byte. Text after the last newline was torn by a crash and counts as
unwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from moe_rl.config.sampling_keys import PipelineConfig
from moe_rl.disk import sync, write_all, write_whole, writing
from moe_rl.errors import About, DataError, Problem, describe
from moe_rl.tasks.prompts import PromptSource

FILE = "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class StepPrompts:
    """Describes one step, counted from 0.

    Attributes:
        cursors: the cursors of its prompts, in the order of arrival, as runs [first, count].
        prompts: the ids of its prompts.
        dropped: prompts that ended untrained since the last step, as [cursor, reason].
        completions: a digest of its samples.
    """

    step: int
    cursors: list[tuple[int, int]]
    prompts: list[str]
    dropped: list[tuple[int, str]]
    completions: str

    def consumed(self) -> list[int]:
        """Return the cursors of its prompts."""
        return [cursor for first, count in self.cursors for cursor in range(first, first + count)]

    def ended(self) -> list[int]:
        """Return the cursors of all prompts that end with this line."""
        return self.consumed() + [cursor for cursor, _ in self.dropped]

    def ids_in(self, source: PromptSource) -> list[str]:
        """Return a source's prompt ids at these cursors."""
        return [prompt.id for first, count in self.cursors for prompt in source.at(first, count)]

    def line(self) -> bytes:
        body = asdict(self)
        checksum = xxhash.xxh3_64_hexdigest(json.dumps(body).encode("ascii"))
        return json.dumps(body | {"checksum": checksum}).encode("ascii")


def _parse(line: bytes) -> StepPrompts:
    """Parse a line. Raises ValueError if it is not exactly as `record` would have written it."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        record = json.loads(line)
        record.pop("checksum")
        entry = StepPrompts(**record)
        if entry.line() == line and len(entry.prompts) == sum(count for _, count in entry.cursors):
            return entry
    raise ValueError("damaged line: the checksum does not match the content")


class Ended:
    """Holds which prompts have ended: all with a cursor below `floor`, and those in `above`."""

    def __init__(self) -> None:
        self.steps, self.floor, self.above = 0, 0, set[int]()

    def __contains__(self, cursor: int) -> bool:
        return cursor < self.floor or cursor in self.above

    def add(self, entry: StepPrompts, *, in_order: bool) -> tuple[str, object, object] | None:
        """Add a line and return None. For a wrong line add nothing, and return the fault, the line's value and the
        expected value.

        in_order: each line must begin where the last one ended.
        """
        if entry.step != self.steps:
            return "step", entry.step, self.steps
        new = entry.ended()
        if in_order and new != list(range(self.floor, self.floor + len(new))):
            return "cursor", _told(entry.cursors), f"prompts in order from {self.floor}"
        before = self.above.copy()
        for cursor in new:
            if cursor in self:
                self.above = before
                return "cursor", cursor, "a prompt that has not ended before"
            self.above.add(cursor)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1
        self.steps += 1
        return None


class PromptLedger:
    """Appends JSON lines to the file at `path`. One process writes it. A missing file is an empty ledger.

    in_order: the run consumes its prompts in their order, so each line must begin where the last one ended.
    """

    def __init__(self, path: Path | str, *, in_order: bool = True):
        self.path, self.in_order = Path(path), in_order
        self._ended: Ended | None = None  # from the lines; None: not read yet, or a write has failed

    @classmethod
    def of_run(cls, run_dir: Path, pipeline: PipelineConfig) -> PromptLedger:
        """Return the ledger of a run."""
        return cls(run_dir / FILE, in_order=not pipeline.by_group)

    @property
    def torn(self) -> Problem | None:
        """Describes a last line torn by a crash, if there is one; `rewind` drops it."""
        lines, tail = self._read()
        return self._torn(len(lines) + 1, tail) if tail else None

    def record(
        self,
        step: int,
        cursors: Sequence[int],
        prompt_ids: Iterable[str],
        completion_digest: str,
        dropped: Iterable[tuple[int, str]] = (),
    ) -> None:
        """Append one step's prompts, see `append`."""
        self.append(StepPrompts(int(step), _runs(cursors), list(prompt_ids), list(dropped), completion_digest))

    def append(self, entry: StepPrompts) -> None:
        """Append a line. It is durable on return.

        Raises:
            DataError: the step does not follow the last line, or a prompt has already ended.
        """
        ended, self._ended = self._ended or self._all_ended(), None
        if ended.add(entry, in_order=self.in_order) is not None:
            raise DataError(
                "this step does not follow the prompt ledger's last one",
                where={"file": self.path},
                got=f"step {entry.step} with the prompts {_told(entry.cursors)}",
                expected=f"step {ended.steps} with the prompts from {ended.floor}"
                + ("" if self.in_order else " that have not ended"),
                do="rewind the ledger to the checkpoint that the run resumes from",
                fault="order",
            )
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
        self._ended = ended

    def ended(self, steps: int) -> Ended:
        """Return which prompts have ended in the first `steps` lines. Raises as `check` does."""
        if self._ended is not None and self._ended.steps == steps:
            return self._ended
        return self._checked(steps)[2]

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

    def _checked(self, steps: int) -> tuple[list[bytes], bytes, Ended]:
        """Return the result of `_read`, and which prompts have ended in `steps` lines that `check` would accept."""
        lines, tail = self._read()
        if len(lines) < steps:
            raise DataError(
                "the prompt ledger has lost lines",
                where={"file": self.path},
                got=f"{len(lines)} whole lines" + (" and a torn one" if tail else ""),
                expected=f"the {steps} steps before the checkpoint",
                fault="lost",
            )
        ended = Ended()
        for _ in self._entries(lines[:steps], ended):
            pass
        return lines, tail, ended

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
        lines, tail, _ = self._checked(step)
        kept = lines[:step]
        dropped = len(lines) - step + bool(tail)
        if dropped:
            write_whole(self.path, b"".join(line + b"\n" for line in kept), "the prompt ledger")
        self._ended = None
        return dropped

    def verify(self, source: PromptSource, steps: int | None = None, *, whole: bool = True) -> None:
        """Prove that every prompt of the source ended exactly once, from cursor 0 to the last one in a line.

        Prompts still being sampled are in no line, so an asynchronous run can prove this only at its end, when its last
        line has dropped them.

        Args:
            steps: how many lines of steps there must be. None: lines lost at the end go unnoticed.
            whole: refuse prompts that have not ended although later ones have.

        Raises:
            DataError: naming the first wrong line.
        """
        lines, tail = self._read()
        ended = Ended()
        for number, entry in enumerate(self._entries(lines, ended), start=1):
            consumed = zip(entry.consumed(), entry.prompts, entry.ids_in(source), strict=True)
            if wrong := next((prompt for prompt in consumed if prompt[1] != prompt[2]), None):
                cursor, got, expected = wrong
                raise self._wrong(number, "prompt", got, f"{expected}, at cursor {cursor}")
        if whole and ended.above:
            raise self._wrong(len(lines), "end", f"prompt {max(ended.above)} ended", f"prompt {ended.floor} too")
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
            f"wrong {what}", where={"file": self.path, "line": number}, got=got, expected=expected, fault=what
        )

    def _read(self) -> tuple[list[bytes], bytes]:
        """Return the whole lines, and the bytes after the last newline."""
        try:
            *lines, tail = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], b""
        return lines, tail

    def _entries(self, lines: Sequence[bytes], ended: Ended) -> Iterator[StepPrompts]:
        """Return the entries of the lines, each verified and added to `ended`.

        Raises DataError naming the first wrong line.
        """
        for number, line in enumerate(lines, start=1):
            try:
                entry = _parse(line)
            except ValueError as error:
                raise DataError(str(error), where={"file": self.path, "line": number}, fault="damaged") from error
            if (wrong := ended.add(entry, in_order=self.in_order)) is not None:
                raise self._wrong(number, *wrong)
            yield entry

    def _all_ended(self) -> Ended:
        lines, tail = self._read()
        if tail:
            raise DataError(self._torn(len(lines) + 1, tail, "rewind the ledger before it is written again"))
        ended = Ended()
        for _ in self._entries(lines, ended):
            pass
        return ended


def _told(runs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{first} to {first + count - 1}" for first, count in runs)


def _runs(cursors: Sequence[int]) -> list[tuple[int, int]]:
    """Return cursors as runs (first, count), in their order."""
    runs: list[tuple[int, int]] = []
    for cursor in map(int, cursors):
        if runs and sum(runs[-1]) == cursor:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((cursor, 1))
    return runs
