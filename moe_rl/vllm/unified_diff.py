"""Unified diffs, as bytes: what a patch file says, and a text with it applied or taken back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moe_rl.errors import PatchError, describe

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Hunk:
    """old_start, new_start: 0-based line numbers. lines: (" " | "-" | "+", bytes of the line)."""

    old_start: int
    new_start: int
    lines: tuple[tuple[str, bytes], ...]


def read_patch(patch: Path, package: str) -> dict[str, list[Hunk]]:
    """Hunks by path in `package`. Text before the first file is the patch's header, and skipped.

    Raises PatchError, with the line, where a hunk does not hold what its counts say.
    """
    files: dict[str, list[Hunk]] = {}
    lines = patch.read_bytes().splitlines(keepends=True)
    prefix = f"+++ b/{package}/"
    current: list[Hunk] | None = None
    at = 0
    while at < len(lines):
        line = lines[at].decode("utf-8")
        at += 1
        if line.startswith(prefix):
            current = files.setdefault(line.removeprefix(prefix).strip(), [])
        elif current is not None and (found := _HUNK.match(line)):
            old_start, old_count, new_start, new_count = (int(number or 1) for number in found.groups())
            body = []
            while old_count or new_count:
                if at == len(lines) or (mark := chr(lines[at][0])) not in " +-":
                    raise PatchError(describe("A patch is damaged", where=f"{patch}, line {at + 1}"))
                body.append((mark, lines[at][1:]))
                old_count -= mark != "+"
                new_count -= mark != "-"
                at += 1
            current.append(Hunk(old_start - 1, new_start - 1, tuple(body)))
    return files


def patched(text: bytes, hunks: list[Hunk], where: str, *, reverse: bool = False) -> bytes:
    """`text` with the hunks applied (or taken back) at exactly their lines; PatchError where it reads otherwise."""
    lines = text.splitlines(keepends=True)
    dropped, added = ("+", "-") if reverse else ("-", "+")
    result: list[bytes] = []
    at = 0
    for hunk in hunks:
        start = hunk.new_start if reverse else hunk.old_start
        result += lines[at:start]
        before = [line for mark, line in hunk.lines if mark != added]
        if lines[start : start + len(before)] != before:
            raise PatchError(describe("A patch does not fit", where=f"{where}, line {start + 1}"))
        result += [line for mark, line in hunk.lines if mark != dropped]
        at = start + len(before)
    return b"".join(result + lines[at:])
