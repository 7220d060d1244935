"""Run over two hosts, made of namespaces on this machine, and kill a server, a host, and servers that may be lost.

    python tools/two_hosts.py [--steps N] [--work DIR] [--json FILE] [a.b=c ...] [-- arguments of vLLM's server]

Real parts: a vLLM server and two Megatron ranks on each host, expert parallelism 4 unless parallel.* say otherwise.
Exit status: 0 when everything was as it must be, 1 when something was not, 2 with one message when it could not be run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from moe_rl.errors import MoeRLError
from moe_rl.proof.hosts import enter
from moe_rl.proof.two_hosts import KILLS, Cluster, drill


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="of configs/tiny_moe_cpu.yaml")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of each run (default: 3)")
    parser.add_argument("--kill", action="append", choices=KILLS, help="only that; may be repeated")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep runs and logs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen there")
    options = parser.parse_args(argv[:cut])
    try:
        enter([__file__, *argv])
        with tempfile.TemporaryDirectory() as scratch:
            work = (options.work or Path(scratch)).absolute()
            work.mkdir(parents=True, exist_ok=True)
            overrides = ["parallel.expert=4", *options.overrides]
            with Cluster(work, overrides, argv[cut + 1 :]) as cluster:
                result = drill(cluster, steps=options.steps, kills=options.kill or KILLS)
    except (MoeRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["wrong"]:
        print(result.get("output", ""), file=sys.stderr)
    print(f"{len(result['wrong'])} wrong" if result["wrong"] else "all as it must be")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
