"""Measures and plans the peak of training passes on one CPU rank. Writes a JSON object to standard output.

The measurement counts the bytes of every tensor storage that an operation returns, until the storage is freed. It
leaves out what existed before: parameters, main gradients, the microbatch.
"""

from __future__ import annotations

import gc
import json
import sys
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.live_bytes import LiveBytes
from moe_rl.config.layout import chunk_layers, make_layout
from moe_rl.config.training import ParallelConfig
from moe_rl.megatron import model, schedule, world
from moe_rl.megatron.microbatch import Microbatch, pack
from moe_rl.megatron.policy import Policy
from moe_rl.objectives import logprobs
from moe_rl.planning import activations
from moe_rl.planning.activations import Shape, stage_activations
from moe_rl.planning.packing import alike
from moe_rl.types import Sequence, sampled_by
from tests.planning.activation_cases import Case, cases


def sequences(case: Case) -> list[Sequence]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, case.facts.vocab, sum(lengths)).tolist() for lengths in case.lengths]
    return [
        Sequence(
            key=f"s{number}", prompt_token_ids=tuple(run[:prompt]), token_ids=tuple(run[prompt:]),
            rollout_logprobs=np.zeros(completion, np.float32), reward=0.0,
            versions=sampled_by(0, completion), routes=None,
        )
        for number, (run, (prompt, completion)) in enumerate(zip(tokens, case.lengths, strict=True))
    ]  # fmt: skip


def measured(case: Case, microbatch: Microbatch) -> int:
    policy = Policy(case.facts, case.train, ParallelConfig(), None, temperature=1.0)
    there = [microbatch.tokens, microbatch.positions, microbatch.predicts, microbatch.targets]
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
        there += [*chunk.parameters(), *chunk.module.buffers()]
        there += [buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def run():
        given = schedule.training_pass(
            policy.chunks, [microbatch], None, lambda number, values: -values.sum(), 1.0, lambda: None
        )
        get_forward_backward_func()(**given)

    run()  # caches are filled
    with LiveBytes(there) as counter:
        run()
    policy.release()
    gc.collect()
    return counter.peak


def planned(case: Case, microbatch: Microbatch) -> int:
    lengths, parallel = microbatch.lengths, ParallelConfig()
    shape = Shape(
        rows=sum(lengths),
        padded_rows=sum(len(group) * max(lengths[i] for i in group) for group in alike(lengths)),
        longest=max(lengths),
        predicted=len(microbatch.predicts),
        dtype=case.train.dtype,
    )
    return stage_activations(
        case.facts, make_layout(parallel, case.facts, 1), case.train, shape, stage=0,
        runs=chunk_layers(case.facts, parallel)[0], microbatches=1,
    ).peak_bytes  # fmt: skip


def fill(chunk: torch.nn.Module, *unused) -> None:
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter.data, std=0.05)


def main() -> None:
    torch.manual_seed(0)
    model.CheckpointReader, model.hf_map.load = lambda *args: None, fill
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch("torch.distributed.init_process_group"):
        world.start(ParallelConfig(), seed=1, timeout_seconds=60)
    found = {}
    for case in cases():
        chosen = sequences(case)
        microbatch = pack(chosen, range(len(chosen)), torch.device("cpu"))
        with (
            mock.patch.object(logprobs, "_CHUNK_ELEMENTS", case.logits_at_once),
            mock.patch.object(activations, "LOGITS_AT_ONCE", case.logits_at_once),
        ):
            found[case.name] = measured(case, microbatch), planned(case, microbatch)
    world.stop()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
