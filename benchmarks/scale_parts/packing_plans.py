"""Packs the sequences of a step by the load of their experts: prompts of six kinds, each with experts of its own."""

from __future__ import annotations

import inspect

import numpy as np
from scale_parts.target import Target, at_full_size, cpu_seconds

from moe_rl.planning.balance import pack_by_load
from moe_rl.train.shares import assign

_KINDS = 6


def measured(target: Target) -> dict[str, float]:
    """Return the seconds that all ranks wait for the plans of a step, and what the plans gain."""
    train, parallel, spec = target.config.train, target.config.parallel, target.spec
    ranks = target.config.cluster.gpus // (parallel.tensor * parallel.context * parallel.pipeline)
    exchange = max(1, parallel.expert * parallel.expert_tensor // parallel.tensor)
    rng = np.random.default_rng(0)
    full, costs, gained = target.sequences // train.updates_per_step, {}, 0.0
    for count in (full // 4, full // 2, full):
        kinds = rng.integers(0, _KINDS, count)
        lengths = rng.integers(target.prompt_tokens, target.longest, count).tolist()
        shares = np.exp(0.5 * rng.standard_normal((_KINDS, len(spec.moe_layers), parallel.expert)))
        shares /= shares.sum(axis=2, keepdims=True)
        mean = shares[kinds] * np.multiply(lengths, spec.top_k)[:, None, None]
        loads = rng.poisson(mean).astype(np.int32)

        def planned(lengths=lengths, loads=loads):
            return pack_by_load(
                lengths, loads, ranks=ranks, microbatch_tokens=train.microbatch_tokens, exchange=exchange
            )[1]

        report = planned()
        gained = report.by_length - report.planned
        costs[count] = cpu_seconds(planned, 1)
    seconds, exponent = at_full_size(costs, full)
    # Where the updates are planned together, each is planned by another rank at the same time.
    together = "updates" in inspect.signature(assign).parameters
    return {
        "packing_seconds": seconds if together else train.updates_per_step * seconds,
        "packing_exponent": exponent,
        "packing_gained_points": 100 * gained,
    }
