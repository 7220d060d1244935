"""Measures what a checkpoint costs the run, written synchronously or asynchronously, and what a resume takes:
`python benchmarks/checkpoint.py [--model large] [--ranks 2] [--pairs 10] [--json FILE]`.

It uses expert-parallel ranks on this machine and a random Qwen3-MoE in float32 with Adam's moments. Checkpoints are
written in turns with checkpoint.asynchronous off and on. In the asynchronous case, updates continue until the
checkpoint is published. The benchmark prints medians over the rounds and ratios with their quartiles, for the seconds
that steps lose to a checkpoint (its start and its publication), and for an update during a write compared with one
alone. Times are those of the slowest rank. Memory is the largest resident amount of all ranks together, including what
the allocator kept from before.

Then two new policies are restored from the last checkpoint, one in the same layout and one in pipeline stages. Bytes
read are those of all ranks' read calls, over the size of the checkpoint. Each policy saves it again, and the result is
compared with what was read: in the same layout the bytes of the files, in the other the bits of every tensor.
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
    """Compute medians and quartiles from the results of the first rank."""
    rounds, result = seen["rounds"], described(options, seen)
    column = {name: [row[name] for row in rounds] for name in rounds[0]}
    lost = [a + b for a, b in zip(column["begin"], column["publish"], strict=True)]
    result |= {"size of a checkpoint, bytes": seen["bytes"]}
    result |= {name: statistics.median(values) for name, values in column.items()}
    result |= ratio(lost, column["whole"], "time lost, asynchronous : synchronous")
    result |= ratio(column["update during a write"], column["update alone"], "update, during a write : alone")
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
            row.setdefault("update during a write", seconds)
            row["publish"] = timed(lambda: published.append(behind.poll()))[0]
        row["until it is published"] = time.perf_counter() - began

    ways = {"update": update_alone, "whole": written_whole, "behind": written_behind}
    rounds, numbers = [], iter(range(1, 1_000_000))
    for number in range(options.pairs + 1):
        row, turn = {}, number % len(ways)
        for way in [*ways][turn:] + [*ways][:turn]:
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # reset the kernel's high-water mark
            ways[way](row, next(numbers))
            row[f"memory, {way}"] = _most_resident()
        if number:  # the first round warms up
            rounds.append(row)
    done, last = checkpoints.complete(folder)[-1]
    size = sum(file.stat().st_size for file in last.iterdir())
    dist.barrier()
    resumed = _resumed(bench, done, last, size)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"rounds": rounds, "bytes": size, "resumed": resumed}


def _resumed(bench: ReplayedUpdates, done: int, last: Path, size: int) -> dict[str, object]:
    """Return the seconds that new policies take to be restored, and whether they then hold the same bits."""
    import torch.distributed as dist

    from moe_rl.config.training import ParallelConfig
    from moe_rl.megatron import checkpoint, world
    from moe_rl.megatron.saving import Checkpoints

    result = {}
    for name, parallel in (("same", bench.parallel), ("another", ParallelConfig(pipeline=bench.parallel.expert))):
        bench.policy.release()
        bench.policy = None
        world.lay_out(parallel, seed=2)
        policy = bench.policy = bench.new_policy(parallel)

        def load(policy=policy, parallel=parallel):
            checkpoint.load(last, policy, parallel=parallel, seed=1)

        dist.barrier()
        before = _read_so_far()
        result[f"resume in {name} layout"], _ = timed(load)
        (read,) = world.all_reduce([_read_so_far() - before])
        result[f"{name} layout: bytes read, of the checkpoint's"] = read / size
        again = Checkpoints(last.parent / name, parallel, keep=1, asynchronous=False)
        again.save(done, policy, {})
        if dist.get_rank() == 0:
            saved = again.folder / last.name
            equal = _same_bytes(last, saved) if name == "same" else _same_tensors(last, saved)
            result[f"{name} layout: the same bits"] = equal
        dist.barrier()
    return result


def _same_bytes(one: Path, other: Path) -> bool:
    """Return whether the digests agree, except those of Megatron's metadata, which contain times and paths."""
    ours, theirs = (json.loads((path / "state.json").read_text()) for path in (one, other))
    for state in (ours, theirs):
        state["files"] = {name: d for name, d in state["files"].items() if "metadata" not in name}
    return (ours["files"], ours["pieces"]) == (theirs["files"], theirs["pieces"])


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


def _read_so_far() -> int:
    """Return how many bytes this process has read, from disk or from the page cache."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def _most_resident() -> float:
    """Return the peak host memory of all ranks in bytes since the kernel's mark was reset. All ranks call it."""
    from moe_rl.megatron import world

    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return world.all_reduce([1024 * int(kibibytes)])[0]


if __name__ == "__main__":
    sys.exit(main())
