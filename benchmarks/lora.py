"""Compares training steps of adapters with those of all weights:
`python benchmarks/lora.py [--rank 8] [--pairs 10] [--json FILE]`.

It uses expert-parallel ranks on this machine and a random Qwen3-MoE. A step is an update (forward, backward, optimizer)
under dispatch plans of the same routes, and the export of all weights for the sampler, into which adapters are merged.
Both kinds of steps run in turns. The benchmark prints median ratios over the rounds with their quartiles, for the wall
time of the slowest rank and for the processor time of all ranks, and how many parameters of rank 0 are trained.

After each update a real vLLM engine gets the adapters' version by both values of `train.lora.sync`: the bytes and the
wall time until it could sample.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial

from updates import ReplayedUpdates, arguments, described, measured, ratio, timed

KINDS, PARTS = ("full", "lora"), ("update", "export")
SYNCS = ("merged", "adapter")


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], model="mid", tokens=256)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--pairs", type=int, default=10, help="rounds over both kinds")
    measured(__file__, parser, run_rank, summary)
    return 0


def summary(options: argparse.Namespace, seen: dict) -> dict[str, object]:
    """Compute medians and quartiles from the results of the first rank."""
    result = described(options, seen) | {"rank of adapters": options.rank}
    for at, clock in enumerate(("clock", "processor")):
        seconds = {kind: {part: [row[kind][part][at] for row in seen["rounds"]] for part in PARTS} for kind in KINDS}
        for kind in KINDS:
            seconds[kind]["step"] = [sum(both) for both in zip(*seconds[kind].values(), strict=True)]
        for part in (*PARTS, "step"):
            for kind in KINDS:
                result[f"{clock} seconds of a {kind} {part}"] = statistics.median(seconds[kind][part])
            result |= ratio(seconds["lora"][part], seconds["full"][part], f"{clock}, {part}, lora : full")
    result["ratio_lora_to_full_step_seconds"] = result["clock, step, lora : full"]
    syncs = {sync: [row[sync] for row in seen["rounds"]] for sync in SYNCS}
    for sync in SYNCS:
        result[f"bytes of a sync, {sync}"] = seen["sent"][sync]
        result[f"seconds of a sync, {sync}"] = statistics.median(syncs[sync])
    result |= ratio(syncs["adapter"], syncs["merged"], "ratio_adapter_to_merged_seconds")
    result["ratio_adapter_to_merged_bytes"] = seen["sent"]["adapter"] / seen["sent"]["merged"]
    return result | {f"trained parameters of rank 0, {kind}": seen["trained"][kind] for kind in KINDS}


def run_rank(options: argparse.Namespace, bench: ReplayedUpdates) -> dict:
    import torch
    import torch.distributed as dist
    from weight_sync import settings

    from moe_rl.config.training import LoraConfig
    from moe_rl.rollout.engine import VllmEngine
    from moe_rl.rollout.sampler import Blocking

    lora = LoraConfig(rank=options.rank, alpha=2 * options.rank)
    policies = {"full": bench.policy, "lora": bench.new_policy(bench.parallel, lora)}
    plans = bench.plans()

    def update(kind):
        bench.policy = policies[kind]
        bench.update(plans)

    def export(kind):
        for run in policies[kind].export_rounds(torch.bfloat16, 2**28, host=True):
            for _ in run.tensors:
                pass

    senders, sent, version = {sync: sender_of(bench, policies["lora"], lora, sync) for sync in SYNCS}, {}, 0
    engine = Blocking(VllmEngine(settings(bench.folder / "model", bench.folder))) if dist.get_rank() == 0 else None

    def send(sync):
        sender = senders[sync]
        # The sampler has two senders here, so each must learn which version it holds.
        sender._held, sender._moves = version, policies["lora"].moves
        sent[sync] = sender.send(engine, version + 1)

    rounds = []
    for number in range(options.pairs + 1):
        kinds = KINDS[number % 2 :] + KINDS[: number % 2]
        row = {
            kind: {part: timed(partial(work, kind)) for part, work in zip(PARTS, (update, export), strict=True)}
            for kind in kinds
        }
        for sync in SYNCS[number % 2 :] + SYNCS[: number % 2]:
            row[sync], _ = timed(partial(send, sync))
            version += 1
        if number:  # the first round warms up
            rounds.append(row)
    if engine is not None:
        engine.close()
    trained = {
        kind: sum(p.numel() for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad)
        for kind, policy in policies.items()
    }
    return {"rounds": rounds, "trained": trained, "sent": sent}


def sender_of(bench: ReplayedUpdates, policy, lora, sync: str):
    """Make a sender of the policy's weights, or of its adapters alone."""
    from moe_rl.config.sampling_keys import RolloutConfig
    from moe_rl.config.training import OptimizerConfig, TrainConfig
    from moe_rl.megatron import world
    from moe_rl.weights.sender import WeightSender

    lengths = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_completion_tokens": 1}
    rollout, lora = RolloutConfig(**lengths, dtype="bfloat16"), lora.model_copy(update={"sync": sync})
    train = TrainConfig(dtype=bench.dtype, microbatch_tokens=1024, optimizer=OptimizerConfig(lr=1e-12), lora=lora)
    return WeightSender(policy, rollout, bench.folder / sync, world, train=train)


if __name__ == "__main__":
    sys.exit(main())
