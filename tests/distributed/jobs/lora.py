"""Jobs for ranks: adapters in one layout."""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import ReplayError, WeightSyncError
from moe_rl.megatron import adapters, checkpoint, lora, world
from moe_rl.megatron.frozen_policy import BaseOfAdapters
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.models.hf import read_model
from moe_rl.proof import cases
from moe_rl.proof.rank import computing_as_asked
from moe_rl.proof.trial import Trial, whole_main_gradients
from moe_rl.replay.replay_pass import Watch
from tests.support.adapted import ALPHA, RANK
from tests.weights.taking import Taker, sender_of

WAYS = ("shared_memory", "disk", "broadcast")


def policy_of(case, folder):
    settings = {"rank": RANK, "alpha": ALPHA, "targets": case["targets"], "start": case.get("start")}
    settings["shared_outer"] = case.get("shared", False)
    train = case.get("train", {}) | {"lora": settings}
    shared = cases.Case(dist.get_world_size(), case["parallel"], train)
    facts = read_model(folder)
    with computing_as_asked(shared):
        return facts, shared, Policy(facts, shared.train_config, shared.parallel_config, folder, temperature=1.0)


def adapters_of(policy, facts, get=torch.Tensor.detach):
    dense, experts = world.holds_first_replica()
    run = lora.exported(map(unwrap, policy.chunks), facts, dense=dense, experts=experts)
    found = lora.whole_tensors(run, facts, get)
    return {name: tensor.clone() for name, tensor in found}


def exported(policy):
    dense, experts = world.holds_first_replica()
    return {name: t.clone() for name, t in policy.export(torch.float32, dense=dense, experts=experts)}


def sent(policy, checkpoint, folder, way, train):
    """What a sampler makes of the adapters alone, and how many bytes it got; None on ranks but the first."""
    lora = train.lora.model_copy(update={"sync": "adapter"})
    taker = Taker(checkpoint, "float32") if dist.get_rank() == 0 else None
    sender = sender_of(policy, folder, way, train=train.model_copy(update={"lora": lora}), weight_bucket_mib=0.02)
    count = sender.send(taker, 1)
    return None if taker is None else (taker.weights, taker.intake.holding().digest, count)


def run(case):
    """What this rank saw of a pass and of an update from the adapters of case["start"]."""
    world.lay_out(ParallelConfig.model_validate(case["parallel"]), seed=1)
    folder = Path(case["checkpoint"])
    facts, shared, policy = policy_of(case, folder)
    trial = Trial(facts, shared, policy)
    begun = adapters_of(policy, facts)
    scored = policy.score(trial.work(trial.tables, "replay"), "replay", "logprobs", Watch(native=True))
    seen = {"logprobs": trial.by_sequence(scored.logprobs), "begun": begun, "merged": exported(policy)}
    work = trial.work(trial.tables, None)
    BaseOfAdapters(policy).score(work)
    seen["reference"] = trial.by_sequence([one.ref_logprobs for one in work])
    if case.get("peft"):
        lora.write_peft(Path(case["peft"]), map(unwrap, policy.chunks), facts, shared.train_config.lora, folder)
    lora.check_counts(map(unwrap, policy.chunks), facts)
    result, _ = trial.update(trial.tables)
    whole_main_gradients(policy)
    trained = [parameter for chunk in policy.chunks for parameter in chunk.parameters() if parameter.requires_grad]
    seen |= {
        "grad_norm": result.grad_norm,
        "grads": adapters_of(policy, facts, get=lambda parameter: parameter.main_grad),
        "updated": adapters_of(policy, facts),
        "updated_merged": exported(policy),
        "trained": sum(parameter.numel() for parameter in trained),
        "with_main_grad": sum(hasattr(p, "main_grad") for chunk in policy.chunks for p in chunk.parameters()),
        "adapter_parameters": len(trained),
        "buffers": [b.numel for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers],
        "runs": [[one.layer_number - 1 for one in unwrap(chunk).decoder.layers] for chunk in policy.chunks],
    }
    policy.content(torch.float32, updated=True)  # refuses copies that differ, and parameters no optimizer wrote
    if case.get("sync"):
        seen["sent"] = [sent(policy, folder, Path(case["sync"]) / way, way, shared.train_config) for way in WAYS]
    if case.get("save"):
        Checkpoints(Path(case["save"]), shared.parallel_config, keep=1, asynchronous=False).save(1, policy, {})
        trial.update(trial.tables)
        seen["continued"] = adapters_of(policy, facts)
    policy.release()
    return seen


def damaged(case):
    """What is said after an update of adapters if one number changes in rank 1's memory: case["where"] is the layer
    within a transformer layer, and which parameter of its adapter."""
    world.lay_out(ParallelConfig.model_validate(case["parallel"]), seed=1)
    facts, shared, policy = policy_of(case, Path(case["checkpoint"]))
    trial = Trial(facts, shared, policy)
    trial.update(trial.tables)
    policy.content(torch.float32, updated=True)
    parameter = unwrap(policy.chunks[0]).decoder.layers[1].get_parameter(case["where"])
    if dist.get_rank() == 1:
        parameter.data.flatten()[0] += 1
    told = "nothing"
    try:
        policy.content(torch.float32, updated=True)
    except WeightSyncError as error:
        told = str(error)
    policy.release()
    return told


def count_twice(case):
    """What `check_counts` says of a model whose row-parallel layers sum their adapters' products once more."""
    world.lay_out(ParallelConfig.model_validate(case["parallel"]), seed=1)
    facts, _, policy = policy_of(case, Path(case["checkpoint"]))
    real, fired = adapters.reduce_scatter_to_sequence_parallel_region, []

    def again(low, group):
        fired.append(len(low))
        return group.size() * real(low, group=group)

    lora.check_counts(map(unwrap, policy.chunks), facts)
    with mock.patch.object(adapters, "reduce_scatter_to_sequence_parallel_region", again):
        try:
            lora.check_counts(map(unwrap, policy.chunks), facts)
            told = "nothing"
        except ReplayError as error:
            told = str(error)
    policy.release()
    return told, len(fired)


def resume(case):
    """The adapters after loading case["save"], and after one more update."""
    world.lay_out(ParallelConfig.model_validate(case["parallel"]), seed=1)
    facts, shared, policy = policy_of(case, Path(case["checkpoint"]))
    path = checkpoints.find(Path(case["save"]))
    state = checkpoint.load(path, policy, parallel=shared.parallel_config, seed=1)
    checkpoint.check_optimizer(path, policy, state["optimizer"])
    loaded = adapters_of(policy, facts)
    trial = Trial(facts, shared, policy)
    trial.update(trial.tables)
    seen = {"loaded": loaded, "continued": adapters_of(policy, facts), "updates": policy.updates}
    policy.release()
    return seen
