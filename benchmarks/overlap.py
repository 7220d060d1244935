"""Compares planned steps whose MoE layers compute while rows travel with steps in Megatron's order:
`python benchmarks/overlap.py [--ranks 2] [--chunks 2 4] [--json FILE] [--picture FILE]`.

It uses expert-parallel ranks on this machine, gloo without a GPU, and a random Qwen3-MoE with experts so narrow that
sending rows takes about as long as computing them. An update (planning, forward, backward, optimizer) runs in turns: in
Megatron's order, overlapped in one chunk, and in the chosen numbers of chunks. The benchmark prints the medians of the
rounds' ratios with quartiles. For one layer, recorded apart from the timing, it prints how long rows were in transit
and how long the host only waited for them. The picture shows a forward and a backward pass of this layer for each case.

On this machine the threads that send rows compete with those that compute. A network card or a GPU's copy engines would
send rows beside the computation. The times therefore show what overlaps and what overlap costs, but not what it gains.
A layer is not recorded on a GPU, where the host runs ahead of the device, nor on a single rank, which sends its rows to
itself. There is no picture then, and the times of a single rank show only what the chunks cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from updates import ReplayedUpdates, arguments, described, measured, ratio, timed

RECORDED = 11  # number of recordings of a layer; the picture shows the fastest, which other processes disturbed least
LANES = 6  # rows of the picture for exchanges in transit at the same time


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], model="narrow", tokens=512)
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[2, 4], help="numbers of chunks, besides 0 (Megatron's order) and 1"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds over all cases")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG or SVG file")
    options, seen = measured(__file__, parser, run_rank, summary)
    if options.picture and seen["timelines"]:
        draw(seen["timelines"], options.picture)
    return 0


def name(chunks: int) -> str:
    return {0: "planned", 1: "overlapped, 1 chunk"}.get(chunks, f"overlapped, {chunks} chunks")


def summary(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Compute medians and quartiles from the results of the first rank."""
    result = described(options, seen)
    for at, clock in enumerate(("clock", "processor")):
        seconds = {way: [row[str(way)][at] for row in seen["rounds"]] for way in seen["ways"]}
        for way in seen["ways"]:
            result[f"{clock} seconds of an update, {name(way)}"] = statistics.median(seconds[way])
        for way in seen["ways"][1:]:
            result |= ratio(seconds[way], seconds[0], f"{clock}, {name(way)} : planned")
    for way, recorded in seen["layers"].items():
        under_way, waited, rest = (statistics.median(c) for c in zip(*recorded, strict=True))
        result[f"rows of a layer in transit, ms, {name(int(way))}"] = 1e3 * under_way
        result[f"host waits for them, ms, {name(int(way))}"] = 1e3 * waited
        result[f"fraction overlapped by computation, {name(int(way))}"] = rest
    return result


def run_rank(options: argparse.Namespace, bench: ReplayedUpdates) -> dict:
    import torch.distributed as dist
    from timeline import Timeline

    from moe_rl.megatron import world
    from moe_rl.megatron.model import unwrap

    ways = [0, 1, *options.chunks]

    def update(way):
        bench.update(bench.plans(way))

    rounds = []
    for number in range(options.rounds + 1):
        turn = number % len(ways)
        row = {way: timed(partial(update, way)) for way in ways[turn:] + ways[:turn]}
        if number:  # the first round warms up
            rounds.append(row)
    layer = unwrap(bench.policy.chunks[0]).decoder.layers[-2].mlp
    layers, timelines = {}, {}
    for way in ways if options.ranks > 1 and world.device().type == "cpu" else ():
        recorded, numbers = [], []
        for _ in range(RECORDED):
            plans = bench.plans(way)
            timeline = Timeline(layer, 0, plans[0][layer.layer_number - 1])
            dist.barrier()
            with timeline.recording():
                bench.update(plans)
            recorded.append(timeline)
            sums = world.all_reduce([timeline.under_way(), timeline.waited()])
            numbers.append([*(one / options.ranks for one in sums), 1 - sums[1] / sums[0]])
        layers[way] = numbers
        timelines[name(way)] = [asdict(span) for span in min(recorded, key=seconds).spans]
    return {"ways": ways, "rounds": rounds, "layers": layers, "timelines": timelines}


def seconds(timeline) -> float:
    """Add up the layer's forward and backward pass."""
    return sum(
        max(span.end for span in timeline.spans if span.backward == backward)
        - min(span.begin for span in timeline.spans if span.backward == backward)
        for backward in (False, True)
    )


def draw(timelines: dict[str, list[dict]], file: Path) -> None:
    """Plot forward and backward of the layer on the first rank, one row per case.

    The upper part shows computation and waiting, the lower part which rows are in transit.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colours = {
        "router": "#d95f02", "shared experts": "#e6ab02", "experts": "#1b6ca8",
        "rows": "#7fb77e", "weights": "#b8d8b0", "back": "#9d8ec7",
    }  # fmt: skip
    figure, axes = plt.subplots(
        len(timelines), 2, figsize=(11, 0.6 + 1.4 * len(timelines)), sharex="col", squeeze=False
    )
    for line, (way, spans) in zip(axes, timelines.items(), strict=True):
        for axis, backward in zip(line, (False, True), strict=True):
            here = [span for span in spans if span["backward"] == backward]
            start = min(span["begin"] for span in here)

            def bar(axis, row, span, begin, end, start=start, **style):
                left, width = 1e3 * (begin - start), 1e3 * (end - begin)
                axis.barh(row, width, left=left, edgecolor="black", linewidth=0.3, **style)
                kind, _, number = span["name"].partition(" ")
                if number.isdigit() and kind != "weights":
                    axis.text(left + width / 2, row, number, ha="center", va="center", fontsize=6)

            lanes: list[float] = []  # the time from which each line is free
            for span in here:
                kind = span["name"].rstrip("0123456789 ")
                if span["waiting"] is None:
                    bar(axis, 0, span, span["begin"], span["end"], height=0.9, color=colours[kind])
                    continue
                bar(axis, 0, span | {"name": ""}, span["waiting"], span["end"], height=0.9, color="white", hatch="////")
                lane = next((n for n, free in enumerate(lanes) if free <= span["begin"]), len(lanes))
                lanes[lane : lane + 1] = [span["arrived"]]
                bar(axis, -0.75 - 0.45 * lane, span, span["begin"], span["arrived"], height=0.4, color=colours[kind])
            axis.set_ylim(-0.8 - 0.45 * LANES, 0.6)
            axis.set_yticks([0, -0.75 - 0.45 * LANES / 2], ["this rank", "under way"], fontsize=7)
            axis.tick_params(axis="x", labelsize=7)
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
        line[0].set_title(way, loc="left", fontsize=9)
        line[1].set_title("backward", loc="right", fontsize=8, color="grey")
        line[0].set_title("forward", loc="right", fontsize=8, color="grey")
    for axis in axes[-1]:
        axis.set_xlabel("ms", fontsize=8)
    used = {span["name"].rstrip("0123456789 ") for spans in timelines.values() for span in spans}
    handles = [Patch(color=colour, label=kind) for kind, colour in colours.items() if kind in used]
    handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="waits for rows"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
