"""Prove that replay is exact in each layout and schedule, on this machine's real parts.

    python tools/replay_matrix.py [--ranks N] [--json FILE] [--write docs/replay.md]
    python tools/replay_matrix.py --ranks 4 parallel.tensor=2 parallel.expert=4 train.recompute=moe

A small random model takes forced random routes on 1, 2 and 4 ranks. Its gradients are held against an independent
single-process `transformers` model that takes the same routes; every routing map and every count of rows that arrive at
an expert against the routes; then once more with replay off, where all of that must fail. Exit status: 1 when a row is
not exact, 2 with one message when the proof could not be run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from moe_rl.errors import MoeRLError
from moe_rl.proof.batch import make_checkpoint
from moe_rl.proof.cases import LAYOUTS, RECORDED, parse
from moe_rl.proof.matrix import Proof, prove
from moe_rl.proof.table import as_dict, markdown, write_into


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[5:]), allow_abbrev=False
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="prove this one layout instead, of parallel.* and train.*"
    )
    parser.add_argument(
        "--ranks", type=int, action="append", metavar="N", help="only cases of this world size; may be repeated"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    arguments = parser.parse_args(argv)
    if arguments.overrides and len(arguments.ranks or ()) != 1:
        parser.error("a layout of your own needs --ranks N")
    cases = [case for case in LAYOUTS + RECORDED if not arguments.ranks or case.ranks in arguments.ranks]
    if not cases and not arguments.overrides:
        parser.error(f"no case has {arguments.ranks} ranks: choose from {sorted({c.ranks for c in LAYOUTS})}")
    try:
        if arguments.overrides:
            cases = [parse(arguments.overrides, arguments.ranks[0])]
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "work"
            work.mkdir()
            rows = prove(Proof(make_checkpoint(Path(folder) / "model"), work), cases)
        print(table := markdown(rows), end="")
        if arguments.write:
            write_into(arguments.write, table)
        if arguments.json:
            arguments.json.write_text(json.dumps([as_dict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    except (MoeRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    exact = sum(row.exact for row in rows)
    print(f"exact in {exact} of {len(rows)} cases")
    return 0 if exact == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
