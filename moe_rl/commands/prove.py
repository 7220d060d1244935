"""Implements `moe-rl prove`: runs the cases of the proof, and prints a table of the results."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.disk import write_json
from moe_rl.errors import ConfigError, DataError, MoeRLError
from moe_rl.proof.cases import LAYOUTS, RECORDED, Case, parse

if TYPE_CHECKING:
    from moe_rl.proof.matrix import Proved

BEGIN, END = "<!-- replay matrix: begin -->", "<!-- replay matrix: end -->"
_HEADER = (
    "| ranks | layout | replay | largest gradient difference | with replay off | dispatches, wrong | routes taken |",
    "|---|---|---|---|---|---|---|",
)


_EPILOG = """
    --ranks 4 parallel.tensor=2 parallel.expert=4 train.recompute=moe     proves your own layout

A small random model takes forced random routes on 1, 2 and 4 ranks. Its gradients are compared with those of an
independent single-process `transformers` model that takes the same routes. Every routing map and every count of rows
that arrive at an expert are compared with the routes. A second run with replay off must fail all these checks. Exit
status: 1 when a row is not exact, 2 with one message when the proof could not be run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, the description and the exit status of the proof."""
    parser.description = "Prove on this machine, with real parts, that replay is exact in each layout and schedule."
    parser.epilog, parser.formatter_class, parser.allow_abbrev = _EPILOG, argparse.RawDescriptionHelpFormatter, False
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="prove only this layout, given by parallel.* and train.*"
    )
    parser.add_argument(
        "--ranks", type=int, action="append", metavar="N", help="only cases of this world size; may be repeated"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers in this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to this file")


def run(options: argparse.Namespace) -> int:
    """Run the cases and print the table. Return the exit status."""
    # Imported here because the command line loads the options of every command, and only some commands need torch.
    from moe_rl.proof.batch import make_checkpoint
    from moe_rl.proof.matrix import Proof, prove

    try:
        cases = _cases(options.overrides, options.ranks or [])
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "work"
            work.mkdir()
            rows = prove(Proof(make_checkpoint(Path(folder) / "model"), work), cases)
        table = "\n".join((*_HEADER, *map(_row, rows))) + "\n"
        print(table, end="")
        if options.write:
            _write_into(options.write, table)
        if options.json:
            write_json(options.json, [_as_dict(row) for row in rows])
    except (MoeRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    exact = sum(row.exact for row in rows)
    print(f"exact in {exact} of {len(rows)} cases")
    return 0 if exact == len(rows) else 1


def _cases(overrides: list[str], ranks: list[int]) -> list[Case]:
    """Return the cases to run. Raises ConfigError if there are none."""
    if overrides:
        if len(ranks) != 1:
            raise ConfigError(
                "your own layout has one world size", where={"option": "--ranks"}, got=ranks, do="add --ranks N"
            )
        return [parse(overrides, ranks[0])]
    cases = [case for case in LAYOUTS + RECORDED if not ranks or case.ranks in ranks]
    if not cases:
        expected = f"of {sorted({case.ranks for case in LAYOUTS})}"
        raise ConfigError("no case has this many ranks", where={"option": "--ranks"}, got=ranks, expected=expected)
    return cases


def _as_dict(row: Proved) -> dict[str, object]:
    """Return every number of a row, for JSON."""
    control = None if row.control is None else dataclasses.asdict(row.control)
    return {"name": row.outcome.case.name, "exact": row.exact, **dataclasses.asdict(row.outcome), "control": control}


def _row(row: Proved) -> str:
    o = row.outcome
    off = o.free_gradients if row.control is None else row.control.gradients
    cells = (
        str(o.case.ranks),
        o.case.layout_name,
        o.case.mode.upper(),
        f"{o.gradients:.1e}" + ("" if row.exact else " **not exact**"),
        f"{off:.2f}",
        f"{o.maps}, {o.wrong_maps}" if o.maps else "-",
        f"{o.consumed} of {o.expected}",
    )
    return "| " + " | ".join(cells) + " |"


def _write_into(path: Path, table: str) -> None:
    """Put the table between the two markers of a file. Raises DataError if a marker is missing."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise DataError("the page has no place for the table", where={"file": path}, expected=f"{BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{table}{END}{rest.split(END, 1)[1]}", encoding="utf-8")
