"""What a proof showed, as rows for people and for the docs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moe_rl.errors import DataError, describe
from moe_rl.proof.matrix import Proved

BEGIN, END = "<!-- replay matrix: begin -->", "<!-- replay matrix: end -->"
_HEADER = (
    "| ranks | layout | replay | largest gradient difference | with replay off | dispatches, wrong | routes taken |",
    "|---|---|---|---|---|---|---|",
)


def as_dict(row: Proved) -> dict[str, object]:
    """Every number of a row, for JSON."""
    control = None if row.control is None else dataclasses.asdict(row.control)
    return {"name": row.outcome.case.name, "exact": row.exact, **dataclasses.asdict(row.outcome), "control": control}


def markdown(rows: list[Proved]) -> str:
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


def write_into(path: Path, table: str) -> None:
    """Put the table between the two markers of a page. Raises DataError when it has none."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise DataError(describe("the page has no place for the table", where=str(path), expected=f"{BEGIN} and {END}"))
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{table}{END}{rest.split(END, 1)[1]}", encoding="utf-8")
