"""Kill a training run at random, resume it, and prove that nothing was lost or doubled.

    python tools/soak.py --kills 50 [--seed N] [--minutes M] [--work DIR] [--json FILE]

Real vLLM, real Megatron-core, two ranks. SIGKILL goes to rank 0, rank 1, the engine, torchrun or all of them, in every
phase of a step. Exit status: 1 when a run differs from the one that nobody touched, or left something behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from moe_rl.errors import MoeRLError
from moe_rl.proof.soak import Soak, markdown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of victims, phases and delays")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which nobody is killed any more")
    parser.add_argument("--work", type=Path, help="folder for the runs, kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every kill and what came of it here")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        try:
            soak = Soak(options.work or Path(temporary) / "soak", seed=options.seed)
            soak.run(soak.plan(options.kills), until=until)
        except MoeRLError as error:
            print(error, file=sys.stderr)
            return 2
        result = soak.result()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result), end="")
    for name, value in result.items():
        if name not in ("log", "counts", "problems"):
            print(f"{name}: {value}")
    for problem in result["problems"]:
        print(f"problem: {problem}")
    left = result["temporary folders of ours left"] or result["shared memory left"] or result["processes left"]
    return 1 if result["problems"] or left else 0


if __name__ == "__main__":
    sys.exit(main())
