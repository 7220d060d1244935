"""Jobs for ranks: a policy whose experts move after its first update goes on beside one whose experts never do."""

import os
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import ReplayError
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.dispatcher import PlannedDispatcher
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.megatron.witness import DispatchWitness
from moe_rl.models.hf import read_model
from moe_rl.planning.expert_placement import natural_order
from moe_rl.proof.cases import Case
from moe_rl.proof.trial import Trial, whole_gradients
from moe_rl.weights.digest import tensor_digests
from tests.distributed.jobs.state import held
from tests.weights.taking import taken

SHARDED, TOP_4 = "EP2 DP2 bfloat16", "EP2 DP2 top-4"
CASES = {
    SHARDED: Case(4, {"expert": 2}, {"dtype": "bfloat16"}),
    TOP_4: Case(4, {"expert": 2}),
    "TP2 EP2 ETP2 whole optimizer": Case(
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
        {"recompute": "moe", "distributed_optimizer": False},
        plan=False,
    ),
    "EP2 PP2": Case(4, {"expert": 2, "pipeline": 2}),
    "EP2": Case(2, {"expert": 2}),
}


def placements(facts):
    """Two of them: two experts of one layer exchanged, and nearly everything elsewhere."""
    rng, shape = np.random.default_rng(5), (len(facts.moe_layers), facts.num_experts)
    near = natural_order(*shape)
    near[1, [0, -1]] = near[1, [-1, 0]]
    return near, rng.permuted(natural_order(*shape), axis=1)


def different(one, two):
    """Names of the values, tensors or not, that are not bit for bit the same in two dicts, or are in one only."""

    def same(a, b):
        return torch.equal(a, b) if torch.is_tensor(a) else a == b

    return one.keys() ^ two.keys() | {name for name in one.keys() & two.keys() if not same(one[name], two[name])}


def nodes():
    """What the ranks of an expert take for their nodes: together on a host, each on one, and if the config says so."""
    world.lay_out(ParallelConfig(expert=dist.get_world_size()), seed=0)
    with patch.dict(os.environ):
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        together = world.dispatch_nodes(None).tolist()
        by_config = world.dispatch_nodes(1).tolist()
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return together, by_config, world.dispatch_nodes(None).tolist(), world.dispatch_nodes(2).tolist()


class Run:
    """A policy new from the model's folder, and what it computes."""

    def __init__(self, facts, case, source):
        self.facts, self.case, self.source = facts, case, source
        self.policy = Policy(facts, case.train_config, case.parallel_config, source, temperature=1.0)
        self.trial = Trial(facts, case, self.policy)

    def passes(self):
        """One forward-only pass and one update, seen at the dispatchers."""
        witness = DispatchWitness().attach(self.policy.chunks)
        scored, tables = self.trial.first_pass()
        result, second = self.trial.update(tables)
        dispatch = self.trial.judge(witness)
        for layer in self.policy._moe_layers():  # the witness stands in front of these methods
            del layer.token_dispatcher.dispatch_preprocess, layer.token_dispatcher.dispatch_postprocess
        grads = whole_gradients(self.policy, self.facts)
        return {
            "logprobs": self.trial.by_sequence(scored.logprobs),
            "grad_norm": result.grad_norm,
            "grads": grads if self.facts.top_k > 2 else tensor_digests(grads.items()),
            "weights": tensor_digests(self.policy.export(torch.float32, dense=True, experts=True)),
            "dispatch": dispatch,
            "mismatch": [seen.tally.applied_mismatch for seen in (scored.seen, second)],
            "planned": [seen.tally.planned for seen in (scored.seen, second)],
        }

    def sent(self, folder):
        """The weights as a sampler gets them."""
        taker = taken(self.policy, self.source, folder)
        return taker.weights if taker else {}

    def save(self, folder):
        Checkpoints(folder, self.case.parallel_config, keep=1, asynchronous=False).save(1, self.policy, {})

    def load(self, folder):
        checkpoint.load(checkpoints.find(folder), self.policy, parallel=self.case.parallel_config, seed=1)


def compared(case, source, out):
    """The same two updates with experts in their natural places, and with placements in between, and back. What may
    not differ at all is compared here."""
    world.lay_out(case.parallel_config, seed=1)
    facts = read_model(source)
    straight, placed = Run(facts, case, source), Run(facts, case, source)
    straight.passes()
    placed.passes()
    before = held(straight.policy)
    for placement in placements(facts):
        placed.policy.place(placement)
    seen = {"moved": different(before, held(placed.policy))}
    if case == CASES[SHARDED]:
        sent = straight.sent(out / "sent"), placed.sent(out / "sent placed")
        seen |= {"sent": (len(sent[0]), different(*sent)), "loaded": crossed(straight, placed, source, out)}
    seen |= {"natural": straight.passes(), "placed": placed.passes()}
    placed.policy.place(natural_order(*placed.policy.placement.shape))
    seen["back"] = different(held(straight.policy), held(placed.policy))
    for run in (straight, placed):
        run.policy.release()
    return seen


def crossed(straight, placed, source, out):
    """What differs when the checkpoint of the one is loaded by a policy with the placement of the other."""
    wrong = set()
    for saver, like in ((straight, placed), (placed, straight)):
        loader, folder = Run(saver.facts, saver.case, source), out / ("natural" if saver is straight else "placed")
        loader.policy.place(like.policy.placement)
        saver.save(folder)
        loader.load(folder)
        wrong |= different(held(loader.policy), held(like.policy))
        loader.policy.release()
    return wrong


def faults(case, source):
    """{what was planted: the error}, and the names of what a refused placement changed."""
    world.lay_out(case.parallel_config, seed=1)
    facts = read_model(source)
    told, (near, far) = {}, placements(facts)

    def attempt(name, action):
        try:
            action()
            told[name] = "went through"
        except ReplayError as error:
            told[name] = str(error)

    run = Run(facts, case, source)
    before = held(run.policy)
    attempt("two placements", lambda: run.policy.place(far if dist.get_rank() == 3 else near))
    after = held(run.policy)
    told["touched"] = different(before, after)
    work = run.trial.work(run.trial.tables, "replay")
    run.policy.place(far)
    attempt("plans of before", partial(run.policy.score, work, "replay", "old plans"))
    run.policy.release()
    only_dispatcher = patch("moe_rl.megatron.policy.move", lambda moe, order, _: moe.token_dispatcher.place(order))
    only_weights = patch.object(PlannedDispatcher, "place", lambda self, order: None)
    for name, planted in (("only dispatcher", only_dispatcher), ("only weights", only_weights)):
        run = Run(facts, case, source)
        with planted:
            attempt(name, partial(run.policy.place, near))
        run.policy.release()
    return told
