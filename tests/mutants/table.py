"""Writes docs/generated/mutants.md from the list of faults and their recorded results. `make generated` calls it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.mutants.faults import MUTANTS, Mutant

RESULTS = Path(__file__).with_name("results.json")
HEAD = """\
<!-- `make generated` writes this page from tests/mutants/faults.py and results.json. Change them there. -->

# Faults in the code, and the tests that see them

This page lists {count} faults of the kind that a tired engineer writes: one line changed each, in {rooms} rooms of
`moe_rl`. `make mutants` plants one after the other in a copy of the checkout and runs the tests that `make test` runs
for that room, until one fails. That test is named here, without its folder `tests/`. In the end the command runs these
tests without a fault: one that fails then counts for nothing.
"""
_ROOMS = "The files directly in `moe_rl`"


def fingerprint(mutant: Mutant) -> str:
    """Return a digest of the fault: a result is of this text and no other."""
    return hashlib.sha256(f"{mutant.file}\0{mutant.old}\0{mutant.new}".encode()).hexdigest()[:16]


def read_results() -> dict[str, dict[str, Any]]:
    """The recorded results by the names of the mutants: fault, killer, seconds."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def page() -> str:
    """The page as markdown."""
    results, rooms = read_results(), list(dict.fromkeys(mutant.room for mutant in MUTANTS))
    lines = [HEAD.format(count=len(MUTANTS), rooms=len(rooms))]
    for room in rooms:
        of_room = [mutant for mutant in MUTANTS if mutant.room == room]
        lines.append(f"\n## {f'`moe_rl/{room}`' if room != 'top' else _ROOMS}\n\n")
        lines.append("| fault | file | what it breaks | noticed by |\n|---|---|---|---|\n")
        lines += [_row(mutant, results[mutant.name]) for mutant in of_room]
    return "".join(lines)


def _row(mutant: Mutant, result: dict[str, Any]) -> str:
    file = mutant.file.rsplit("/", 1)[-1]
    killer = result["killer"].removeprefix("tests/").partition("[")[0]
    cells = (mutant.name, f"`{file}`", mutant.breaks, f"`{killer}`")
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


if __name__ == "__main__":
    print(page(), end="")
