"""Measures the placement of experts by the routes of earlier batches: `python benchmarks/placement.py [--store
RUN/trace] [--json FILE]`.

Prints a Markdown table. The excess is the load of the fullest expert-parallel ranks above the mean, summed over layers,
for a batch as a whole. `benchmarks/packing.py` calls it the floor of packing. The columns are:

    natural    experts in the order of their numbers
    earlier    placed by up to four batches before the batch, without knowledge of it
    window     placed by the batch and up to three before it, as the trainer does in a step with a plan
    itself     placed by the batch alone
    floor      lower bound for any placement
    quarter    as earlier, with at most a quarter of each layer's experts moved
    moved      experts that changed their rank, for earlier
    + 1, + 2   as earlier, with placement.copies of this many. The batch stands for a single microbatch here; a run
               chooses copies for each one
    seconds    of one core, to plan from the batches before

Recorded batches are the last steps of a trace store. Synthetic ones come from the generator of `benchmarks/packing.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np
from output import beside
from packing import EXPERT_PARALLEL, batch_arguments, recorded, synthetic

from moe_rl.planning.balance import excess
from moe_rl.planning.copy_choice import choose_copies, with_copies
from moe_rl.planning.expert_placement import place, rank_loads

_WINDOW = 4


def main() -> int:
    options = batch_arguments(__doc__).parse_args()
    rows = []
    print("| batch | EP | natural | earlier | window | itself | floor | quarter | moved | + 1 | + 2 | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in measured(options):
        rows.append(row)
        print(line(row), flush=True)
    beside()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    if options.store:
        for name, _, counts, earlier in recorded(options.store, options.steps):
            yield from judged(name, counts, earlier)
    for kind in options.synthetic:
        _, counts, earlier = synthetic(kind, options.sequences, options.layers, seed=options.seed)
        yield from judged(kind, counts, earlier)


def judged(name: str, counts: np.ndarray, earlier: np.ndarray) -> Iterator[dict[str, object]]:
    """Return a row of the table. counts: [S, L, E] of the batch. earlier: [N, L, E] of the batches before it."""
    batch = counts.sum(axis=0, dtype=np.int64)[None]
    for parts in EXPERT_PARALLEL:
        if counts.shape[2] % parts or not len(earlier):
            continue
        _, itself = place(batch, parts)
        start = time.process_time()
        order, report = place(earlier, parts)
        seconds = time.process_time() - start
        quarter, _ = place(earlier, parts, max_moved=0.25)
        window, _ = place(np.concatenate([earlier[1 - _WINDOW :], batch]), parts)
        yield {
            "batch": name,
            "expert_parallel": parts,
            "experts": counts.shape[1] * counts.shape[2],
            "natural": itself.natural,
            "itself": itself.after,
            "window": excess(rank_loads(batch, window, parts))[0],
            "earlier": excess(rank_loads(batch, order, parts))[0],
            "quarter": excess(rank_loads(batch, quarter, parts))[0],
            "floor": itself.floor,
            "moved": report.moved,
            "copied": [copied_excess(batch, order, parts, copies) for copies in (1, 2)],
            "seconds": seconds,
        }


def copied_excess(batch: np.ndarray, order: np.ndarray, parts: int, copies: int) -> float:
    """Return the excess of counts [1, L, E] placed by `order`, where each rank may take so many copies."""
    by_slot = np.take_along_axis(batch, order[None], -1)
    rows = with_copies(by_slot, choose_copies(by_slot[0], parts, copies, 1))
    return excess(rows.reshape(*rows.shape[:2], parts, -1).sum(-1))[0]


def line(row: dict[str, object]) -> str:
    percent = (f"{100 * row[key]:.2f}%" for key in ("natural", "earlier", "window", "itself", "floor", "quarter"))
    copies = (f"{100 * value:.2f}%" for value in row["copied"])
    cells = row["batch"], row["expert_parallel"], *percent, f"{row['moved'] / row['experts']:.0%}", *copies
    return "| " + " | ".join(map(str, cells)) + f" | {row['seconds']:.2f} |"


if __name__ == "__main__":
    raise SystemExit(main())
