"""One rank of the schedule tests: many cases, each a forward-only pass and an update, in one process group.

    torchrun --nproc-per-node N schedule_worker.py CHECKPOINT OUT CASES

CASES: a list of `Case` in JSON. Of each, rank r writes OUT/<name>-rank<r>.pt.
"""

import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from moe_rl.config.hf import read_model
from moe_rl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from tests.distributed.policy_worker import own_share, whole_gradients


class Case(msgspec.Struct, frozen=True, omit_defaults=True):
    """parallel, train: what differs from the defaults of ParallelConfig and TrainConfig. half_precision_config: build
    the megatron config as for bfloat16, which alone may overlap, and compute in float32. fault: "raises", an update
    that is broken off in the middle of its schedule comes first; or one of `plant`."""

    name: str
    parallel: dict[str, int]
    train: dict[str, str | int | bool] = {}
    half_precision_config: bool = False
    fault: str = ""


class BrokenOff(Exception):
    pass


def main():
    checkpoint, out, cases = Path(sys.argv[1]), Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=list[Case])
    world.start(ParallelConfig(**cases[0].parallel), seed=1, timeout_seconds=60)
    from megatron.core import parallel_state

    for number, case in enumerate(cases):
        if number:
            lay_out(ParallelConfig(**case.parallel))
        torch.save(run(case, checkpoint), out / f"{case.name}-rank{dist.get_rank()}.pt")
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def lay_out(parallel):
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def run(case, checkpoint):
    from moe_rl.megatron import hf_map, model
    from moe_rl.megatron.policy import Policy
    from moe_rl.replay.session import ReplaySession

    facts, parallel = read_model(checkpoint), ParallelConfig(**case.parallel)
    train = TrainConfig(
        **{"dtype": "float32", **case.train},
        microbatch_tokens=40,
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9),
    )
    build = computing_in_float32(model.TransformerConfig) if case.half_precision_config else model.TransformerConfig
    with mock.patch.object(model, "TransformerConfig", build):
        policy = Policy(facts, train, parallel, checkpoint, temperature=1.0)
    count, microbatches, tables = own_share(facts, parallel, policy.layers)

    def session(name, **options):
        return ReplaySession(
            tables, policy.layers, mode="replay", name=name, rank=dist.get_rank(), any_stage=world.any_stage, **options
        )

    def loss(number, values):
        m = microbatches[number]
        return -(values * m.advantages[m.sequence_ids]).sum() / count

    def break_off(number, values):
        if number == 1:
            raise BrokenOff
        return loss(number, values)

    chunks = [model.unwrap(chunk) for chunk in policy.chunks]
    plans = [mock.patch.object(chunk, "build_schedule_plan", wraps=chunk.build_schedule_plan) for chunk in chunks]
    asked = [plan.start() for plan in plans]
    with session("logprobs", compare_native=True) as first:
        logprobs = policy.logprobs(microbatches, first)
    plans_of_logprobs = sum(chunk.call_count for chunk in asked)
    if case.fault == "raises":
        with pytest.raises(BrokenOff), session("broken off", recomputed_layers=policy.recomputed_layers) as broken:
            policy.update(microbatches, broken, break_off)
        for chunk in asked:
            chunk.reset_mock()
    plant(case.fault, chunks)
    try:
        with session("update", recomputed_layers=policy.recomputed_layers) as second:
            result = policy.update(microbatches, second, loss)
    except ReplayError as error:
        return {"error": str(error)}
    weights = hf_map.export(chunks, facts, dense=True, experts=True)
    return {
        "logprobs": {
            i: lp[m.sequence_ids == n].clone()
            for m, lp in zip(microbatches, logprobs, strict=True)
            for n, i in enumerate(m.indices)
        },
        "grad_norm": result.grad_norm,
        "weights": {k: v.clone() for k, v in weights},
        "grads": whole_gradients(policy, facts),
        "tallies": [s.tally.as_dict() for s in (first, second)],
        "microbatches": len(microbatches),
        "layers": policy.layers,
        "recomputed_layers": sorted(policy.recomputed_layers),
        "plans": (plans_of_logprobs, sum(chunk.call_count for chunk in asked)),
    }


def computing_in_float32(transformer_config):
    def build(**settings):
        config = transformer_config(**{**settings, "bf16": True})
        config.bf16 = False
        return config

    return build


def plant(fault, chunks):
    """Take the key from the router's last binding instead of from the microbatch, in the last layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layer = chunks[-1].decoder.layers[-1]
    whole = layer._forward_attention

    bound = [None]

    def previous(*args, **kwargs):  # the key arrives when the router has gone on with that of the microbatch before
        out = whole(*args, **kwargs)
        bound.append(layer.mlp.router.handle)
        layer.mlp.router.handle = bound[-2]
        return out

    def unbound(*args, **kwargs):  # the key is bound where combined 1F1B does not pass
        return TransformerLayer._forward_attention(layer, *args, **kwargs)

    def bind(module, args, kwargs):
        layer.mlp.router.handle = kwargs["packed_seq_params"].replay

    if fault == "previous":
        layer._forward_attention = previous
    elif fault == "bound in forward":
        layer._forward_attention = unbound
        layer.register_forward_pre_hook(bind, with_kwargs=True)


if __name__ == "__main__":
    main()
