"""Follows a store over many steps: what a rank spends on the manifest in each, while old shards are removed."""

from __future__ import annotations

import os
import tempfile

from scale_parts.target import Target, at_full_size, cpu_seconds

from moe_rl.trace import ShardWriter, TraceStore

STEPS = (75, 150, 300)
KEPT = 4
FULL = 10_000


def measured(target: Target) -> dict[str, float]:
    """Return seconds of a step after 10,000 steps: check the new shards, open each, remove the old ones.

    Disks are left out: nothing is synced, and the shards are empty.
    """
    os.fsync = lambda fd: None
    spec, engines, costs = target.spec, target.config.cluster.engines, {}
    with tempfile.TemporaryDirectory() as root:
        trainer = TraceStore(root)

        def names(step):
            return [f"step{step:06d}-server{engine}" for engine in range(engines)]

        def step(number):
            trainer.check_published(names(number))
            for name in names(number):
                trainer.records(name)
            for name in names(number - KEPT) if number >= KEPT else ():
                trainer.remove(name)

        measured_steps = 8
        for number in range(STEPS[-1]):
            for name in names(number):
                ShardWriter(root, name, spec).publish()
            at = next(mark for mark in STEPS if number < mark)
            if number >= at - measured_steps:
                costs[at] = costs.get(at, 0.0) + cpu_seconds(lambda number=number: step(number), 1) / measured_steps
            elif number >= KEPT:
                for name in names(number - KEPT):
                    trainer.remove(name)
        lines = len((trainer._library.folder.path / "manifest.jsonl").read_bytes().splitlines())
    seconds, exponent = at_full_size(costs, FULL)
    return {
        "manifest_seconds_at_10000_steps": seconds,
        "manifest_exponent": exponent,
        f"manifest_lines_after_{STEPS[-1]}_steps": lines,
    }
