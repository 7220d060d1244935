"""A pass that failed must leave nothing behind. Runs on one rank."""

from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ReplayError
from moe_rl.models.hf import read_model
from moe_rl.replay.replay_pass import ReplayPass
from moe_rl.replay.routes import SequenceRoutes, microbatch_routes
from moe_rl.trace import TraceSpec
from moe_rl.types import Sequence, sampled_by
from tests.support.families import write_checkpoint
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
POLICY = Path(__file__).parents[2] / "assets/tiny_moe/policy"
LENGTHS = [(5, 4), (3, 6), (6, 3)]  # (prompt, completion): one microbatch each, all of 8 tokens


class Run:
    """A policy, its microbatches with random routes, and a loss."""

    def __init__(self, recompute="none", **settings):
        from moe_rl.megatron.microbatch import pack
        from moe_rl.megatron.policy import Policy

        facts, rng = read_model(POLICY), np.random.default_rng(5)
        settings = {"dtype": "float32", "optimizer": OptimizerConfig(lr=1e-3)} | settings
        train = TrainConfig(microbatch_tokens=8, recompute=recompute, **settings)
        self.policy = Policy(facts, train, ParallelConfig(), POLICY, temperature=1.0)
        self.microbatches, self.tables = [], []
        for number, (prompt, completion) in enumerate(LENGTHS):
            tokens = rng.integers(0, facts.vocab, prompt + completion).tolist()
            sequence = Sequence(
                key=f"s{number}",
                prompt_token_ids=tuple(tokens[:prompt]),
                token_ids=tuple(tokens[prompt:]),
                rollout_logprobs=rng.normal(-6, 0.3, completion).astype(np.float32),
                reward=1.0 - number,
                versions=sampled_by(0, completion),
                routes=None,
            )
            chosen = rng.random((8, len(facts.moe_layers), facts.num_experts)).argsort(-1)[..., : facts.top_k]
            packed = pack([sequence], [0], torch.device("cpu"))
            packed.give_advantages([[sequence.reward]])
            spec = TraceSpec.from_layers("test", facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
            fed = packed.fed([sequence])
            table = microbatch_routes(
                [SequenceRoutes.complete(sequence.key, fed[0], chosen.astype(np.uint8))],
                spec,
                layers=facts.moe_layers,
                names=[sequence.key],
                fed=fed,
                source=None,
                padded_tokens=8,
                rows=packed.rows,
                expert_parallel=1,
                device=torch.device("cpu"),
            )
            self.microbatches.append(packed)
            self.tables.append(table)

    def work(self):
        from moe_rl.megatron.microbatch import Work

        pairs = zip(self.microbatches, self.tables, strict=True)
        return [Work(microbatch, table, microbatch.rollout_logprobs) for microbatch, table in pairs]

    def replay_pass(self, name, **options):
        from moe_rl.megatron.model import replay_pass

        return replay_pass(self.policy.chunks, self.tables, name=name, **options)

    def logprobs(self, replay):
        from moe_rl.megatron import schedule

        return schedule.logprobs(self.policy.chunks, self.microbatches, replay, 1.0)

    def loss(self, number, values):
        return -(values * self.microbatches[number].advantages.item()).sum()

    def update(self, loss=None):
        result, seen = self.policy.update(self.work(), loss or self.loss, "replay", "update")
        return result, asdict(seen.tally)

    def layers(self):
        from moe_rl.megatron.model import unwrap

        return [layer for chunk in self.policy.chunks for layer in unwrap(chunk).decoder.layers]

    def weights(self):
        exported = dict(self.policy.export(torch.float32, dense=True, experts=True))
        return {name: tensor.clone() for name, tensor in exported.items()}


class Planted(Exception):
    pass


@cache
def undisturbed(recompute):
    """Return what the first update of a policy gives, and the weights before and behind it."""
    clean = Run(recompute)
    before = clean.weights()
    return clean.update(), before, clean.weights()


def assert_the_next_step_is_exact(run, recompute):
    """Check that it equals the first update of an undisturbed policy, bit for bit."""
    updated, before, theirs = undisturbed(recompute)
    assert run.update() == updated
    ours = run.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not any(torch.equal(ours[name], before[name]) for name in before if "gate.weight" in name)


def test_an_update_clips_and_steps_as_megatron_would(one_rank):
    from moe_rl.megatron.cpu import mode_left_behind

    run = Run()

    def step(norm):
        with mode_left_behind():  # Megatron's own step names devices
            run.policy.optimizer.step()

    run.policy._step = step
    (updated, _), _, ours = undisturbed("none")
    assert run.update()[0] == updated and updated.grad_norm > 2.0  # the limit is 1
    assert float(run.policy.optimizer.get_grad_norm()) == pytest.approx(1.0, rel=1e-4)
    theirs = run.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_that_was_built_twice(one_rank):
    """Routers of a model that nobody runs take no routes and block nothing, because there is no global list."""
    orphan, run = Run(), Run()
    before = orphan.weights()
    result, tally = run.update()
    assert tally["consumed"] == tally["expected"] == len(LENGTHS) * 8 and tally["applied_mismatch"] == 0
    assert result.applied and all(torch.equal(tensor, before[name]) for name, tensor in orphan.weights().items())
    routers = [layer.mlp.router for layer in orphan.layers()]
    assert len(routers) == 8 and all(router.handle is None for router in routers)
    assert orphan.update() == (result, tally)


def test_no_mode_sees_the_calls_of_an_update(one_rank):
    """Neither forward, nor backward, nor the step; behind the update, whether it ends or fails, "cuda" is the host
    again."""
    run, seen = Run(), []
    step = run.policy._step

    def loss(number, values):
        seen.append(len(_get_current_function_mode_stack()))
        values.register_hook(lambda gradient: seen.append(len(_get_current_function_mode_stack())))
        if len(seen) > 2 * len(LENGTHS):
            raise Planted
        return run.loss(number, values)

    def watched(norm):
        seen.append(len(_get_current_function_mode_stack()))
        step(norm)

    run.policy._step = watched
    run.update(loss)
    assert seen == [0] * (2 * len(LENGTHS) + 1)
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    with pytest.raises(Planted):
        run.update(loss)
    assert seen.count(0) == len(seen) > 2 * len(LENGTHS)
    assert torch.zeros(1, device="cuda").device.type == "cpu"


@pytest.mark.parametrize("recompute", [pytest.param("uniform", marks=pytest.mark.long), "moe"])
def test_a_loss_that_raises_once(one_rank, recompute):
    run = Run(recompute)

    def raises(number, values):
        if number == 1:  # the gradient of microbatch 0 is in the buffers by now
            raise Planted
        return run.loss(number, values)

    with pytest.raises(Planted):
        run.update(raises)
    assert_the_next_step_is_exact(run, recompute)


def test_an_update_that_fails_moves_no_expert_bias_and_counts_no_load(one_rank, tmp_path, monkeypatch):
    write_checkpoint("glm-plain", tmp_path)
    monkeypatch.setitem(globals(), "POLICY", tmp_path)
    clean, run = Run(expert_bias_rate=0.1), Run(expert_bias_rate=0.1)

    def biases(run):
        return torch.stack([layer.mlp.router.expert_bias.clone() for layer in run.layers() if layer.is_moe_layer])

    def raises(number=1, values=None):
        if number == 1:
            raise Planted
        return run.loss(number, values)

    before = biases(run)
    with pytest.raises(Planted):  # after the gradient is computed
        run.policy.update(run.work(), run.loss, "replay", "update", learned=raises)
    assert torch.equal(biases(run), before)
    with pytest.raises(Planted):
        run.update(raises)
    assert clean.update() == run.update()
    assert torch.equal(biases(run), biases(clean)) and not torch.equal(biases(run), before)


@pytest.mark.parametrize("recompute", [pytest.param("uniform", marks=pytest.mark.long), "moe"])
def test_a_recomputation_that_raises_once(one_rank, recompute, monkeypatch):
    run, take = Run(recompute), ReplayPass.take

    def raises(replay, microbatch, layer, tokens):
        if (microbatch, layer) == (1, 3) and torch.is_grad_enabled():
            raise Planted
        return take(replay, microbatch, layer, tokens)

    with monkeypatch.context() as patch, pytest.raises(Planted):
        patch.setattr(ReplayPass, "take", raises)
        run.update()
    assert_the_next_step_is_exact(run, recompute)


@pytest.mark.parametrize("recompute", [pytest.param("uniform", marks=pytest.mark.long), "moe"])
def test_a_forward_only_pass_that_raises(one_rank, recompute, monkeypatch):
    from moe_rl.megatron import schedule

    run, whole = Run(recompute), schedule.completion_logprobs

    def raises(microbatch, *arguments, **options):
        if microbatch is run.microbatches[1]:
            raise Planted
        return whole(microbatch, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(Planted):
        patch.setattr(schedule, "completion_logprobs", raises)
        run.policy.score(run.work(), "replay", "logprobs")
    assert_the_next_step_is_exact(run, recompute)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("its own pass", "already open .eval.: got update, expected no open pass"),
        ("no pass", "outside its replay pass .natively routed.: got update is open"),
        ("a pass that is not open", "outside its replay pass .eval, rank 0.: got update is open"),
        ("the update's pass", "not taken exactly once .update.* microbatch 0 layer 0 forward 2 times"),
    ],
)
def test_a_pass_that_is_started_inside_an_update_is_refused(one_rank, monkeypatch, start, message):
    run, opened, begin = Run(), [], ReplayPass.__enter__
    monkeypatch.setattr(ReplayPass, "__enter__", lambda replay: opened.append(replay) or begin(replay))

    def loss(number, values):
        if number == 2:
            if start == "its own pass":
                run.policy.score(run.work(), "replay", "eval")
            run.logprobs({"no pass": None, "the update's pass": opened[0]}.get(start, run.replay_pass("eval")))
        return run.loss(number, values)

    with pytest.raises(ReplayError, match=message):
        run.update(loss)


