"""One rank of the tests of model families: many cases in one process group.

    torchrun --nproc-per-node N worker.py CASES OUT

CASES: JSON {name: {"checkpoint": path, "parallel": ParallelConfig, "mode": replay | native, "recompute": none | full,
"dtype": of the trainer, "expert_bias_rate", "router_aux_loss": numbers, "resume": whether to save and load a
checkpoint}}. Rank r writes OUT/rank<r>.pt, {name: what it saw}.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from moe_rl.config.hf import read_model
from moe_rl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.megatron import checkpoint, hf_map, world
from moe_rl.megatron.microbatch import pack
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.planning.packing import pack as plan_packing
from moe_rl.replay.routes import microbatch_routes
from moe_rl.replay.session import ReplaySession
from moe_rl.trace import TraceSpec
from tests.distributed.families.data import batch

FINALIZE = "megatron.core.distributed.finalize_model_grads"


def own_share(facts, parallel, layers):
    """(number of sequences of the batch, this rank's microbatches, their routes in its layers)."""
    sequences, routes = batch(facts)
    spec = TraceSpec.from_layers("test", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
    columns = [facts.moe_layers.index(layer) for layer in layers]
    rank, ranks = world.data_parallel()
    plan = plan_packing([s.forwarded for s in sequences], ranks=ranks, microbatch_tokens=40)[rank]
    microbatches = [pack(sequences, indices, world.device()) for indices in plan]
    tables = [
        microbatch_routes(
            [routes[i][:, columns] for i in m.indices],
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


def whole_gradients(policy):
    """Main gradients under Hugging Face names. The distributed optimizer leaves each rank one reduced piece: gather."""
    for buffer in [b for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            pieces = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(pieces, mine, group=group)
            bucket.grad_data.copy_(torch.cat(pieces))
    chunks = map(unwrap, policy.chunks)
    gradients = hf_map.export(chunks, policy.facts, dense=True, experts=True, get=lambda p: p.main_grad)
    return {name: g.cpu().clone() for name, g in gradients}


def exported(policy):
    return {name: t.clone() for name, t in policy.export(torch.float32, dense=True, experts=True).items()}


def run(case, out):
    parallel = ParallelConfig.model_validate(case["parallel"])
    folder, mode, recompute = Path(case["checkpoint"]), case.get("mode", "replay"), case.get("recompute", "none")
    facts = read_model(folder)
    train = TrainConfig(
        dtype=case.get("dtype", "float32"),
        microbatch_tokens=40,
        recompute=recompute,
        expert_bias_rate=case.get("expert_bias_rate", 0.0),
        router_aux_loss=case.get("router_aux_loss", 0.0),
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9),
    )
    policy = Policy(facts, train, parallel, folder, temperature=1.0)
    loaded = exported(policy)
    count, microbatches, tables = own_share(facts, parallel, policy.layers)

    def within(name, call, **options):
        if mode == "native":
            return call(None), None
        session = ReplaySession(
            tables, policy.layers, mode=mode, name=name, rank=dist.get_rank(), any_stage=world.any_stage, **options
        )
        with session:
            result = call(session)
        return result, session.tally.as_dict()

    def loss(number, values):
        m = microbatches[number]
        return scale * -(values * m.advantages[m.sequence_ids]).sum() / count

    def update(session):
        return policy.update(microbatches, session, loss)

    scale, loads = 1.0, []

    def look(load, *args, **kwargs):
        """Stands for megatron's function that moves the biases, by the load [L, E] that it sums over ranks in place."""
        moved = move(load, *args, **kwargs)
        loads.append(load.clone())
        return moved

    move = sys.modules[FINALIZE].get_updated_expert_bias
    logprobs, forward = within("logprobs", lambda s: policy.logprobs(microbatches, s), compare_native=True)
    with mock.patch.object(sys.modules[FINALIZE], "get_updated_expert_bias", look):
        result, backward = within("update", update, recomputes=recompute == "full")
    seen = {
        "layers": policy.layers,
        "microbatches": [m.indices for m in microbatches],
        "logprobs": {
            i: lp[m.sequence_ids == n].cpu()
            for m, lp in zip(microbatches, logprobs, strict=True)
            for n, i in enumerate(m.indices)
        },
        "aux_loss": result.aux_loss,
        "grads": whole_gradients(policy),
        "loads": dict(zip(policy.layers, loads[0], strict=True)) if loads else {},
        "loaded": loaded,
        "updated": exported(policy),
        "tallies": [forward, backward],
    }
    if case.get("resume"):
        checkpoint.save(out / "checkpoints", 1, policy, {}, keep=1)
        resumed = Policy(facts, train, parallel, folder, temperature=1.0)
        checkpoint.load(checkpoint.latest(out / "checkpoints"), resumed)
        seen["resumed"] = exported(resumed)
        scale = float("nan")
        skipped, _ = within("skipped", update, recomputes=recompute == "full")
        seen["skipped"] = skipped.applied, exported(policy)
    return seen


def main():
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    world.start(ParallelConfig(), seed=1, timeout_seconds=60)
    seen = {}
    for name, case in cases.items():
        world.parallel_state.destroy_model_parallel()
        with mock.patch("torch.distributed.init_process_group"):  # the groups of the next layout, among the same ranks
            world.start(ParallelConfig.model_validate(case["parallel"]), seed=1, timeout_seconds=60)
        seen[name] = run(case, out)
    torch.save(seen, out / f"rank{dist.get_rank()}.pt")
    world.stop()


if __name__ == "__main__":
    main()
