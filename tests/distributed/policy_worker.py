"""One rank of the layout tests: run a forward-only pass and an update on fixed data, write what was seen.

    torchrun --nproc-per-node N policy_worker.py CHECKPOINT OUT PARALLEL DTYPE RECOMPUTE MODE FAULT

PARALLEL: a ParallelConfig in JSON. MODE replay | native | observe. FAULT none, or a fault to plant (see `main`). Rank r
writes OUT/rank<r>.pt.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.config.hf import read_model
from moe_rl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.megatron import world
from moe_rl.planning.packing import pack as plan_packing
from moe_rl.replay.routes import microbatch_routes
from moe_rl.trace import TraceSpec
from moe_rl.types import Sequence

LENGTHS = [(5, 4), (3, 9), (7, 1), (4, 6), (6, 3), (2, 8), (5, 5), (9, 2), (3, 3), (4, 7)]


def batch(facts):
    """The same random sequences and routes on every rank and in the reference."""
    rng = np.random.default_rng(11)
    sequences, routes = [], []
    for number, (prompt, completion) in enumerate(LENGTHS):
        tokens = rng.integers(0, facts.vocab, prompt + completion).tolist()
        sequences.append(
            Sequence(
                key=f"s{number}",
                prompt_token_ids=tuple(tokens[:prompt]),
                token_ids=tuple(tokens[prompt:]),
                rollout_logprobs=rng.normal(-6, 0.3, completion).astype(np.float32),
                advantage=float(rng.normal()),
                weight_version=0,
                routes=None,
            )
        )
        scores = rng.random((prompt + completion - 1, len(facts.moe_layers), facts.num_experts))
        routes.append(np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8))
    return sequences, routes


def train_config(dtype="float32", recompute="none"):
    return TrainConfig(
        dtype=dtype, microbatch_tokens=40, recompute=recompute, optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9)
    )


def own_share(facts, parallel, layers):
    """(number of sequences of the batch, this rank's microbatches, their routes in its layers)."""
    from moe_rl.megatron.microbatch import pack

    sequences, routes = batch(facts)
    spec = TraceSpec.from_layers("test", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
    rank, ranks = world.data_parallel()
    plan = plan_packing([s.forwarded for s in sequences], ranks=ranks, microbatch_tokens=40)[rank]
    microbatches = [pack(sequences, indices, world.device()) for indices in plan]
    tables = [
        microbatch_routes(
            [routes[i][:, layers] for i in m.indices],
            spec,
            layers=layers,
            padded_tokens=m.tokens.shape[1],
            rows=world.own_rows(m.tokens.shape[1]),
            expert_parallel=parallel.expert,
            device=world.device(),
        )
        for m in microbatches
    ]
    return len(sequences), microbatches, tables


def main():
    checkpoint, out, parallel, dtype, recompute, mode, fault = sys.argv[1:]
    checkpoint, out, parallel = Path(checkpoint), Path(out), ParallelConfig.model_validate_json(parallel)
    world.start(parallel, seed=1, timeout_seconds=60)
    from moe_rl.megatron import hf_map
    from moe_rl.megatron.model import unwrap
    from moe_rl.megatron.policy import Policy
    from moe_rl.replay.session import ReplaySession

    facts = read_model(checkpoint)
    policy = Policy(facts, train_config(dtype, recompute), parallel, checkpoint, temperature=1.0)
    rank = dist.get_rank()
    count, microbatches, tables = own_share(facts, parallel, policy.layers)

    def session(name, **kw):
        if mode == "native":
            return None
        return ReplaySession(tables, policy.layers, mode=mode, name=name, rank=rank, any_stage=world.any_stage, **kw)

    def within(session, run):
        if session is None:
            return run()
        with session:
            return run()

    fault = fault if rank == dist.get_world_size() - 1 else "none"  # one rank alone has it
    if fault == "swapped":  # another route than recorded reaches the dispatcher
        router = unwrap(policy.chunks[0]).decoder.layers[0].mlp.router
        whole = router.routing
        router.routing = lambda *a, **k: (lambda probs, chosen: (probs, chosen.roll(1, -1)))(*whole(*a, **k))
    if fault == "repeated":  # a router runs twice
        layer = unwrap(policy.chunks[-1]).decoder.layers[-1].mlp
        route = layer.route
        layer.route = lambda *a, **k: (route(*a, **k), route(*a, **k))[1]
    if fault == "missed":  # a router forgets its microbatch
        layer = unwrap(policy.chunks[0]).decoder.layers[0].mlp
        route = layer.route

        def forget(*a, **k):
            layer.router.handle = None
            return route(*a, **k)

        layer.route = forget

    first = session("logprobs", compare_native=True)
    logprobs = within(first, lambda: policy.logprobs(microbatches, first))

    def loss(number, values):
        m = microbatches[number]
        return -(values * m.advantages[m.sequence_ids]).sum() / count

    second = session("update", recomputes=recompute == "full")
    result = within(second, lambda: policy.update(microbatches, second, loss))
    weights = hf_map.export(map(unwrap, policy.chunks), facts, dense=True, experts=True)
    torch.save(
        {
            "logprobs": {
                i: lp[m.sequence_ids == n].cpu()
                for m, lp in zip(microbatches, logprobs, strict=True)
                for n, i in enumerate(m.indices)
            },
            "grad_norm": result.grad_norm,
            "weights": {k: v.cpu().clone() for k, v in weights},
            "grads": whole_gradients(policy, facts),
            "tallies": [None if s is None else s.tally.as_dict() for s in (first, second)],
        },
        out / f"rank{rank}.pt",
    )
    world.stop()


def whole_gradients(policy, facts):
    """Main gradients under Hugging Face names. The distributed optimizer leaves each rank one reduced piece: gather."""
    from moe_rl.megatron import hf_map
    from moe_rl.megatron.model import unwrap

    for buffer in [b for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            pieces = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(pieces, mine, group=group)
            bucket.grad_data.copy_(torch.cat(pieces))
    gradients = hf_map.export(map(unwrap, policy.chunks), facts, dense=True, experts=True, get=lambda p: p.main_grad)
    return {name: g.cpu().clone() for name, g in gradients}


if __name__ == "__main__":
    main()
