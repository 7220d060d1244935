"""What a training step costs natively routed, replayed, and replayed by dispatch plans:
`python benchmarks/step_overhead.py [--ranks 2] [--pairs 20] [--json FILE]`.

Expert-parallel ranks on this machine, gloo without a GPU, a random Qwen3-MoE. The routes that are replayed are those
that its own routers choose, so that all three do the same work on the same tokens. An update (forward, backward,
optimizer) is run in turns, in an order that rotates; planning is part of the planned one. Prints the median ratios
over the rounds with their quartiles: of the time on the clock, of the slowest rank, and of the processors' time, of all
ranks, which others on the machine disturb less but which does not see ranks wait for each other. Then what the MoE
layers of one update waited for, counted apart from the timing: exchanges of counts between ranks, waits for an event of
the device, values read by the host. On the CPU a wait for the device ends at once: what it costs on a GPU is not in
these times. Last what the parts of a dispatch take on their own, for `simulate_cluster.py --check`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from models import SHAPES, make_model
from output import tell

KINDS = ("native", "replayed", "planned")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid", choices=sorted(SHAPES), help="shape of the random model")
    parser.add_argument("--ranks", type=int, default=2, help="expert-parallel ranks")
    parser.add_argument("--pairs", type=int, default=20, help="rounds of all three")
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank")
    parser.add_argument("--tokens", type=int, default=256, help="of each microbatch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank-of", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # the same file on each rank
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(options.model, Path(folder) / "model")
        (path / "tokenizer.json").write_text("{}")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        subprocess.run(
            [*launcher, str(options.ranks), __file__, *sys.argv[1:], "--rank-of", folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        seen = json.loads((Path(folder) / "seen.json").read_text())
    tell(summary(options, seen), options.json)
    return 0


def summary(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Medians and quartiles of what the first rank wrote."""
    result: dict[str, object] = {
        "model": seen["model"],
        "expert-parallel ranks": options.ranks,
        "microbatches of a rank": options.microbatches,
        "tokens of a microbatch": options.tokens,
        "rounds": len(seen["rounds"]),
    }
    for at, clock in enumerate(("clock", "processor")):
        seconds = {kind: [row[kind][at] for row in seen["rounds"]] for kind in KINDS}
        for kind in KINDS:
            result[f"{clock} seconds of an update, {kind}"] = statistics.median(seconds[kind])
        for above, below in (("replayed", "native"), ("planned", "native"), ("planned", "replayed")):
            ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
            quartiles = statistics.quantiles(ratios, n=4)
            result[f"{clock}, {above} : {below}"] = statistics.median(ratios)
            result[f"{clock}, {above} : {below}, quartiles"] = [round(quartiles[0], 3), round(quartiles[2], 3)]
    result["clock seconds of planning"] = statistics.median(seen["planning"])
    for kind in KINDS:
        result[f"layers of an update, {kind}"] = seen["waits"][kind]
    result["micro"] = seen["micro"]
    return result


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from calibration import micro_measurements

    from moe_rl.config.hf import read_model
    from moe_rl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
    from moe_rl.megatron import world
    from moe_rl.megatron.microbatch import pack
    from moe_rl.megatron.policy import Policy
    from moe_rl.megatron.witness import LayerWaits
    from moe_rl.replay.plans import plan_dispatch
    from moe_rl.replay.routes import SequenceRoutes, microbatch_routes
    from moe_rl.replay.session import ReplaySession
    from moe_rl.trace import TraceSpec
    from moe_rl.types import Sequence

    parallel = ParallelConfig(expert=options.ranks)
    world.start(parallel, seed=1, timeout_seconds=120)
    facts = read_model(options.rank_of / "model")
    train = TrainConfig(dtype="float32", microbatch_tokens=options.tokens, optimizer=OptimizerConfig(lr=1e-12))
    policy = Policy(facts, train, parallel, options.rank_of / "model", temperature=1.0)
    spec = TraceSpec.from_layers("bench", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
    rng = np.random.default_rng(dist.get_rank())
    microbatches, unrecorded = [], []
    for number in range(options.microbatches):
        tokens = rng.integers(0, facts.vocab, options.tokens + 1).tolist()
        half = options.tokens // 2
        nothing = np.zeros(len(tokens) - half, np.float32)
        one = Sequence(f"s{number}", tuple(tokens[:half]), tuple(tokens[half:]), nothing, 1.0, 0, None)
        microbatch = pack([one], [0], world.device())
        fed = microbatch.fed([one])
        made_up = np.tile(np.arange(facts.top_k, dtype=np.uint8), (len(fed[0]), len(policy.layers), 1))
        microbatches.append(microbatch)
        unrecorded.append(
            microbatch_routes(
                [SequenceRoutes.complete(one.key, fed[0], made_up)], spec, layers=policy.layers, names=[one.key],
                fed=fed, padded_tokens=sum(microbatch.lengths), rows=microbatch.rows,
                expert_parallel=options.ranks, device=world.device(),
            )
        )  # fmt: skip

    def session(tables, mode, plans=()):
        return ReplaySession(
            tables, policy.layers, mode=mode, name="bench", rank=dist.get_rank(), plans=list(plans)
        )

    def loss(number, logprobs):
        return -logprobs.sum() / 1e4

    with session(unrecorded, "record") as own:
        policy.logprobs(microbatches, own)
    tables, planning = own.recorded_routes(), []

    def update(kind):
        if kind == "native":
            return policy.update(microbatches, None, loss)
        plans = []
        if kind == "planned":
            start = time.perf_counter()
            plans = plan_dispatch(
                tables, policy.layers, world.dispatch_group(facts.num_experts), world.gather_over_dispatch, policy.order
            )
            planning.append(time.perf_counter() - start)
        with session(tables, "replay", plans) as replayed:
            return policy.update(microbatches, replayed, loss)

    def timed(kind):
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        update(kind)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        busy = time.process_time() - busy
        (slowest,) = world.all_reduce([time.perf_counter() - start], dist.ReduceOp.MAX)
        (all_busy,) = world.all_reduce([busy])
        return slowest, all_busy

    rounds = []
    for number in range(options.pairs + 1):
        turn = number % len(KINDS)
        row = {kind: timed(kind) for kind in KINDS[turn:] + KINDS[:turn]}
        if number:  # the first warms up
            rounds.append(row)
    micro = micro_measurements(facts.num_experts, facts.top_k, facts.hidden_size, options.tokens)
    counter, waits = LayerWaits().attach(policy.chunks), {}
    for kind in KINDS:
        counter.counts = counter.waits = counter.reads = counter.dispatches = 0
        update(kind)
        waits[kind] = asdict(counter)
    if dist.get_rank() == 0:
        model = f"{facts.layers} layers, {facts.top_k} of {facts.num_experts} experts, hidden {facts.hidden_size}"
        seen = {"model": model, "rounds": rounds, "planning": planning[1:], "waits": waits, "micro": micro}
        (options.rank_of / "seen.json").write_text(json.dumps(seen))
    world.stop()


if __name__ == "__main__":
    sys.exit(main())
