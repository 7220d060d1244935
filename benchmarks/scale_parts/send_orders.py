"""Plans how a rank's dispatchers send the rows of its microbatches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from routes import random_routes
from scale_parts.target import Target, at_full_size, cpu_seconds

from moe_rl.planning.dispatch import DispatchGroup
from moe_rl.replay.plans import plan_dispatch


def measured(target: Target) -> dict[str, float]:
    """Return seconds of the plans of a step on one rank of the first stage."""
    torch.set_num_threads(1)  # as a rank
    config, spec = target.config, target.spec
    parallel, ranks = config.parallel, config.parallel.expert * config.parallel.expert_tensor
    layers = spec.moe_layers[: len(spec.moe_layers) // parallel.pipeline]
    group = DispatchGroup(spec.num_experts, parallel.expert, parallel.expert_tensor, 0)
    order = np.tile(np.arange(spec.num_experts), (len(layers), 1))
    full, costs = config.train.microbatch_tokens // (parallel.tensor * parallel.context), {}
    for rows in (full // 4, full // 2, full):
        routes = random_routes(rows, len(layers), spec.num_experts, spec.top_k)
        by_layer = {layer: torch.from_numpy(routes[:, at].copy()) for at, layer in enumerate(layers)}
        table = SimpleNamespace(routes=by_layer, native=None)

        def planned(table=table):
            plan_dispatch([table], layers, group, lambda counts: np.stack([counts] * ranks), order)

        planned()
        costs[rows] = cpu_seconds(planned, 5)
    seconds, exponent = at_full_size(costs, full)
    return {
        "send_orders_seconds": target.rank_tokens / config.train.microbatch_tokens * seconds,
        "send_orders_exponent": exponent,
    }
