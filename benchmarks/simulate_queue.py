"""Simulates a queue of groups, `rollout.in_flight`, beside fixed shares: `python benchmarks/simulate_queue.py
[--json FILE]`.

A MODEL, NOT A MEASUREMENT: the engines and lengths of benchmarks/simulate_pipeline.py. 16 engines of 2 GPUs, each of
which decodes 128 requests at once, sample one batch. The first needs `slow` times as long for everything. Seconds are
means of five batches of other lengths, until the last completion has ended.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from pathlib import Path
from statistics import fmean

from simulate_cluster import read_costs
from simulate_pipeline import COSTS, MODEL, Cluster, Costs, Engine, Pool, Work

from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_published

ENGINES, SEEDS = 16, 5


def sample_seconds(costs: Costs, facts: ModelFacts, work: Work, slow: float, in_flight: int | None) -> float:
    """Return the seconds until a batch is sampled. in_flight None: each engine gets its share at the start."""
    engines = [Engine(costs, facts, Cluster(2 * ENGINES, 0)) for _ in range(ENGINES)]
    first = engines[0]
    first.step_seconds = [slow * seconds for seconds in first.step_seconds]
    first.per_token, first.prefill = slow * first.per_token, slow * first.prefill
    pool, now, left = Pool(engines, work.lengths(0), work.prompt_tokens), 0.0, work.prompts * work.group
    groups = deque(range(work.prompts))
    if in_flight is None:
        for group in range(work.prompts):
            pool.submit(groups.popleft(), engines[group % ENGINES], now, 0)
    while left:
        while groups and in_flight is not None:
            fewest = min(engines, key=lambda engine: len(engine.waiting) + len(engine.running))
            if len(fewest.waiting) + len(fewest.running) >= in_flight:
                break
            pool.submit(groups.popleft(), fewest, now, 0)
        now = pool.next_end()
        left -= len(pool.advance(now, 0))
    return now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    (_, costs), facts, rows = read_costs(COSTS, Costs), read_published(MODEL), []
    print("| prompts x completions | slow | in flight | shares, s | queue, s | shares : queue |\n" + "|---" * 6 + "|")
    for prompts, in_flight in ((128, 32), (128, 64), (512, 64), (512, 128)):
        for slow in (1.0, 2.0, 4.0):
            works = [Work(prompts=prompts, seed=seed, steps=1, warmup=0) for seed in range(SEEDS)]
            shares, queue = (
                fmean(sample_seconds(costs, facts, work, slow, most) for work in works) for most in (None, in_flight)
            )
            print(f"| {prompts} x 16 | {slow:g} | {in_flight} | {shares:.0f} | {queue:.0f} | {shares / queue:.2f} |")
            rows.append({"prompts": prompts, "slow": slow, "in_flight": in_flight, "shares": shares, "queue": queue})
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
