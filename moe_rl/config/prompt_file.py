"""How many prompts a file has."""

from __future__ import annotations

from pathlib import Path


def count_prompts(path: Path) -> int | None:
    """Lines of a JSONL file that are not blank; None when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return sum(1 for line in stream if line.strip())
    except OSError:
        return None
