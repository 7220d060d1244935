"""Compares training steps that route natively, replay, and replay by dispatch plans:
`python benchmarks/step_overhead.py [--ranks 2] [--pairs 20] [--json FILE]`.

It uses expert-parallel ranks on this machine, gloo without a GPU, and a random Qwen3-MoE. The replayed routes are those
that its own routers choose, so all three variants do the same work on the same tokens. An update (forward, backward,
optimizer) runs in turns, in an order that rotates. Planning is part of the planned variant. The benchmark prints median
ratios over the rounds with their quartiles, for the wall time of the slowest rank and for the processor time of all
ranks. Other processes disturb processor time less, but it does not include time in which ranks wait for each other.

It then prints what the MoE layers of one update waited for, counted apart from the timing: exchanges of counts between
ranks, waits for an event of the device, values read by the host. On a CPU a wait for the device ends at once, so its
cost on a GPU is not in these times. Last it prints the time of each part of a dispatch, for `simulate_cluster.py
--check`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from functools import partial

from updates import ReplayedUpdates, arguments, described, measured, ratio, timed

KINDS = ("native", "replayed", "planned")


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], model="mid", tokens=256)
    parser.add_argument("--pairs", type=int, default=20, help="rounds over all three variants")
    measured(__file__, parser, run_rank, summary)
    return 0


def summary(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Compute medians and quartiles from the results of the first rank."""
    result = described(options, seen)
    for at, clock in enumerate(("clock", "processor")):
        seconds = {kind: [row[kind][at] for row in seen["rounds"]] for kind in KINDS}
        for kind in KINDS:
            result[f"{clock} seconds of an update, {kind}"] = statistics.median(seconds[kind])
        for above, below in (("replayed", "native"), ("planned", "native"), ("planned", "replayed")):
            result |= ratio(seconds[above], seconds[below], f"{clock}, {above} : {below}")
    result["clock seconds of planning"] = statistics.median(seen["planning"])
    for kind in KINDS:
        result[f"layers of an update, {kind}"] = seen["waits"][kind]
    result["micro"] = seen["micro"]
    return result


def run_rank(options: argparse.Namespace, bench: ReplayedUpdates) -> dict:
    from calibration import micro_measurements

    from moe_rl.megatron.witness import LayerWaits

    planning = []

    def update(kind):
        if kind == "native":
            return bench.update(None)
        plans = []
        if kind == "planned":
            start = time.perf_counter()
            plans = bench.plans()
            planning.append(time.perf_counter() - start)
        return bench.update(plans)

    rounds = []
    for number in range(options.pairs + 1):
        turn = number % len(KINDS)
        row = {kind: timed(partial(update, kind)) for kind in KINDS[turn:] + KINDS[:turn]}
        if number:  # the first round warms up
            rounds.append(row)
    micro = micro_measurements(bench.facts.num_experts, bench.facts.top_k, bench.facts.hidden_size, options.tokens)
    counter, waits = LayerWaits().attach(bench.policy.chunks), {}
    for kind in KINDS:
        counter.counts = counter.waits = counter.reads = counter.dispatches = 0
        update(kind)
        waits[kind] = asdict(counter)
    return {"rounds": rounds, "planning": planning[1:], "waits": waits, "micro": micro}


if __name__ == "__main__":
    sys.exit(main())
