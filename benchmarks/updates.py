"""Runs updates of a model on expert-parallel ranks of this machine, for benchmarks that time training steps in turns.

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
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
from models import SHAPES, make_model
from output import quartiles, tell

from moe_rl.parent import torchrun


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
        bench = ReplayedUpdates(
            options.rank_of,
            options.ranks,
            lambda rank, vocab: random_microbatches(options, rank, vocab),
            options.dtype,
        )
        bench.leave(run_rank(options, bench))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(options.model, Path(folder) / "model")
        (path / "tokenizer.json").write_text("{}")
        subprocess.run(
            [*torchrun(options.ranks), file, *sys.argv[1:], "--rank-of", folder],
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
        **seen["memory"],
    }


def ratio(above: list[float], below: list[float], name: str) -> dict[str, object]:
    """Return the median of the rounds' ratios and their quartiles."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = quartiles(ratios)
    return {name: middle, f"{name}, quartiles": [round(low, 3), round(high, 3)]}


def random_microbatches(options: argparse.Namespace, rank: int, vocab: int) -> list[list[tuple[list[int], list[int]]]]:
    """Make microbatches of one sequence each, half prompt and half completion, different on every rank."""
    rng, half = np.random.default_rng(rank), options.tokens // 2
    runs = [rng.integers(0, vocab, options.tokens + 1).tolist() for _ in range(options.microbatches)]
    return [[(run[:half], run[half:])] for run in runs]


class ReplayedUpdates:
    """Holds on one rank the process group, the policy, microbatches, and the model's own routes for them."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        microbatches: Callable[[int, int], list[list[tuple[list[int], list[int]]]]],
        dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """Load the model in `folder`/model on all ranks.

        Args:
            microbatches: Called with (rank, size of the vocabulary); returns the tokens (prompt, completion) of each
                sequence of each microbatch.
        """
        import torch.distributed as dist

        from moe_rl.config.training import ParallelConfig
        from moe_rl.megatron import world
        from moe_rl.megatron.microbatch import pack
        from moe_rl.models.hf import read_model
        from moe_rl.replay.routes import RowPolicy
        from moe_rl.trace import TraceSpec
        from moe_rl.types import Sequence, sampled_by

        self.folder, self.dtype, self.parallel = folder, dtype, ParallelConfig(expert=ranks)
        world.start(self.parallel, seed=1, timeout_seconds=120)
        self.facts = facts = read_model(folder / "model")
        self.policy = self.new_policy(self.parallel)
        self.model = f"{facts.layers} layers, {facts.top_k} of {facts.num_experts} experts, hidden {facts.hidden_size}"
        self.model += f", experts {facts.moe_intermediate_size} wide"
        spec = TraceSpec.from_layers("bench", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
        self.microbatches, unrecorded = [], []

        for number, chosen in enumerate(microbatches(dist.get_rank(), facts.vocab)):
            sequences = [
                Sequence(
                    f"s{number}.{at}",
                    tuple(prompt),
                    tuple(completion),
                    np.zeros(len(completion), np.float32),
                    1.0,
                    sampled_by(0, len(completion)),
                    None,
                )
                for at, (prompt, completion) in enumerate(chosen)
            ]
            microbatch = pack(sequences, device=world.device())
            self.microbatches.append(microbatch)
            policy = RowPolicy(missing="native")  # nothing was recorded, so nothing is read from a store
            unrecorded.append(microbatch.read_routes(None, sequences, spec, weight_version=0, policy=policy))
        self.tables = self.policy.score(self._work(unrecorded, []), "record", "bench").seen.recorded

    def new_policy(self, parallel, lora=None):
        """Restore the model as it was made, on ranks in this layout, with adapters if `lora` describes them."""
        from moe_rl.config.training import OptimizerConfig, TrainConfig
        from moe_rl.megatron.policy import Policy

        optimizer = OptimizerConfig(lr=1e-12)
        train = TrainConfig(dtype=self.dtype, microbatch_tokens=1024, optimizer=optimizer, lora=lora)
        return Policy(self.facts, train, parallel, self.folder / "model", temperature=1.0)

    def plans(self, overlap_chunks: int = 0) -> list:
        """Return dispatch plans of the microbatches. All ranks call it together."""
        from moe_rl.replay.plans import plan_dispatch

        return plan_dispatch(self.tables, self.policy.dispatch_rules(overlap_chunks=overlap_chunks)).by_microbatch

    def update(self, plans: list | None) -> None:
        """Run forward, backward and optimizer. plans: None routes natively; [] replays without plans."""
        mode = None if plans is None else "replay"
        self.policy.update(self._work(self.tables, plans or []), self._loss, mode, "bench")

    def logprobs(self, plans: list) -> list:
        """Return the logprobs float32 [N] of each microbatch, replayed by these plans."""
        return list(self.policy.score(self._work(self.tables, plans), "replay", "bench").logprobs)

    def _work(self, tables: list, plans: list) -> list:
        from moe_rl.megatron.microbatch import Work

        work = zip_longest(self.microbatches, tables, plans)
        return [Work(microbatch, table, microbatch.rollout_logprobs, plan=plan) for microbatch, table, plan in work]

    @staticmethod
    def _loss(number, logprobs):
        return -logprobs.sum() / 1e4

    def leave(self, seen: dict) -> None:
        import torch
        import torch.distributed as dist

        from moe_rl.megatron import world

        if dist.get_rank() == 0:
            about = {"model": self.model, "device": world.device_name(), "memory": {}}
            if torch.cuda.is_available():
                peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                about["memory"] = {"most GiB allocated": peaks[0] / 2**30, "most GiB reserved": peaks[1] / 2**30}
            (self.folder / "seen.json").write_text(json.dumps(about | seen))
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
