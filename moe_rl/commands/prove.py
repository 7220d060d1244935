"""`moe-rl prove`: run the cases of the proof, and make a table of what they showed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.errors import ConfigError, DataError, MoeRLError, describe
from moe_rl.proof.cases import LAYOUTS, RECORDED, Case, parse

if TYPE_CHECKING:
    from moe_rl.proof.matrix import Proved

BEGIN, END = "<!-- replay matrix: begin -->", "<!-- replay matrix: end -->"
_HEADER = (
    "| ranks | layout | replay | largest gradient difference | with replay off | dispatches, wrong | routes taken |",
    "|---|---|---|---|---|---|---|",
)


_EPILOG = """
    --ranks 4 parallel.tensor=2 parallel.expert=4 train.recompute=moe     proves one layout of your own

A small random model takes forced random routes on 1, 2 and 4 ranks. Its gradients are held against an independent
single-process `transformers` model that takes the same routes; every routing map and every count of rows that arrive at
an expert against the routes; then once more with replay off, where all of that must fail. Exit status: 1 when a row is
not exact, 2 with one message when the proof could not be run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the proof, its description and what its exit status means."""
    parser.description = "Prove that replay is exact in each layout and schedule, on this machine's real parts."
    parser.epilog, parser.formatter_class, parser.allow_abbrev = _EPILOG, argparse.RawDescriptionHelpFormatter, False
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="prove this one layout instead, of parallel.* and train.*"
    )
    parser.add_argument(
        "--ranks", type=int, action="append", metavar="N", help="only cases of this world size; may be repeated"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")


def run(options: argparse.Namespace) -> int:
    """Run the cases and print the table. Returns the exit status."""
    # Imported here: the command line asks every verb for its arguments, and only some of them need torch.
    from moe_rl.proof.batch import make_checkpoint
    from moe_rl.proof.matrix import Proof, prove

    try:
        cases = _cases(options.overrides, options.ranks or [])
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "work"
            work.mkdir()
            rows = prove(Proof(make_checkpoint(Path(folder) / "model"), work), cases)
        print(table := _markdown(rows), end="")
        if options.write:
            _write_into(options.write, table)
        if options.json:
            options.json.write_text(json.dumps([_as_dict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    except (MoeRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    exact = sum(row.exact for row in rows)
    print(f"exact in {exact} of {len(rows)} cases")
    return 0 if exact == len(rows) else 1


def _cases(overrides: list[str], ranks: list[int]) -> list[Case]:
    """What is to be proven. Raises ConfigError when that is nothing."""
    if overrides:
        if len(ranks) != 1:
            raise ConfigError(
                describe(
                    "a layout of your own has one world size",
                    where={"option": "--ranks"},
                    got=ranks,
                    do="add --ranks N",
                )
            )
        return [parse(overrides, ranks[0])]
    cases = [case for case in LAYOUTS + RECORDED if not ranks or case.ranks in ranks]
    if not cases:
        raise ConfigError(
            describe(
                "no case has so many ranks",
                where={"option": "--ranks"},
                got=ranks,
                expected=f"of {sorted({c.ranks for c in LAYOUTS})}",
            )
        )
    return cases


def _as_dict(row: Proved) -> dict[str, object]:
    """Every number of a row, for JSON."""
    control = None if row.control is None else dataclasses.asdict(row.control)
    return {"name": row.outcome.case.name, "exact": row.exact, **dataclasses.asdict(row.outcome), "control": control}


def _markdown(rows: list[Proved]) -> str:
    """The table, one row a case."""
    return "\n".join((*_HEADER, *map(_row, rows))) + "\n"


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
    """Put the table between the two markers of a page. Raises DataError when it has none."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise DataError(
            describe("the page has no place for the table", where={"file": path}, expected=f"{BEGIN} and {END}")
        )
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{table}{END}{rest.split(END, 1)[1]}", encoding="utf-8")
