"""Writes the splits of a generated task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_splits(folder: Path, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Write the rows of each split into `folder/SPLIT.jsonl`, with ids such as train-00000."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        with (folder / f"{split}.jsonl").open("w", encoding="ascii") as file:
            for number, row in enumerate(rows):
                file.write(json.dumps({"id": f"{split}-{number:05d}", **row}) + "\n")
