"""Models the step time of an expert-parallel cluster: `python benchmarks/simulate_cluster.py [--store RUN/trace]
[--costs FILE] [--check STEP_OVERHEAD.json] [--json FILE]`.

A MODEL, NOT A MEASUREMENT: it adds up the costs of a file (benchmarks/costs/h800.yaml, each number with its source or
"assumed") over the rows that each rank sends and gets, taken from routes. Data-parallel ranks are the expert-parallel
ones, in as many groups as fit. In a MoE layer every rank of a group waits for the slowest, twice: at the dispatch for
attention, at the combine for experts. So, forward, with maxima over the ranks of a group,

    layer = overhead + max(attention) + exchange + max(experts) + exchange + what the variant adds

    attention  2 FLOP a dense parameter and token, and 2 * heads * head size * length^2 of a sequence (causal)
    exchange   latency + max over ranks of bytes out or in / bandwidth, inside of the node and to other nodes at once,
               a row of hidden size in bfloat16 for every (token, expert) pair that leaves the rank
    experts    6 FLOP * hidden size * expert width a row / rate

backward twice the computation and the same exchanges. The last layer's vocabulary, its norms and the embedding are a
layer more, of tokens alone. A step is the sum over layers and microbatches, of the slowest group. Not in it: optimizer,
gradient reduction, pipeline, loading, the cost of moving placed experts; kernels are as fast on few rows as on many.

    native         packing by length; every dispatch exchanges counts and makes the host wait
    replay         the same, and the comparison with the record
    plan           no exchange of counts, no wait
    load           packing by load (moe_rl/planning/balance.py)
    placement      experts placed by the batches before (moe_rl/planning/expert_placement.py), then packed by load
    copies         of popular experts, up to COPIES a rank for each layer and microbatch
                   (moe_rl/planning/copy_choice.py); their weights travel in the forward, gradients in the backward.
                   Chosen as if all ranks were in one node. Packed by length: copies even out experts, and packing by
                   load makes tokens less even
    nodes          copies chosen for the nodes that there are, so that they also keep rows within a node
    overlap        dispatch, experts and combine in chunks, two at once (of exchange and computation, the longer one).
                   Each chunk has copies of its own; all chunks have the same mix of rows
    ideal          tokens and rows even on all ranks in all layers, with plan and overlap and nothing to check. It is no
                   bound: each rank sends its rows to all ranks alike, and copies can keep more of them within a node

The second table takes apart what `overlap` has above `ideal`, in points: the check; the weights and gradients of
copies, if they took no time; rows, if they were even besides; and at last tokens. Rows below 0 are fewer rows between
nodes than `ideal` has.

Batches: recorded (the last shard; those before it place the experts; one recorded token stands for --weight tokens),
and those of benchmarks/packing.py.

Planning is of the host, before the step, and not in the ratios: its seconds on one core stand beside them.

--check: holds the same differences, from the micro-measurements that benchmarks/step_overhead.py --json made in its own
run, against the ratios that it measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import packing as batches
import yaml

from moe_rl.planning.balance import Plan, load_of, pack_by_load
from moe_rl.planning.copy_choice import choose_copies, with_copies
from moe_rl.planning.expert_placement import natural_order, place
from moe_rl.planning.packing import pack

PARTS = ("check", "copies", "rows", "tokens")
VARIANTS = ("native", "replay", "plan", "load", "placement", "copies", "nodes", "overlap", "ideal")
COPIES = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds the numbers of a cost file, which gives their units."""

    ranks_of_a_node: float
    gemm_rate: float
    attention_rate: float
    intra_bandwidth: float
    inter_bandwidth: float
    intra_latency: float
    inter_latency: float
    host_sync: float
    check: float
    layer_overhead: float
    planning_rate: float
    overlap_chunks: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds the sizes of a model; the defaults are those of Qwen3-30B-A3B, from its config.json."""

    hidden: int = 2048
    heads: int = 32
    groups: int = 4
    head: int = 128
    width: int = 768
    vocabulary: int = 151_936


SHAPE = Shape()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=Path(__file__).parent / "costs/h800.yaml", metavar="FILE")
    parser.add_argument("--store", metavar="STORE", help="trace store of a run (default: none)")
    parser.add_argument("--weight", type=int, default=400, help="number of tokens that a recorded one stands for")
    parser.add_argument("--synthetic", nargs="*", choices=batches.KINDS, default=list(batches.KINDS))
    parser.add_argument("--expert-parallel", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--sequences", type=int, default=4_000, help="sequences of a synthetic step")
    parser.add_argument("--layers", type=int, default=48, help="of a synthetic step")
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks")
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=Path, nargs="*", default=[], metavar="STEP_OVERHEAD.json")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    checks = [one for file in options.check for one in checked(file)]
    rows = checks if options.check else simulated(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def read_costs[T](path: Path, kind: type[T]) -> tuple[str, T]:
    """Return the name and the values of a cost file. `kind` is a dataclass of its numbers."""
    given = yaml.safe_load(path.read_text())
    return given["name"], kind(**{field.name: float(given[field.name][0]) for field in fields(kind)})


def simulated(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    name, costs = read_costs(options.costs, Costs)
    print(
        f"A model, not a measurement: {name}, Qwen3-30B-A3B's sizes, {options.ranks} ranks, microbatches of "
        f"{options.microbatch_tokens:,} tokens.\nStep time / native's; each variant with those to its left.\n"
    )
    print(f"| batch | EP | native, s | {' | '.join(VARIANTS[1:])} | ideal : overlap | host planning, s |")
    print("|" + "---|" * (len(VARIANTS) + 4))
    for batch, top_k, past, lengths, counts in batches_of(options):
        for parts in options.expert_parallel:
            if counts.shape[2] % parts or options.ranks % parts:
                continue
            seconds = variants(costs, past, lengths, counts, parts, options.ranks, options.microbatch_tokens)
            ratios = [f"{seconds[kind] / seconds['native']:.3f}" for kind in VARIANTS[1:]]
            planning = sum(lengths) / options.ranks * top_k * counts.shape[1] / costs.planning_rate
            print(
                f"| {batch} | {parts} | {seconds['native']:.3g} | {' | '.join(ratios)} | "
                f"{seconds['ideal'] / seconds['overlap']:.3f} | {planning:.3g} |",
                flush=True,
            )
            rows.append(
                {"costs": name, "batch": batch, "expert_parallel": parts, "seconds": seconds, "planning": planning}
            )
    print(f"\n| batch | EP | above ideal | {' | '.join(PARTS)} |")
    print("|" + "---|" * (len(PARTS) + 3))
    for row in rows:
        seconds = row["seconds"]
        stages = [seconds[kind] / seconds["ideal"] for kind in ("overlap", *(f"no {part}" for part in PARTS))]
        points = [100 * (one - other) for one, other in pairwise(stages)]
        cells = [f"{100 * stages[0] - 100:.1f}%", *(f"{part:.1f}" for part in points)]
        print(f"| {row['batch']} | {row['expert_parallel']} | {' | '.join(cells)} |")
    return rows


def batches_of(options: argparse.Namespace) -> Iterator[tuple[str, int, np.ndarray, list[int], np.ndarray]]:
    """Yield name, top-k, counts of the batches before [N, L, E], lengths and counts [S, L, E] of the step."""
    if options.store:
        ((name, lengths, counts, past),) = batches.recorded(options.store, 1)
        top_k = int(counts[0].sum()) // (lengths[0] * counts.shape[1])
        weighted = [length * options.weight for length in lengths]
        yield f"{name} x {options.weight}", top_k, past, weighted, counts * options.weight
    for kind in options.synthetic:
        lengths, counts, past = batches.synthetic(kind, options.sequences, options.layers, seed=options.seed)
        yield kind, 8, past, lengths, counts


def variants(
    costs: Costs, past: np.ndarray, lengths: list[int], counts: np.ndarray, parts: int, ranks: int, tokens: int
) -> dict[str, float]:
    """Return the seconds of a step for each of VARIANTS, and of `overlap` without each of PARTS and those before it."""
    _, layers, experts = counts.shape
    by_length = pack(lengths, ranks=ranks, microbatch_tokens=tokens)
    order, _ = place(past, parts, current=natural_order(layers, experts))
    placed = np.take_along_axis(counts, order[None], axis=2)
    by_load, loaded = (
        pack_by_load(lengths, load_of(one, parts), ranks=ranks, microbatch_tokens=tokens, exchange=parts)[0]
        for one in (counts, placed)
    )
    # Counts: an all-gather of a few numbers costs as much as an empty all-to-all.
    asking = _latency(costs, parts) + costs.host_sync
    natural, placed_rows = load_of(counts, parts), load_of(placed, parts)
    step = lambda plan, loads, **how: _step(costs, plan, lengths, loads, **how)  # noqa: E731
    ideal = step(by_length, placed_rows, dispatch=0.0, overlap=True, even=("rows", "tokens"))
    return {
        "native": step(by_length, natural, dispatch=asking),
        "replay": step(by_length, natural, dispatch=asking + costs.check),
        "plan": step(by_length, natural, dispatch=costs.check),
        "load": step(by_load, natural, dispatch=costs.check),
        "placement": step(loaded, placed_rows, dispatch=costs.check),
        "copies": step(by_length, placed_rows, dispatch=costs.check, copied=placed, known=False),
        "nodes": step(by_length, placed_rows, dispatch=costs.check, copied=placed),
        "overlap": step(by_length, placed_rows, dispatch=costs.check, copied=placed, overlap=True),
        "ideal": ideal,
        "no check": step(by_length, placed_rows, dispatch=0.0, copied=placed, overlap=True),
        "no copies": step(by_length, placed_rows, dispatch=0.0, copied=placed, overlap=True, free=True),
        "no rows": step(by_length, placed_rows, dispatch=0.0, overlap=True, even=("rows",)),
        "no tokens": ideal,
    }


def _step(
    costs: Costs, plan: Plan, lengths: list[int], loads_SLP: np.ndarray, *, dispatch: float, overlap: bool = False,
    even: tuple[str, ...] = (), copied: np.ndarray | None = None, free: bool = False, known: bool = True,
) -> float:  # fmt: skip
    """Return the seconds of the slowest group.

    dispatch: seconds added to every dispatch. even: which of tokens and rows are the same on all ranks. copied: counts
    [S, L, E] by slot, where experts are copied. free: whether copies take no time to travel. known: whether they are
    chosen for the nodes.
    """
    parts = loads_SLP.shape[2]
    chunks = int(costs.overlap_chunks) if overlap else 1
    sizes, node = np.array(lengths, np.float64), np.arange(parts) // int(costs.ranks_of_a_node)
    slowest = 0.0
    for first in range(0, len(plan), parts):
        group, seconds = plan[first : first + parts], 0.0
        for number in range(len(group[0])):
            members = [rank[number] for rank in group]
            tokens = np.array([sizes[one].sum() for one in members])
            squares = np.array([(sizes[one] ** 2).sum() for one in members])
            sent_PLP = np.stack([loads_SLP[one].sum(axis=0, dtype=np.int64) for one in members]).astype(np.float64)
            moved_PLP = np.zeros_like(sent_PLP)
            if copied is not None:
                counts = np.stack([copied[one].sum(axis=0, dtype=np.int64) for one in members]) // chunks
                chosen = choose_copies(counts, parts, COPIES, -(-3 * SHAPE.width // 2), node if known else None)
                sent_PLP = chunks * with_copies(counts, chosen).reshape(*sent_PLP.shape, -1).sum(-1).astype(np.float64)
                owner = np.where(chosen.slot >= 0, chosen.slot // (counts.shape[2] // parts), -1)
                moved_PLP = (owner[None] == np.arange(parts)[:, None, None, None]).sum(-1).astype(np.float64)
                moved_PLP *= 0 if free else chunks
            if "tokens" in even:
                tokens, squares = np.full(parts, tokens.mean()), np.full(parts, squares.mean())
            if "rows" in even:
                sent_PLP = np.broadcast_to(sent_PLP.mean(axis=(0, 2), keepdims=True), sent_PLP.shape)
            seconds += _microbatch(costs, tokens, squares, sent_PLP, moved_PLP, dispatch, overlap)
        slowest = max(slowest, seconds)
    return slowest


def _microbatch(
    costs: Costs, tokens: np.ndarray, squares: np.ndarray, sent_PLP: np.ndarray, moved_PLP: np.ndarray,
    dispatch: float, overlap: bool,
) -> float:  # fmt: skip
    """Return the seconds of forward and backward of one round of a group.

    tokens, squares: of each rank. sent: rows from rank to rank. moved: copies of experts from rank to rank.
    """
    hidden, layers = SHAPE.hidden, sent_PLP.shape[1]
    dense = hidden * SHAPE.head * (2 * SHAPE.heads + 2 * SHAPE.groups)
    scores = 2 * SHAPE.heads * SHAPE.head * squares
    attention = (2 * dense * tokens / costs.gemm_rate + scores / costs.attention_rate).max()
    vocabulary = (2 * hidden * SHAPE.vocabulary * tokens / costs.gemm_rate).max()
    rows_LP = sent_PLP.sum(axis=0)
    experts_L = rows_LP.max(axis=1) * 6 * hidden * SHAPE.width / costs.gemm_rate
    exchange_L = _exchange(costs, sent_PLP * hidden * 2)
    copies_L = _exchange(costs, moved_PLP * 3 * hidden * SHAPE.width * 2)
    latency, chunks = _latency(costs, len(sent_PLP)), int(costs.overlap_chunks) if overlap else 1
    copies_L += chunks * latency * (moved_PLP.sum((0, 2)) > 0)
    total = 3 * vocabulary
    for compute in (1, 2):  # forward, backward
        inner = _inner(experts_L * compute, exchange_L, latency, chunks)
        total += layers * (costs.layer_overhead + compute * attention) + inner.sum() + copies_L.sum()
    return float(total + layers * dispatch)


def _inner(experts_L: np.ndarray, exchange_L: np.ndarray, latency: float, chunks: int) -> np.ndarray:
    """Return the seconds of dispatch, experts and combine of each layer, in chunks of which one travels while another
    computes.
    """
    computing = exchange_L / chunks + experts_L + exchange_L / chunks
    exchanging = 2 * exchange_L + experts_L / chunks
    return np.maximum(computing, exchanging) + 2 * chunks * latency


def _exchange(costs: Costs, bytes_PLP: np.ndarray) -> np.ndarray:
    """Return [L]: the seconds of an exchange on the slowest rank, without latency."""
    ranks = np.arange(len(bytes_PLP))
    node = ranks // int(costs.ranks_of_a_node)
    near = (node[:, None] == node[None]) & (ranks[:, None] != ranks[None])
    far = node[:, None] != node[None]
    slowest = np.zeros(bytes_PLP.shape[1])
    for mask, bandwidth in ((near, costs.intra_bandwidth), (far, costs.inter_bandwidth)):
        there = bytes_PLP * mask[:, None]
        for axis in (2, 0):  # out, in
            slowest = np.maximum(slowest, there.sum(axis=axis).max(axis=0 if axis == 2 else 1) / bandwidth)
    return slowest


def _latency(costs: Costs, parts: int) -> float:
    return costs.intra_latency if parts <= costs.ranks_of_a_node else costs.inter_latency


def checked(file: Path) -> Iterator[dict[str, object]]:
    """Predict the ratios of a measured run from its own micro-measurements in `file`, and return both.

    The native time is taken as measured. The prediction adds what replay and planning change in each dispatch.
    """
    seen = json.loads(file.read_text())
    micro, ranks = seen["micro"], seen["expert-parallel ranks"]
    native, dispatches = seen["clock seconds of an update, native"], seen["layers of an update, native"]["dispatches"]
    asked = micro["exchange of counts"] + micro["counts"]
    routing = micro["take"] - micro["top-k"] + micro["checksum"]
    changes = {
        "replayed": dispatches * routing,
        "planned": dispatches * (routing + micro["check of the plan"] + micro["planned permutation"]
                                 - micro["permutation"] - asked) + seen["clock seconds of planning"],
    }  # fmt: skip
    print(f"{file.name}: EP {ranks}, {seen['model']}, {dispatches} dispatches in an update of {native:.3g} s")
    # Rows and weights go out and rows come back, and so do their gradients. An expert is 3 / 4 of the matrix that was
    # timed (in benchmarks/models.py it is half as wide as the hidden size), once forward and twice backward.
    exchanges, matrices = 6 * micro["all-to-all"] * dispatches, 3 * 0.75 * micro["gemm"] * dispatches
    print(
        f"  of native, by the parts alone: exchanges {exchanges / native:.0%}, experts' matrices "
        f"{matrices / native:.0%}; the rest, which is not modelled, is Python, attention, optimizer, waiting"
    )
    for kind, change in changes.items():
        predicted, measured = 1 + change / native, seen[f"clock, {kind} : native"]
        quartiles = seen[f"clock, {kind} : native, quartiles"]
        print(f"  {kind} : native   predicted {predicted:.3f}   measured {measured:.3f}, quartiles {quartiles}")
        yield {"file": file.name, "ranks": ranks, "kind": kind, "predicted": predicted, "measured": measured,
               "quartiles": quartiles, "exchanges": exchanges / native, "matrices": matrices / native}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
