"""Tests what the first update of a run alone can show: both sides have one temperature, and the reference the policy's
weights."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import log_softmax

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.train.step import TemperatureProbe, check_reference
from tests.support.refusals import refused

TOKENS, VOCABULARY = 40, 30


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One rank."""
    monkeypatch.setattr(world, "all_reduce", lambda values, op=None: list(values))
    monkeypatch.setattr(world, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(world, "speaks_for_its_sequences", lambda: True)
    monkeypatch.setattr(world, "microbatches_in_a_round", lambda: 1)
    monkeypatch.setattr(world, "agreed", nullcontext)


class Side:
    """Scores the same tokens at a temperature, with rounding of its own."""

    def __init__(self, temperature=None, *, scale=3.0, rounding=1e-3, seed=1):
        self.logits = scale * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.chosen, self.rounding = self.logits.argsort(1)[:, -3], rounding
        self.noise, self.temperature = torch.Generator().manual_seed(seed), temperature

    def __call__(self, temperature):
        found = log_softmax(self.logits / (self.temperature or temperature), 1).gather(1, self.chosen[:, None])[:, 0]
        return found + self.rounding * torch.randn(TOKENS, generator=self.noise)

    def score(self, work, mode, name, *, temperature):
        return SimpleNamespace(logprobs=[self(temperature)])


def probed(asked, *, trainer=None, update=None, sampler=None):
    """trainer: what every pass is scored at instead; update: what the update's own pass is; sampler: what it drew
    at."""
    policy = trainer or Side()
    work = SimpleNamespace(microbatch=SimpleNamespace(rollout_logprobs=(sampler or Side(seed=2))(asked)))
    probe = TemperatureProbe(policy, [work], "replay", asked)
    probe.check({0: ((update or policy)(asked),)})


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("rounding", [0.0, 1e-3, 0.3])
def test_one_temperature_on_both_sides_passes(temperature, rounding):
    probed(temperature, trainer=Side(rounding=rounding), sampler=Side(rounding=rounding, seed=2))
    flat = {"scale": 0.01, "rounding": rounding}
    probed(temperature, trainer=Side(**flat), sampler=Side(**flat, seed=2))


def test_tokens_that_no_temperature_changes_pass():
    sure = {"scale": 0.0, "rounding": 0.0}
    side = Side(**sure)
    side.logits[torch.arange(TOKENS), side.chosen] = 1e4
    probed(0.7, trainer=side, sampler=side)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.3])
def test_a_temperature_that_the_trainer_does_not_apply_is_named(temperature):
    for planted in ({"trainer": Side(1.0, rounding=0.0)}, {"update": Side(1.0)}):
        with refused(ReplayError, "trainer", key="rollout.temperature", fault="temperature") as caught:
            probed(temperature, **planted)
        assert caught.value.everywhere


def test_another_temperature_than_1_is_named_too():
    with refused(ReplayError, "trainer", "temperature 2", fault="temperature"):
        probed(1.0, update=Side(2.0))


def test_a_sampler_that_drew_at_another_temperature_is_named():
    with refused(ReplayError, "sampler", "temperature 1", fault="temperature"):
        probed(0.7, sampler=Side(1.0, seed=2))


def test_a_reference_with_other_weights_is_named():
    def side():
        torch.manual_seed(0)
        return SimpleNamespace(chunks=[torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))])

    policy, reference = side(), side()
    check_reference(policy, reference)
    reference.chunks[0][1].weight.data[1, 2] += 1e-6
    with refused(ReplayError, "1 of 8 elements", tensor="1.weight", fault="reference"):
        check_reference(policy, reference)
    policy, reference = side(), side()
    for one in (policy, reference):
        one.chunks[0].router = torch.nn.Module()
        one.chunks[0].router.register_buffer("expert_bias", torch.zeros(4))
    reference.chunks[0].router.expert_bias[3] = 1e-6
    with refused(ReplayError, "1 of 4 elements", tensor="router.expert_bias", fault="reference"):
        check_reference(policy, reference)
