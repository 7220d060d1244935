"""A job for two ranks: take steps on halves of every sequence, then on shares of the batch."""

import dataclasses
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.errors import ReplayError, RouteValidationError
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.microbatch import Work, pack
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.models.hf import read_model
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.train import shares as shares_of
from moe_rl.train.canary import Canary
from moe_rl.train.step import TrainStep
from moe_rl.types import Provenance, Sequence, Span, sampled_by
from tests.weights.taking import taken

CONFIG = Path(__file__).parents[3] / "configs/tiny_moe_cpu.yaml"
# Lengths of prompt and completion. 1 and 2 tokens are fed of some, where there are 4 chunks; no length is as any other.
LENGTHS = [(1, 1), (5, 4), (1, 2), (3, 9), (2, 2), (11, 13)]


def batch(facts, folder):
    """Random sequences, and a store with random routes for them."""
    rng = np.random.default_rng(5)
    spec = TraceSpec.of(facts)
    sequences = []
    with ShardWriter(folder, "step1", spec) as writer:
        for number, (prompt, completion) in enumerate(LENGTHS):
            tokens = tuple(rng.integers(0, facts.vocab, prompt + completion).tolist())
            scores = rng.random((len(tokens) - 1, len(facts.moe_layers), facts.num_experts))
            routes = np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8)
            spans = [Span(len(tokens) - 1, 0, Provenance.DECODE)]
            ref = writer.add(f"s{number}", routes, np.array(tokens[:-1], np.int32), spans)
            ref = signed(ref, routes, spec.moe_layers, tokens[:-1])
            logprobs, reward = rng.normal(-5, 0.3, completion).astype(np.float32), float(rng.normal())
            sequences.append(
                Sequence(
                    f"s{number}", tokens[:prompt], tokens[prompt:], logprobs, reward, sampled_by(0, completion), ref
                )
            )
    return sequences, TraceStore(folder), spec


def run(path, out):
    """What this rank saw. The parts of the weights lie in OUT/parts."""
    facts, seen = read_model(path), {}
    # One sequence a group: compared are all of them, so that every one has an advantage.
    common = [
        "train.dtype=float32",
        "train.microbatch_tokens=40",
        "train.updates_per_step=1",
        "objective.advantage=reinforce_pp",
    ]
    halves, shares = (load_config(CONFIG, [*common, f"parallel.context={ranks}"]) for ranks in (2, 1))
    world.lay_out(halves.parallel, seed=1)
    rank = dist.get_rank()
    sequences, store, spec = batch(facts, out / f"trace{rank}")

    def build(config):
        return Policy(facts, config.train, config.parallel, path, temperature=1.0)

    def take_step(config, policy):
        clock, groups = Clock(), list(range(len(sequences)))
        whole, judged = (
            TrainStep(config, policy, None, store, spec),
            [one.judged(at) for at, one in enumerate(sequences)],
        )
        return whole.run(judged, groups, step=1, weight_version=0, measure_native=True, clock=clock)

    policy = build(halves)
    engine = taken(policy, path, out / "parts")
    canary = Canary([(3, 1, 4, 1, 5)], store, spec)
    seen["canary"] = canary.compare(canary.natively(policy, 0), engine, 0).difference
    seen["sent"] = (engine.weights, engine.places) if engine else ({}, [])
    seen["halves"] = take_step(halves, policy)
    Checkpoints(out / "checkpoints", halves.parallel, keep=1, asynchronous=False).save(1, policy, {})
    resumed = build(halves)
    checkpoint.load(checkpoints.find(out / "checkpoints"), resumed, parallel=halves.parallel, seed=1)
    seen["next"] = [take_step(halves, p) for p in (policy, resumed)]
    try:
        whole = pack(sequences, [0], world.device())
        policy.score([Work(whole, None, whole.rollout_logprobs)], None, "uncut")
    except ReplayError as error:
        seen["uncut"] = str(error)

    def pack_shifted(*arguments):  # with the numbers of the other rank's rows: as many, and wrong
        *same, context, supports, heads, multiple = arguments
        theirs = pack(*same, (1 - rank, 2), multiple=multiple)
        return dataclasses.replace(pack(*same, context, supports, heads, multiple), rows=theirs.rows)

    shares_of.pack = pack_shifted
    try:
        take_step(halves, policy)
    except RouteValidationError as error:
        seen["shifted"] = str(error)
    shares_of.pack = pack

    world.lay_out(shares.parallel, seed=1)
    seen["shares"] = take_step(shares, build(shares))
    return seen
