"""What a checkpoint takes from the run, written whole or behind it, and what a resume takes:
`python benchmarks/checkpoint.py [--model large] [--ranks 2] [--pairs 10] [--json FILE]`.

Expert-parallel ranks on this machine, a random Qwen3-MoE in float32 with Adam's moments. Checkpoints are written in
turns with checkpoint.asynchronous off and on; behind the run, updates go on until it is published. Prints the medians
over the rounds and the ratios with their quartiles: of the seconds that steps lose to a checkpoint (its beginning and
its publication), and of an update beside a writer to one alone. Times are of the slowest rank. Memory is the most that
was resident meanwhile, of all ranks together, with what the allocator kept from before.

Then two new policies are put back to the last checkpoint, one in the same layout and one in pipeline stages. Each saves
it again, and what it saved is compared with what it read: in the same layout the bytes of the files, in the other the
bits of every tensor.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import time
from itertools import batched
from pathlib import Path

from updates import ReplayedUpdates, arguments, described, measured, ratio, timed


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], model="mid", tokens=256)
    parser.add_argument("--pairs", type=int, default=10, help="rounds of both")
    measured(__file__, parser, run_rank, summary)
    return 0


def summary(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Medians and quartiles of what the first rank saw."""
    rounds, result = seen["rounds"], described(options, seen)
    column = {name: [row[name] for row in rounds] for name in rounds[0]}
    lost = [a + b for a, b in zip(column["begin"], column["publish"], strict=True)]
    result |= {"bytes of a checkpoint": seen["bytes"]}
    result |= {name: statistics.median(values) for name, values in column.items()}
    result |= ratio(lost, column["whole"], "lost to it, behind : whole")
    result |= ratio(column["update beside a writer"], column["update alone"], "update, beside a writer : alone")
    return result | seen["resumed"]


def run_rank(options: argparse.Namespace, bench: ReplayedUpdates) -> dict:
    import torch.distributed as dist

    from moe_rl import checkpoint_folder as checkpoints
    from moe_rl.megatron.saving import Checkpoints

    folder = options.rank_of / "saved"

    def saving(asynchronous):
        return Checkpoints(folder, bench.parallel, keep=1, asynchronous=asynchronous)

    def update():
        bench.update([])

    def update_alone(row, number):
        row["update alone"] = timed(update)[0]

    def written_whole(row, number):
        whole = saving(False)
        row["whole"] = timed(lambda: whole.save(number, bench.policy, {}))[0]

    def written_behind(row, number):
        behind, published, began = saving(True), [], time.perf_counter()
        row["begin"] = timed(lambda: behind.save(number, bench.policy, {}))[0]
        while not published or not published[-1]:
            seconds, _ = timed(update)
            row.setdefault("update beside a writer", seconds)
            row["publish"] = timed(lambda: published.append(behind.poll()))[0]
        row["until it is published"] = time.perf_counter() - began

    ways = {"update": update_alone, "whole": written_whole, "behind": written_behind}
    rounds, numbers = [], iter(range(1, 1_000_000))
    for number in range(options.pairs + 1):
        row, turn = {}, number % len(ways)
        for way in [*ways][turn:] + [*ways][:turn]:
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark is reset
            ways[way](row, next(numbers))
            row[f"memory, {way}"] = _most_resident()
        if number:  # the first warms up
            rounds.append(row)
    done, last = checkpoints.complete(folder)[-1]
    size = sum(file.stat().st_size for file in last.iterdir())
    dist.barrier()
    resumed = _resumed(bench, done, last)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"rounds": rounds, "bytes": size, "resumed": resumed}


def _resumed(bench: ReplayedUpdates, done: int, last: Path) -> dict[str, object]:
    """Seconds that new policies take to be put back, and whether they then hold the same bits."""
    import torch.distributed as dist

    from moe_rl.config.training import ParallelConfig
    from moe_rl.megatron import checkpoint, world
    from moe_rl.megatron.saving import Checkpoints

    result = {}
    for name, parallel in (("same", bench.parallel), ("another", ParallelConfig(pipeline=bench.options.ranks))):
        bench.policy.release()
        bench.policy = None
        world.lay_out(parallel, seed=2)
        policy = bench.policy = bench.new_policy(parallel)

        def load(policy=policy, parallel=parallel):
            checkpoint.load(last, policy, parallel=parallel, seed=1)

        result[f"resume in {name} layout"], _ = timed(load)
        again = Checkpoints(last.parent / name, parallel, keep=1, asynchronous=False)
        again.save(done, policy, {})
        if dist.get_rank() == 0:
            saved = again.folder / last.name
            equal = _same_bytes(last, saved) if name == "same" else _same_tensors(last, saved)
            result[f"{name} layout: the same bits"] = equal
        dist.barrier()
    return result


def _same_bytes(one: Path, other: Path) -> bool:
    """Digests of all files but Megatron's metadata, which name times and places; the checkpoints' own digests."""
    ours, theirs = (
        {
            name: d
            for name, d in json.loads((path / "state.json").read_text())["files"].items()
            if "metadata" not in name
        }
        for path in (one, other)
    )
    return ours == theirs


def _same_tensors(one: Path, other: Path) -> bool:
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def entries(path):
        found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def read(path, names):
        tensors = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        return tensors

    known = entries(one)
    if known.keys() != entries(other).keys():
        return False
    for names in batched(known, 64):
        ours, theirs = read(one, names), read(other, names)
        if not all(torch.equal(ours[name], theirs[name]) for name in names):
            return False
    return True


def _most_resident() -> float:
    """Bytes of host memory of all ranks, the most since the kernel's mark was reset. All ranks call it."""
    from moe_rl.megatron import world

    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return world.all_reduce([1024 * int(kibibytes)])[0]


if __name__ == "__main__":
    sys.exit(main())
