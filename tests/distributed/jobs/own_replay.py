"""A job for ranks: a trainer on megatron-core's own RouterReplay, in a layout of the proof, under `moe_rl.audit`.

The layers, routers, dispatchers, experts, recomputation and schedules are Megatron's, and so is the replay: before a
chunk's forward its routers get the routes of the microbatch, behind it they are switched to the queue of
recomputations. With combined 1F1B they are not, because the forward only begins there; it recomputes nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_rl.megatron import model, schedule, specs, world
from moe_rl.megatron.model import unwrap
from moe_rl.models.hf import read_model
from moe_rl.proof import rank, trial
from moe_rl.replay.router_audit import audit
from moe_rl.trace.adapters.outgoing import to_megatron
from moe_rl.types import Sequence, sampled_by

SEQUENCES_OF_A_RANK, TOKENS_OF_A_MICROBATCH = 32, 512


def run(case, checkpoint):
    """Return what the audit of one step says on this rank."""
    world.lay_out(case.parallel_config, seed=1)
    RouterReplay.clear_global_router_replay_instances()
    with ExitStack() as stack:
        stack.enter_context(patch.object(model, "replay_spec", _own_spec))
        stack.enter_context(patch.object(trial, "batch", _batch))
        tokens = TOKENS_OF_A_MICROBATCH * case.parallel_config.context
        stack.enter_context(patch.object(trial, "MICROBATCH_TOKENS", tokens))
        # Where the files of the model have each expert.
        order = np.arange(read_model(checkpoint).num_experts)
        stack.enter_context(patch.object(MoEAlltoAllTokenDispatcher, "order", order, create=True))
        trainer = _Trainer(stack.enter_context(rank.begun(case, checkpoint)))
        trainer.record()
        report, passes, policy = trainer.train(), len(trainer.places), trainer.trial.policy
        expected = passes * len(policy.layers), passes * len(policy.recomputed_layers)
    return {
        "expected": expected,  # runs of routers, forward and recomputed
        "runs": (report.forwards, report.recomputations),
        "replayed": report.replayed,
        "names": report.names,
        "power": report.power,
        "claims": [(claim.name, claim.status) for claim in report.record.claims],
        "text": str(report),
    }


def _own_spec(config, vp_stage=None):
    config.moe_enable_routing_replay = False  # which our own spec refuses
    with patch.object(specs, "GroupedExperts", SequentialMLP), patch.object(specs, "_replayed", lambda mlp: mlp):
        block = specs.replay_spec(config, vp_stage)
    config.moe_enable_routing_replay = True
    return replace(block, layer_specs=[replace(layer, module=TransformerLayer) for layer in block.layer_specs])


def _batch(facts):
    """Return sequences, and random routes, which are not used."""
    rng, sequences, routes = np.random.default_rng(3), [], []
    longer = world.context_parallel()[1]  # a rank has as many rows of each sequence
    for number in range(SEQUENCES_OF_A_RANK * dist.get_world_size()):
        prompt, completion = (longer * rng.integers((8, 24), (24, 48))).tolist()
        # No token follows itself, which could repeat a row.
        steps = rng.integers(1, facts.vocab - 1, prompt + completion)
        tokens = (1 + steps.cumsum() % (facts.vocab - 1)).tolist()
        sequences.append(
            Sequence(
                key=f"s{number}",
                prompt_token_ids=tuple(tokens[:prompt]),
                token_ids=tuple(tokens[prompt:]),
                rollout_logprobs=np.zeros(completion, np.float32),
                reward=float(rng.normal()),
                versions=sampled_by(0, completion),
                routes=None,
            )
        )
        scores = rng.random((prompt + completion - 1, len(facts.moe_layers), facts.num_experts))
        routes.append(np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8))
    return sequences, routes


class _Trainer:
    def __init__(self, of):
        self.trial, self.chunks = of, of.policy.chunks
        self.places = [
            np.array([(-1, 0) if row is None else row for row in of._rows(one)]).T for one in of.microbatches
        ]
        self.tokens = [np.array(one.ids[:-1]) for one in of.sequences]
        self.prompts = [len(one.prompt_token_ids) for one in of.sequences]
        facts = of.facts
        self.layer_map = "".join("m" if layer in facts.moe_layers else "d" for layer in range(facts.layers))
        self.routes = of.routes
        self.watch = audit([unwrap(chunk) for chunk in self.chunks])

    def record(self):
        """Record what the routers choose, with a sampler's noise: every second of the six rows in a hundred that are
        nearest to a tie takes the next expert."""
        facts, layers = self.trial.facts, self.trial.policy.layers
        rng = np.random.default_rng(dist.get_rank())
        with self._step() as step, torch.no_grad():
            self._run(step, forward_only=True)
        lengths = [len(one) for one in self.tokens]
        starts = np.cumsum([0, *lengths])
        found = torch.full((starts[-1], len(facts.moe_layers), facts.top_k), -1)
        for (number, layer), scores in step._scores.items():
            values, ranked = (part.numpy() for part in scores.sort(1, descending=True))
            gaps = values[:, facts.top_k - 1] - values[:, facts.top_k]
            swap = (gaps <= np.quantile(gaps, 0.06)) & (rng.random(len(gaps)) < 0.5)
            ranked[swap, facts.top_k - 1] = ranked[swap, facts.top_k]
            sequence, position = self.places[number]
            real = sequence >= 0
            rows = torch.from_numpy(starts[sequence[real]] + position[real])
            found[rows, facts.moe_layers.index(layer)] = torch.from_numpy(np.sort(ranked[real, : facts.top_k]))
        assert {layer for _, layer in step._scores} == set(layers)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        assert (found >= 0).all(), "the ranks together did not see every row"
        self.routes = np.split(found.numpy(), starts[1:-1])

    def train(self):
        """Run a step on these routes, with the audit; return its report."""
        with self._step() as step:
            self._run(step, forward_only=False, replay=True)
        self.watch.close()
        RouterReplay.clear_global_router_replay_instances()
        return step.report

    def _step(self):
        return self.watch.step(self.tokens, self.routes, self.places, layers=self.layer_map, prompts=self.prompts)

    def _run(self, step, *, forward_only, replay=False):
        of = self.trial
        given = schedule.training_pass(self.chunks, of.microbatches, None, of.loss, 1.0, lambda: None)
        forward, running = given["forward_step_func"], [0]

        def chosen(chunk) -> Iterator:
            for number, microbatch in enumerate(of.microbatches):
                running[0] = chunk
                step.forward(number)
                if replay:
                    self._hand_over(number, chunk)
                yield number, microbatch

        def forward_step(iterator, model, return_schedule_plan=False):
            found = forward(iterator, model, **({"return_schedule_plan": True} if return_schedule_plan else {}))
            if replay and not return_schedule_plan:
                for one in self._replays(running[0]):
                    one.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            return found

        iterators = [chosen(chunk) for chunk in range(len(self.chunks))]
        given |= {
            "forward_step_func": forward_step,
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "forward_only": forward_only,
        }
        get_forward_backward_func()(**given)

    def _replays(self, chunk):
        layers = [layer for layer in unwrap(self.chunks[chunk]).decoder.layers if layer.is_moe_layer]
        return [layer.mlp.router.router_replay for layer in layers]

    def _hand_over(self, number, chunk):
        facts, layers = self.trial.facts, unwrap(self.chunks[chunk]).decoder.layers
        columns = [facts.moe_layers.index(layer.layer_number - 1) for layer in layers if layer.is_moe_layer]
        rows = to_megatron(self.routes, *self.places[number], columns=columns, num_experts=facts.num_experts)
        for one, target in zip(self._replays(chunk), rows, strict=True):
            one.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            one.set_target_indices(torch.from_numpy(target))
