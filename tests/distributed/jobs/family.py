"""A job for ranks: one case of the tests of model families."""

import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import WeightSyncError
from moe_rl.megatron import checkpoint, hf_map, world
from moe_rl.megatron.hf_files import CheckpointReader, Trained, write_checkpoint
from moe_rl.megatron.model import DTYPES, unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.models.hf import read_model
from moe_rl.proof import cases
from moe_rl.proof.rank import computing_as_asked
from moe_rl.proof.trial import Trial, whole_gradients
from moe_rl.replay.replay_pass import Watch
from tests.support.wrong_exports import FAULTS, plant
from tests.weights.taking import Taker, sender_of

FINALIZE = "megatron.core.distributed.finalize_model_grads"


def exported(policy):
    return {name: t.clone() for name, t in policy.export(torch.float32, dense=True, experts=True)}


def read_again(policy, facts, folder):
    """(bytes that loading takes from the files, bytes of the parameters that are loaded)."""
    reader, held = CheckpointReader(folder, facts), 0
    for chunk in map(unwrap, policy.chunks):
        hf_map.load(chunk, facts, reader)
        held += sum(p.numel() for entry in hf_map.entries(chunk, facts) for p in entry.parameters) * 4
    return reader.bytes_read, held


def write(policy, facts, folder, out):
    dense, experts = world.holds_first_replica()
    tensors = hf_map.export(map(unwrap, policy.chunks), facts, dense=dense, experts=experts)
    write_checkpoint(out, tensors, facts, CheckpointReader(folder, facts), torch.float32, shard_bytes=200_000)


def conserved(policy, sender, taker):
    """The names that a sampler got after an update, what the ranks are told when two experts of each have changed
    places in the export behind it, and how many tensors that were."""
    sender.send(taker, 1)
    fired, told = plant(policy, FAULTS["two experts permuted"], at=0), "nothing"
    try:
        sender.send(taker, 2)
    except WeightSyncError as error:
        told = str(error)
    del policy.export_rounds
    return sorted(taker.weights) if taker else [], told, len(fired)


def run(case):
    """What this rank saw. case: {"checkpoint": path, "parallel", "train", "overlap_chunks": as of a proof's case,
    "mode": replay | native, "resume": a folder to save a checkpoint in and load it from, "write": one for a Hugging
    Face checkpoint of the loaded weights}."""
    world.lay_out(ParallelConfig.model_validate(case["parallel"]), seed=1)
    folder, mode = Path(case["checkpoint"]), case.get("mode", "replay")
    mode = None if mode == "native" else mode
    facts = read_model(folder)
    chunks = case.get("overlap_chunks", 0)
    shared = cases.Case(dist.get_world_size(), case["parallel"], case.get("train", {}), overlap_chunks=chunks)
    with computing_as_asked(shared):
        policy = Policy(facts, shared.train_config, shared.parallel_config, folder, temperature=1.0)
    loaded = exported(policy)
    sender, taker = sender_of(policy, folder, "shared_memory"), Taker(folder) if dist.get_rank() == 0 else None
    compared = sender.check_start(Trained(folder, facts, DTYPES[shared.train_config.dtype]))
    if case.get("write"):
        write(policy, facts, folder, Path(case["write"]))
    trial = Trial(facts, shared, policy)

    def loss(number, values):
        return scale * trial.loss(number, values)

    def update():
        return policy.update(trial.work(trial.tables, mode), loss, mode, "update")

    scale, loads = 1.0, []

    def look(load, *args, **kwargs):
        """Stands for megatron's function that moves the biases, by the load [L, E] that it sums over ranks in place."""
        moved = move(load, *args, **kwargs)
        loads.append(load.clone())
        return moved

    move = sys.modules[FINALIZE].get_updated_expert_bias
    scored = policy.score(trial.work(trial.tables, mode), mode, "logprobs", Watch(native=True))
    with mock.patch.object(sys.modules[FINALIZE], "get_updated_expert_bias", look):
        result, backward = update()
    seen = {
        "layers": policy.layers,
        "microbatches": [m.indices for m in trial.microbatches],
        "recomputed_layers": sorted(policy.recomputed_layers),
        "logprobs": trial.by_sequence(scored.logprobs),
        "aux_loss": result.aux_loss,
        "grads": whole_gradients(policy, facts),
        "loads": dict(zip(policy.layers, loads[0], strict=True)) if loads else {},
        "loaded": loaded,
        "updated": exported(policy),
        "tallies": [None if mode is None else asdict(seen.tally) for seen in (scored.seen, backward)],
        "conserved": (compared, *conserved(policy, sender, taker)),
    }
    if case.get("resume"):
        parallel, saved = shared.parallel_config, Path(case["resume"])
        Checkpoints(saved, parallel, keep=1, asynchronous=False).save(1, policy, {})
        resumed = Policy(facts, shared.train_config, parallel, folder, temperature=1.0)
        checkpoint.load(checkpoints.find(saved), resumed, parallel=parallel, seed=1)
        seen["resumed"] = exported(resumed)
        scale = float("nan")
        skipped, _ = update()
        seen["skipped"] = skipped.applied, exported(policy)
        resumed.release()
    seen["read"] = read_again(policy, facts, folder)
    policy.release()
    return seen
