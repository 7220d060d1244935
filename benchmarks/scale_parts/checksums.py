"""Makes the tables of routes of one rank's microbatches, with their checksums."""

from __future__ import annotations

import numpy as np
import torch
from routes import random_routes
from scale_parts.target import Target, at_full_size, cpu_seconds
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl.replay.routes import SequenceRoutes, microbatch_routes


class Operations(TorchDispatchMode):
    """Counts the operations of torch, each of which is a launch on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def measured(target: Target) -> dict[str, float]:
    """Return seconds and operations of the tables of a step on one rank of the first stage.

    The device is `meta`, whose tensors have no values: the host starts the operations, and their work is not done.
    """
    config, spec = target.config, target.spec
    layers = spec.moe_layers[: len(spec.moe_layers) // config.parallel.pipeline]
    rng = np.random.default_rng(0)
    pool = random_routes(1024, len(layers), spec.num_experts, spec.top_k)
    costs, operations = {}, Operations()
    for share in (1 / 4, 1 / 2, 1):
        tokens = int(share * config.train.microbatch_tokens)
        parts = []
        for number, rows in enumerate(_lengths(tokens, target)):
            routes = np.tile(pool, (-(-rows // len(pool)), 1, 1))[:rows]
            parts.append(SequenceRoutes.complete(f"s{number}", rng.integers(0, 1 << 17, rows), routes))

        def tables(parts=parts, tokens=tokens):
            microbatch_routes(
                parts,
                spec,
                layers=layers,
                names=[part.key for part in parts],
                fed=[part.token_ids for part in parts],
                source=None,
                padded_tokens=tokens,
                rows=np.arange(0, tokens, config.parallel.tensor),  # as many as a rank has, of every sequence
                expert_parallel=config.parallel.expert,
                device=torch.device("meta"),
            )

        tables()
        costs[tokens] = cpu_seconds(tables, 5)
        with operations:
            operations.count = 0
            tables()
    seconds, exponent = at_full_size(costs, config.train.microbatch_tokens)
    microbatches = target.rank_tokens / config.train.microbatch_tokens
    return {
        "tables_seconds": microbatches * seconds,
        "tables_exponent": exponent,
        "tables_operations": microbatches * operations.count,
    }


def _lengths(tokens: int, target: Target) -> list[int]:
    """Cut a microbatch into sequences of the mean length."""
    mean = target.tokens // target.sequences
    return [min(mean, tokens - at) for at in range(0, tokens, mean)]
