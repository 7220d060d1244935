"""Measures what replay and its proof cost a training step: `python benchmarks/replay.py [--rounds 7] [--json FILE]`.

It trains a random Qwen3-MoE on one rank, and replays the routes that its own routers chose. It prints

- the share of an update's wall time that the replay pass takes: it looks routes up, counts, and makes all checks at
  the end. The share is measured inside the update itself, so that a noisy machine disturbs both alike;
- the same share of the old-logprob pass, which also compares the routers' own choice with the record and runs the
  alignment test;
- the ratio of the time of an update under replay to that of one that routes natively, in turns: median and quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from models import SHAPES, make_model
from output import quartiles, tell

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}

TIMED = ("begin_forward", "routes", "native_rows", "take", "observe_native", "check_dispatch", "__exit__")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid", choices=sorted(SHAPES), help="shape of the random model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    tell(result, options.json)
    return 0


class Timer:
    """Measures the seconds inside the pass's methods. Methods that call each other are counted once."""

    def __init__(self, kind):
        self.kind, self.seconds, self.depth = kind, 0.0, 0

    def install(self, names):
        self.kept = {name: getattr(self.kind, name) for name in names}
        for name, method in self.kept.items():
            setattr(self.kind, name, self._timed(method))

    def remove(self):
        for name, method in self.kept.items():
            setattr(self.kind, name, method)

    def _timed(self, method):
        def timed(*args, **kwargs):
            start, self.depth = time.perf_counter(), self.depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - start

        return timed


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
    from moe_rl.megatron import world
    from moe_rl.megatron.microbatch import Work, pack
    from moe_rl.megatron.policy import Policy
    from moe_rl.models.hf import read_model
    from moe_rl.replay.alignment import AlignmentTest
    from moe_rl.replay.replay_pass import ReplayPass, Watch
    from moe_rl.replay.routes import RowPolicy
    from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
    from moe_rl.types import Provenance, Sequence, Span, sampled_by

    os.environ["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)
    world.start(ParallelConfig(), seed=1, timeout_seconds=60)
    path = make_model(options.model, folder / "model")
    (path / "tokenizer.json").write_text("{}")
    facts = read_model(path)
    train = TrainConfig(dtype="float32", microbatch_tokens=options.tokens * 2, optimizer=OptimizerConfig(lr=1e-6))
    policy = Policy(facts, train, ParallelConfig(), path, temperature=1.0)
    spec = TraceSpec.from_layers("bench", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
    rng = np.random.default_rng(0)
    microbatches, pairs = [], []
    for number in range(0, options.sequences, 2):
        pair = []
        for key in (f"s{number}", f"s{number + 1}"):
            tokens = rng.integers(0, facts.vocab, options.tokens + 1).tolist()
            half = options.tokens // 2
            pair.append(
                Sequence(key, tuple(tokens[:half]), tuple(tokens[half:]), np.zeros(len(tokens) - half, np.float32),
                         1.0, sampled_by(0, len(tokens) - half), None)
            )  # fmt: skip
        microbatches.append(pack(pair, [0, 1], world.device()))
        pairs.append(pair)

    # The alignment test refuses random routes. So the routers choose the routes that are then replayed.
    store, native = TraceStore(folder), RowPolicy(missing="native")
    given = {"weight_version": 0, "layers": policy.layers}
    tables = [
        m.read_routes(store, pair, spec, policy=native, **given) for m, pair in zip(microbatches, pairs, strict=True)
    ]

    def work():
        return [Work(m, t, m.rollout_logprobs) for m, t in zip(microbatches, tables, strict=True)]

    recorded = policy.score(work(), "record", "bench").seen.recorded
    with ShardWriter(folder, "bench", spec) as writer:
        for pair, table in zip(pairs, recorded, strict=True):
            rows = np.stack([table.routes[layer].numpy() for layer in policy.layers], 1).astype(np.uint8)
            for at, sequence in enumerate(pair):
                fed = np.array((sequence.prompt_token_ids + sequence.token_ids)[:-1], np.int32)
                routes = rows[at * len(fed) : (at + 1) * len(fed)]
                ref = writer.add(sequence.key, routes, fed, [Span(len(fed), 0, Provenance.PREFILL)])
                pair[at] = replace(sequence, routes=signed(ref, routes, spec.moe_layers, fed))
    tables = [m.read_routes(store, pair, spec, **given) for m, pair in zip(microbatches, pairs, strict=True)]

    def loss(number, logprobs):
        return -logprobs.sum() / 1e4

    def timed(run):
        timer = Timer(ReplayPass)
        timer.install(TIMED)
        start = time.perf_counter()
        try:
            run()
        finally:
            timer.remove()
        return time.perf_counter() - start, timer.seconds

    def update(mode):
        policy.update(work(), loss, mode, "bench")

    rows = []
    for number in range(options.rounds + 1):
        replayed = timed(lambda: update("replay"))
        native = timed(lambda: update("observe"))
        test = AlignmentTest(policy.layers, [table.places for table in tables], world.device())
        watch = Watch(native=True, align=test)
        forward = timed(lambda watch=watch: policy.score(work(), "replay", "bench", watch))
        if number:  # the first warms up
            rows.append((replayed, native, forward))
    world.stop()
    low, middle, high = quartiles([replayed[0] / native[0] for replayed, native, _ in rows])
    return {
        "model": f"{facts.layers} layers, {facts.top_k} of {facts.num_experts} experts, hidden {facts.hidden_size}",
        "tokens of an update": options.sequences * options.tokens,
        "pass's share of an update": statistics.median(r[1] / r[0] for r, _, _ in rows),
        "pass's share of an old-logprob pass": statistics.median(f[1] / f[0] for _, _, f in rows),
        "update under replay : native": middle,
        "quartiles": [round(low, 3), round(high, 3)],
        "seconds of an update": statistics.median(r[0] for r, _, _ in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
