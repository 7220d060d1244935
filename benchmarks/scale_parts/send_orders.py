"""Plans how a rank's dispatchers send the rows of its microbatches."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import torch
from routes import random_routes
from scale_parts.target import Target, at_full_size

from moe_rl.planning.dispatch import DispatchGroup
from moe_rl.replay.plans import DispatchRules, plan_dispatch


def measured(target: Target) -> dict[str, float]:
    """Return seconds of the plans of a step on one rank of the first stage: those that its first pass waits for, and
    those that a thread spends beside the passes.

    The first pass waits for what plan_dispatch does in its caller's thread, and for the orders of one microbatch.
    """
    torch.set_num_threads(1)  # as a rank
    config, spec = target.config, target.spec
    parallel, ranks = config.parallel, config.parallel.expert * config.parallel.expert_tensor
    layers = spec.moe_layers[: len(spec.moe_layers) // parallel.pipeline]
    group = DispatchGroup(spec.num_experts, parallel.expert, parallel.expert_tensor, 0)
    order = np.tile(np.arange(spec.num_experts), (len(layers), 1))
    rules = DispatchRules(layers, group, lambda counts: np.stack([counts] * ranks), order)
    rows = config.train.microbatch_tokens // (parallel.tensor * parallel.context)
    routes = random_routes(rows, len(layers), spec.num_experts, spec.top_k)
    by_layer = {layer: torch.from_numpy(routes[:, at].copy()) for at, layer in enumerate(layers)}
    table = SimpleNamespace(routes=by_layer, native=None)
    threads = threading.active_count()

    def seconds(count: int) -> tuple[float, float]:
        """Return processor seconds of this thread and of the process for this many microbatches."""
        mine, all_ = time.thread_time(), time.process_time()
        plan_dispatch([table] * count, rules)
        mine = time.thread_time() - mine
        while threading.active_count() > threads:
            time.sleep(0.001)
        return mine, time.process_time() - all_

    seconds(1)
    one, costs, behind = [], {}, {}
    for count in (2, 4, 8):
        one.append(min(all_ - mine for mine, all_ in (seconds(1) for _ in range(3))))
        found = [seconds(count) for _ in range(3)]
        costs[count] = min(mine for mine, _ in found)
        behind[count] = min(all_ - mine for mine, all_ in found)
    microbatches = target.rank_tokens / config.train.microbatch_tokens
    caller, exponent = at_full_size(costs, microbatches)
    beside, _ = at_full_size(behind, microbatches)
    return {
        "send_orders_seconds": caller + min(one),
        "send_orders_exponent": exponent,
        "send_orders_seconds_beside_passes": beside - min(one),
    }
