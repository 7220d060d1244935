"""Runs updates of a random model on expert-parallel ranks of this machine, for benchmarks that time training steps in
turns.

The replayed routes are those that the model's own routers choose, so native and replayed updates do the same work on
the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from models import SHAPES, make_model
from output import quartiles, tell


def arguments(description: str, *, model: str, tokens: int) -> argparse.ArgumentParser:
    """Add the options that all these benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=model, choices=sorted(SHAPES), help="shape of the random model")
    parser.add_argument("--ranks", type=int, default=2, help="expert-parallel ranks")
    parser.add_argument("--microbatches", type=int, default=2, help="microbatches of each rank")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of each microbatch")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the trainer")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--rank-of", type=Path, metavar="FOLDER", help=argparse.SUPPRESS
    )  # every rank reads the same file
    return parser


def measured(
    file: str,
    parser: argparse.ArgumentParser,
    run_rank: Callable[[argparse.Namespace, ReplayedUpdates], dict],
    summary: Callable[[argparse.Namespace, dict], dict],
) -> tuple[argparse.Namespace, dict]:
    """Run run_rank on every rank. Return the parsed arguments and a summary of what the first rank returned.

    Each rank runs `file` again, with a folder that has the model, and does not return from this function. The summary
    describes the model in words under "model".
    """
    options = parser.parse_args()
    if options.rank_of:
        bench = ReplayedUpdates(options)
        bench.leave(run_rank(options, bench))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(options.model, Path(folder) / "model")
        (path / "tokenizer.json").write_text("{}")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        subprocess.run(
            [*launcher, str(options.ranks), file, *sys.argv[1:], "--rank-of", folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        seen = json.loads((Path(folder) / "seen.json").read_text())
    tell(summary(options, seen), options.json)
    return options, seen


def described(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Return what was run, as the first lines of a result."""
    return {
        "model": seen["model"],
        "device": seen["device"],
        "dtype": options.dtype,
        "expert-parallel ranks": options.ranks,
        "microbatches of a rank": options.microbatches,
        "tokens of a microbatch": options.tokens,
        "rounds": len(seen["rounds"]),
    }


def ratio(above: list[float], below: list[float], name: str) -> dict[str, object]:
    """Return the median of the rounds' ratios and their quartiles."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = quartiles(ratios)
    return {name: middle, f"{name}, quartiles": [round(low, 3), round(high, 3)]}


class ReplayedUpdates:
    """Holds on one rank the process group, the policy, microbatches of random tokens, and the model's own routes for
    them.
    """

    def __init__(self, options: argparse.Namespace):
        import torch.distributed as dist

        from moe_rl.config.training import ParallelConfig
        from moe_rl.megatron import world
        from moe_rl.megatron.microbatch import pack
        from moe_rl.models.hf import read_model
        from moe_rl.replay.routes import SequenceRoutes
        from moe_rl.trace import TraceSpec, signed
        from moe_rl.types import RouteRef, Sequence, sampled_by

        self.options, self.parallel = options, ParallelConfig(expert=options.ranks)
        world.start(self.parallel, seed=1, timeout_seconds=120)
        self.facts = facts = read_model(options.rank_of / "model")
        self.policy = self.new_policy(self.parallel)
        self.model = f"{facts.layers} layers, {facts.top_k} of {facts.num_experts} experts, hidden {facts.hidden_size}"
        self.model += f", experts {facts.moe_intermediate_size} wide"
        spec = TraceSpec.from_layers("bench", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
        rng = np.random.default_rng(dist.get_rank())
        self.microbatches, unrecorded = [], []

        made_up = np.tile(np.arange(facts.top_k, dtype=np.uint8), (options.tokens, len(facts.moe_layers), 1))

        def read(sequence, fed, here):
            return SequenceRoutes.complete(sequence.key, fed, made_up)

        for number in range(options.microbatches):
            tokens = rng.integers(0, facts.vocab, options.tokens + 1).tolist()
            half, key = options.tokens // 2, f"s{number}"
            nothing = np.zeros(len(tokens) - half, np.float32)
            one = Sequence(
                key,
                tuple(tokens[:half]),
                tuple(tokens[half:]),
                nothing,
                1.0,
                sampled_by(0, len(nothing)),
                signed(RouteRef(key, options.tokens, ()), made_up, facts.moe_layers, np.array(tokens[:-1])),
            )
            microbatch = pack([one], [0], world.device())
            self.microbatches.append(microbatch)
            unrecorded.append(
                microbatch.routes([one], read, spec, layers=self.policy.layers, expert_parallel=options.ranks)
            )
        with self.policy.session(unrecorded, mode="record", name="bench") as own:
            self.policy.logprobs(self.microbatches, own)
        self.tables = own.recorded_routes()

    def new_policy(self, parallel):
        """Restore the model as it was made, on ranks in this layout."""
        from moe_rl.config.training import OptimizerConfig, TrainConfig
        from moe_rl.megatron.policy import Policy

        optimizer = OptimizerConfig(lr=1e-12)
        train = TrainConfig(dtype=self.options.dtype, microbatch_tokens=self.options.tokens, optimizer=optimizer)
        return Policy(self.facts, train, parallel, self.options.rank_of / "model", temperature=1.0)

    def plans(self, overlap_chunks: int = 0) -> list:
        """Return dispatch plans of the microbatches. All ranks call it together."""
        return self.policy.plan_dispatch(self.tables, overlap_chunks=overlap_chunks)

    def update(self, plans: list | None) -> None:
        """Run forward, backward and optimizer. plans: None routes natively; [] replays without plans."""
        if plans is None:
            self.policy.update(self.microbatches, None, self._loss)
            return
        with self.policy.session(self.tables, mode="replay", name="bench", plans=plans, training=True) as session:
            self.policy.update(self.microbatches, session, self._loss)

    @staticmethod
    def _loss(number, logprobs):
        return -logprobs.sum() / 1e4

    def leave(self, seen: dict) -> None:
        import torch.distributed as dist

        from moe_rl.megatron import world

        if dist.get_rank() == 0:
            about = {"model": self.model, "device": world.device_name()}
            (self.options.rank_of / "seen.json").write_text(json.dumps(about | seen))
        world.stop()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return wall seconds of the slowest rank and processor seconds of all ranks. All ranks call it together."""
    import torch
    import torch.distributed as dist

    from moe_rl.megatron import world

    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    busy = time.process_time() - busy
    (slowest,) = world.all_reduce([time.perf_counter() - start], dist.ReduceOp.MAX)
    (all_busy,) = world.all_reduce([busy])
    return slowest, all_busy
