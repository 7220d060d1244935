"""Counts the experts of a sibling: a reference to the prompt of its group's first record, whose completion is long."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import numpy as np
from routes import random_routes
from scale_parts.target import Target, at_full_size, cpu_seconds

from moe_rl.trace import ShardWriter, TraceStore
from moe_rl.types import Provenance, Span


def measured(target: Target) -> dict[str, float]:
    """Return milliseconds of one sibling beside a completion of full length."""
    spec, prompt, costs = target.spec, target.prompt_tokens, {}
    pool = random_routes(prompt, len(spec.moe_layers), spec.num_experts, spec.top_k)
    for share in (1 / 4, 1 / 2, 1):
        rows = prompt + int(share * target.config.rollout.max_completion_tokens)
        routes = np.tile(pool, (-(-rows // prompt), 1, 1))[:rows]
        with tempfile.TemporaryDirectory() as root:
            with ShardWriter(root, "s", spec) as writer:
                ref = writer.add("k", routes, np.arange(rows), [Span(rows, 0, Provenance.DECODE)])
            store, sibling = TraceStore(root), replace(ref, rows=prompt)
            store.expert_counts(sibling)
            costs[rows] = cpu_seconds(lambda store=store, ref=sibling: store.expert_counts(ref), 7)
    seconds, exponent = at_full_size(costs, target.longest)
    return {"sibling_counts_ms": 1e3 * seconds, "sibling_counts_exponent": exponent}
