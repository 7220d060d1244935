"""Compares packing by known load with packing by length.

    python benchmarks/packing.py [--store RUN/trace] [--json FILE]

Prints a Markdown table. Excess is what the fullest expert-parallel ranks have above the mean, summed over microbatches
and layers. `floor` is below what any packing of the batch could reach: experts that are popular in the whole batch
cannot be packed away. `closed` is the share of the way from packing by length to the floor.

placed: experts lie where the routes of the batches before put them (`planning.expert_placement`); of this one nothing
is known. It shows what is left to packing once placement has done its part.
uneven tokens: what the fullest rank of a microbatch has above the mean. seconds: of one core, to plan.

Recorded: the last steps of a trace store, each as one batch, in microbatches of the demo's size and in about eight.
Synthetic: a generator with these assumptions.
  lengths    log-normal around 2,000 tokens (sigma 0.7), cut to 64 ... 8,192; groups of 8 share a prompt, so a topic
  counts     each token takes 8 of 128 experts in each of 48 layers; a sequence's count of an expert is Poisson-like
             (rounded normal, variance = mean) around length x 8 x its share, layers independent of each other
  shares     base x topic x own, normalised. own: log-normal, sigma 0.3, drawn for each sequence, layer and expert
  zipf       base falls with the square root of an expert's rank; there are no topics
  topics     base is even, as balancing losses make it; 32 topics, log-normal with sigma 0.7, drawn for each group
  drift      base as in zipf, topics as in topics, but they walk: each group has the topic of the last or a neighbour
Before the batch as many sequences are drawn, in four batches, for the placement.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from output import beside

from moe_rl.planning.balance import Plan, excess, load_of, pack_by_load, round_loads
from moe_rl.planning.expert_placement import place
from moe_rl.planning.packing import pack
from moe_rl.trace.inspection import references, select

KINDS = ("zipf", "topics", "drift")
EXPERT_PARALLEL = (2, 8, 32, 64)
_GROUP, _TOPICS = 8, 32
_EARLIER = 4  # number of batches that a placement is planned from


def main() -> int:
    parser = batch_arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks for a synthetic batch")
    parser.add_argument(
        "--microbatch-tokens", type=int, default=16_384, help="most tokens of a microbatch of a synthetic batch"
    )
    options = parser.parse_args()
    rows = []
    print(
        "| batch | EP | DP | rounds x sequences | excess by length | by load | floor | closed | worst layer by "
        "length | by load | uneven tokens by length | by load | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in measured(options):
        rows.append(row)
        print(line(row), flush=True)
    beside()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def batch_arguments(description: str) -> argparse.ArgumentParser:
    """Parse which batches to examine, recorded and synthetic, and where to write the result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", metavar="STORE", help="trace store of a run, or one shard (default: none)")
    parser.add_argument("--steps", type=int, default=1, help="number of last shards of the store")
    parser.add_argument("--synthetic", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sequences", type=int, default=10_000, help="of a synthetic batch")
    parser.add_argument("--layers", type=int, default=48, help="of a synthetic batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    if options.store:
        for name, lengths, counts, earlier in recorded(options.store, options.steps):
            for parts in EXPERT_PARALLEL:
                if counts.shape[2] % parts:
                    continue
                eighth = max(max(lengths), int(1.05 * sum(lengths) / parts / 8))
                for tokens in (2048, eighth):
                    batch = f"{name}, {tokens} tokens"
                    yield from compare(batch, lengths, counts, earlier, parts, ranks=parts, tokens=tokens)
    for kind in options.synthetic:
        lengths, counts, earlier = synthetic(kind, options.sequences, options.layers, seed=options.seed)
        for parts in EXPERT_PARALLEL:
            if options.ranks % parts == 0:
                tokens = options.microbatch_tokens
                yield from compare(kind, lengths, counts, earlier, parts, ranks=options.ranks, tokens=tokens)


def recorded(store: str, steps: int) -> Iterator[tuple[str, list[int], np.ndarray, np.ndarray]]:
    """Yield for each of the last shards its name, lengths, counts [S, L, E], and earlier counts [N, L, E].

    The earlier counts are those of up to four shards before it; the first shard has none.
    """
    selection, totals = select(store), []
    shards = selection.shards[-steps - _EARLIER :]
    for number, shard in enumerate(shards):
        refs = [ref for ref in references(selection) if ref.parts[0].shard == shard]
        counts = np.stack([selection.store.expert_counts(ref) for ref in refs]).astype(np.int32)
        if number >= len(shards) - steps:
            earlier = np.array(totals[-_EARLIER:]).reshape(-1, *counts.shape[1:])
            yield shard, [ref.rows for ref in refs], counts, earlier
        totals.append(counts.sum(axis=0, dtype=np.int64))


def synthetic(
    kind: str, sequences: int, layers: int, *, experts: int = 128, top_k: int = 8, seed: int = 0
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Generate lengths, counts int32 [S, L, E], and counts int64 [4, L, E] of earlier batches, as described above."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(2000), 0.7, 2 * sequences), 64, 8192).astype(np.int64)
    falling = np.arange(1, experts + 1, dtype=np.float32) ** (0.0 if kind == "topics" else -0.5)
    base = np.stack([falling[rng.permutation(experts)] for _ in range(layers)])
    spread = 0.0 if kind == "zipf" else 0.7
    topics = base * np.exp(spread * rng.standard_normal((_TOPICS, layers, experts), dtype=np.float32))
    groups = -(-2 * sequences // _GROUP)
    drawn = rng.integers(0, _TOPICS, groups)
    topic = np.cumsum(rng.integers(-1, 2, groups)) % _TOPICS if kind == "drift" else drawn
    counts = np.empty((sequences, layers, experts), np.int32)
    earlier = np.zeros((_EARLIER, layers, experts), np.int64)
    for number, length in enumerate(lengths):
        own = np.exp(0.3 * rng.standard_normal((layers, experts), dtype=np.float32))
        shares = topics[topic[number // _GROUP]] * own
        mean = shares * (length * top_k / shares.sum(axis=1, keepdims=True))
        noise = np.sqrt(mean) * rng.standard_normal(mean.shape, dtype=np.float32)
        drawn = np.rint(np.maximum(mean + noise, 0)).astype(np.int32)
        if number < sequences:
            earlier[number * _EARLIER // sequences] += drawn
        else:
            counts[number - sequences] = drawn
    return lengths[sequences:].tolist(), counts, earlier


def compare(
    name: str, lengths: list[int], counts: np.ndarray, earlier: np.ndarray, parts: int, *, ranks: int, tokens: int
) -> Iterator[dict[str, object]]:
    """Return rows of the table, for the natural order of experts and for placement. parts: expert-parallel ranks."""
    yield row_of(name, lengths, load_of(counts, parts), ranks=ranks, tokens=tokens)
    if len(earlier):
        order, _ = place(earlier, parts)
        placed = np.take_along_axis(counts, order[None], axis=2)
        yield row_of(f"{name}, placed", lengths, load_of(placed, parts), ranks=ranks, tokens=tokens)


def row_of(name: str, lengths: list[int], loads: np.ndarray, *, ranks: int, tokens: int) -> dict[str, object]:
    parts = loads.shape[2]
    by_length = pack(lengths, ranks=ranks, microbatch_tokens=tokens)
    wall, cpu = time.perf_counter(), time.process_time()
    plan, report = pack_by_load(lengths, loads, ranks=ranks, microbatch_tokens=tokens, exchange=parts)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    layers = [excess(round_loads(one, loads, exchange=parts))[1].tolist() for one in (by_length, plan)]
    rounds = len(plan[0]) * (ranks // parts)
    open_ = report.by_length - report.floor
    return {
        "batch": name,
        "expert_parallel": parts,
        "data_parallel": ranks,
        "microbatch_tokens": tokens,
        "sequences": len(lengths),
        "rounds": rounds,
        "excess_by_length": report.by_length,
        "excess_by_load": report.planned,
        "floor": report.floor,
        "closed": (report.by_length - report.planned) / open_ if open_ > 1e-12 else None,
        "layers_by_length": layers[0],
        "layers_by_load": layers[1],
        "tokens_by_length": waiting(by_length, lengths),
        "tokens_by_load": waiting(plan, lengths),
        "packing": report.packing,
        "why": report.why,
        "swaps": report.swaps,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
    }


def waiting(plan: Plan, lengths: list[int]) -> float:
    """Return the sum over microbatches of the fullest rank's tokens / the mean, minus 1."""
    fullest = sum(max(sum(lengths[i] for i in rank[number]) for rank in plan) for number in range(len(plan[0])))
    return fullest * len(plan) / sum(lengths) - 1


def line(row: dict[str, object]) -> str:
    closed = "-" if row["closed"] is None else f"{row['closed']:.0%}"
    cells = (
        row["batch"],
        row["expert_parallel"],
        row["data_parallel"],
        f"{row['rounds']} x {row['sequences'] / row['rounds']:.0f}",
        *(f"{100 * row[key]:.2f}%" for key in ("excess_by_length", "excess_by_load", "floor")),
        closed,
        *(f"{100 * max(row[key]):.1f}%" for key in ("layers_by_length", "layers_by_load")),
        *(f"{100 * row[key]:.2f}%" for key in ("tokens_by_length", "tokens_by_load")),
        f"{row['cpu_seconds']:.2f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
