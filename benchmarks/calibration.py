"""Times the parts of a dispatch one by one, on all ranks together, for benchmarks/step_overhead.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import permute

from moe_rl.megatron import world
from moe_rl.planning.dispatch import send_order
from moe_rl.replay.checksum import RowSalts
from moe_rl.trace.source_sum import row_salts

REPEATS = 60


def micro_measurements(experts: int, top_k: int, hidden: int, rows: int) -> dict[str, float]:
    """Return the median seconds of each part on the slowest rank. rows: rows of a microbatch on a rank.

    Two exchanges are between all ranks: that of the counts of experts, and the all-to-all of every row's hidden state.
    gemm multiplies all rows with a matrix as wide as two hidden sizes.
    """
    rng, device = np.random.default_rng(dist.get_rank()), world.device()
    routes = np.argsort(rng.random((rows, experts)), -1)[:, :top_k].astype(np.int16)
    entries = torch.from_numpy(send_order(routes, np.arange(experts))).to(device)
    chosen = torch.from_numpy(routes).to(device)
    scores, states = torch.rand(rows, experts, device=device), torch.randn(rows, hidden, device=device)
    routing_map = torch.zeros(rows, experts, dtype=torch.bool, device=device).scatter_(1, chosen.long(), True)
    weights = scores * routing_map
    salts = torch.from_numpy(row_salts("micro", np.arange(rows)).view(np.int64)).to(device)
    owner = torch.zeros(rows, dtype=torch.int64, device=device)
    fed = RowSalts(torch.arange(rows, device=device), salts, owner, 1, experts)
    sums = fed.chosen(0, chosen)
    counts, ranks = routing_map.sum(0).long(), dist.get_world_size()
    everyone = torch.empty(ranks * experts, dtype=torch.int64, device=device)
    sent = states.repeat_interleave(top_k, 0)[: rows * top_k // ranks * ranks].contiguous()
    got, matrix = torch.empty_like(sent), torch.randn(hidden, 2 * hidden, device=device)

    def planned():
        order = torch.div(entries, experts, rounding_mode="floor").long()
        return states.index_select(0, order), weights.reshape(-1).index_select(0, entries)

    parts: dict[str, Callable[[], object]] = {
        "exchange of counts": lambda: dist.all_gather_into_tensor(everyone, counts),
        "all-to-all": lambda: dist.all_to_all_single(got, sent),
        "gemm": lambda: sent @ matrix,
        "counts": lambda: routing_map.sum(0).long().tolist(),
        "permutation": lambda: permute(states, routing_map, probs=weights, num_out_tokens=rows * top_k),
        "planned permutation": planned,
        "checksum": lambda: fed.applied(0, routing_map) != sums,
        "check of the plan": lambda: ~routing_map.reshape(-1).index_select(0, entries).all(),
        "top-k": lambda: torch.topk(scores, top_k, dim=1),
        "take": lambda: scores.gather(1, chosen.long()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(REPEATS):
        for name, part in parts.items():
            dist.barrier()
            start = time.perf_counter()
            part()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    medians = [statistics.median(values) for values in seconds.values()]
    return dict(zip(parts, world.all_reduce(medians, dist.ReduceOp.MAX), strict=True))