def test_a_pass_that_was_never_opened_is_refused(one_rank):
    run = Run()
    with refused(ReplayError, fault="outside", run="logprobs", rank=0):
        run.logprobs(run.replay_pass("logprobs"))


@pytest.mark.parametrize(("recompute", "microbatch"), [("none", 1), ("moe", "no microbatch")])
def test_a_layer_that_loses_its_key_is_refused_at_once(one_rank, recompute, microbatch):
    run = Run(recompute)
    moe = run.layers()[3].mlp
    route, runs = moe.route, []

    def forget(*args, **kwargs):
        runs.append(torch.is_grad_enabled())
        if len(runs) == 2:  # the forward of microbatch 1, or the immediate recomputation of microbatch 0
            moe.router.handle = None
        return route(*args, **kwargs)

    moe.route = forget
    with refused(ReplayError, fault="lost key", run="update", rank=0, microbatch=microbatch, layer=3):
        run.update()
    assert len(runs) == 2 and runs[1]
    moe.route = route
    assert_the_next_step_is_exact(run, recompute)


@pytest.mark.parametrize("bound", ["by the microbatch", "by the last forward"])
def test_recomputation_behind_later_forwards_keeps_its_own_routes(one_rank, bound):
    """Imitates 1F1B on an early stage: two forwards, then both backwards, with only the experts recomputed."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moe_rl.megatron.model import unwrap

    run = Run("moe")
    (chunk,) = run.policy.chunks
    if bound == "by the last forward":  # Megatron's own checkpoint calls the router again, whatever it is bound to
        for layer in unwrap(chunk).decoder.layers:
            layer.mlp.moe_layer_recompute, layer.mlp.forward = True, partial(MoELayer.forward, layer.mlp)

    def forwards_and_backwards(replay):
        outputs = []
        for number, microbatch in enumerate(run.microbatches[:2]):
            params = microbatch.begin_forward(replay, number)
            outputs.append(chunk(microbatch.tokens, microbatch.positions, None, packed_seq_params=params))
        for output in outputs:
            output.square().mean().backward()

    run.tables = run.tables[:2]
    if bound == "by the last forward":
        message = (
            "not taken exactly once .update.* microbatch 0 layer 0 recompute 0 times.*expected each of 32 exactly once"
        )
        with pytest.raises(ReplayError, match=message), run.replay_pass("update", training=True) as replay:
            forwards_and_backwards(replay)
        return
    with run.replay_pass("update", training=True) as replay:
        forwards_and_backwards(replay)
    tally = replay.seen.tally
    assert tally.consumed == tally.expected == 2 * 2 * 8
    assert tally.applied_checked == 2 * 2 * 8 and tally.applied_mismatch == 0
