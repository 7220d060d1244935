"""What a checkpoint takes from the run, written whole or behind it:
`python benchmarks/checkpoint.py [--ranks 2] [--pairs 10] [--json FILE]`.

Expert-parallel ranks on this machine, a random Qwen3-MoE in float32 with Adam's moments. Checkpoints are written in
turns with checkpoint.asynchronous off and on; behind the run, updates go on until it is published. Prints the medians
over the rounds and the ratios with their quartiles: of the seconds that steps lose to a checkpoint (its beginning and
its publication), and of an update beside a writer to one alone. Times are of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys

from output import tell
from updates import ReplayedUpdates, arguments, described, on_ranks, ratio, timed


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], model="mid", tokens=256)
    parser.add_argument("--pairs", type=int, default=10, help="rounds of both")
    options, seen = on_ranks(__file__, parser, run_rank)
    tell(summary(options, seen), options.json)
    return 0


def summary(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Medians and quartiles of what the first rank wrote."""
    rounds, result = seen["rounds"], described(options, seen)
    column = {name: [row[name] for row in rounds] for name in rounds[0]}
    lost = [a + b for a, b in zip(column["begin"], column["publish"], strict=True)]
    result |= {"bytes of a checkpoint": seen["bytes"]}
    result |= {f"seconds, {name}": statistics.median(values) for name, values in column.items()}
    result |= ratio(lost, column["whole"], "lost to it, behind : whole")
    result |= ratio(column["update beside a writer"], column["update alone"], "update, beside a writer : alone")
    return result


def run_rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    from moe_rl.config.schema import ParallelConfig
    from moe_rl.data import checkpoints
    from moe_rl.megatron.saving import Checkpoints

    bench = ReplayedUpdates(options)

    def saving(asynchronous):
        return Checkpoints(options.rank_of / "saved", ParallelConfig(expert=options.ranks), keep=1,
                           asynchronous=asynchronous)  # fmt: skip

    def update():
        bench.update([])

    def written_whole(row, number):
        whole = saving(False)
        row["whole"] = timed(lambda: whole.save(number, bench.policy, {}))[0]

    def written_behind(row, number):
        behind, published = saving(True), []
        row["begin"] = timed(lambda: behind.save(number, bench.policy, {}))[0]
        while not published or not published[-1]:
            seconds, _ = timed(update)
            row.setdefault("update beside a writer", seconds)
            row["publish"] = timed(lambda: published.append(behind.poll()))[0]

    rounds = []
    for number in range(options.pairs + 1):
        row, turns = {"update alone": timed(update)[0]}, (written_whole, written_behind)
        for at, write in enumerate(turns if number % 2 else turns[::-1], start=1):
            write(row, 2 * number + at)
        if number:  # the first warms up
            rounds.append(row)
    if dist.get_rank() == 0:
        _, last = checkpoints.complete(options.rank_of / "saved")[-1]
        written = sum(file.stat().st_size for file in last.iterdir())
        seen = {"model": bench.model, "rounds": rounds, "bytes": written}
        (options.rank_of / "seen.json").write_text(json.dumps(seen))
        shutil.rmtree(options.rank_of / "saved")
    bench.stop()


if __name__ == "__main__":
    sys.exit(main())
