"""Tests the sampler's hook, driven by hand: whose support is kept, and the error for a draw that was not seen."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import torch

from moe_rl.errors import EngineError
from moe_rl.vllm.extras import Extras
from moe_rl.vllm.recording import Recording
from tests.support.refusals import refused

NEG = -torch.inf
_NUMBERS = count()


class Hooked:
    """A sampler that draws from given log-probabilities, with the extras watching."""

    def __init__(self, **asked):
        self.hook = lambda *_: None
        sampler = SimpleNamespace(
            apply_temperature=lambda logits: logits,
            topk_topp_sampler=SimpleNamespace(register_forward_hook=lambda hook: setattr(self, "hook", hook)),
        )
        recording = Recording("", "", **asked or {"support": True})
        worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
        self.extras = Extras(worker, recording, {})

    def draw(self, requests, logprobs):
        self.extras.after_forward([(request, 1) for request in requests])
        self.hook(None, (), (None, torch.tensor(logprobs)))


def request(key, *, forwarded=2, greedy=False, ask=True):
    ask = SimpleNamespace(key=key) if ask else None
    prompt = np.zeros(2, np.int32)
    return SimpleNamespace(number=next(_NUMBERS), ask=ask, prompt=prompt, greedy=greedy, forwarded=forwarded)


def listed(kept):
    return tuple(kept[f"support_{name}"].tolist() for name in ("sets", "counts", "ids"))


def test_a_set_is_kept_once_and_as_the_ids_that_are_fewer():
    sampler, one = Hooked(), request("a")
    most, few = [-1.1, -1.1, NEG, -1.1], [NEG, 0.0, NEG, NEG]
    for forwarded, logprobs in enumerate([most, few, most, most], 2):
        one.forwarded = forwarded
        sampler.draw([one], [logprobs])
    assert listed(sampler.extras.of_request(one, 5)) == ([0, 1, 0, 0], [-1, 1], [2, 1])
    assert not sampler.extras._supports


def test_each_request_keeps_the_support_of_its_own_tokens():
    sampler = Hooked()
    restricted, whole, greedy, silent, early = everyone = [
        request("a"), request("b"), request("c", greedy=True), request("d", ask=False), request("e", forwarded=1),
    ]  # fmt: skip
    half, none, other = [NEG, -0.7, NEG, -0.7], [-1.4] * 4, [-0.1, NEG, NEG, -2.3]
    sampler.draw(everyone, [half, none, other, other, other])
    restricted.forwarded = whole.forwarded = 3
    sampler.draw([whole, restricted], [other, none])
    kept = sampler.extras.of_request(restricted, 3)
    assert listed(kept) == ([0, 1], [2, 0], [1, 3])
    kept = sampler.extras.of_request(whole, 3)
    assert listed(kept) == ([0, 1], [0, 2], [0, 3])
    assert sampler.extras.of_request(greedy, 2) == {} and not sampler.extras._sampled


def test_a_token_whose_draw_was_not_seen_is_not_said_to_be_drawn_from_everything():
    sampler, one = Hooked(), request("a")
    sampler.draw([one], [[NEG, -0.7, NEG, -0.7]])
    with refused(EngineError, request="a", position=3, got=("1 of 2",)):
        sampler.extras.of_request(one, 3)


def test_what_was_drawn_for_a_request_that_is_given_up_is_nobody_elses():
    sampler, one = Hooked(), request("a")
    sampler.draw([one], [[NEG, -0.7, NEG, -0.7]])
    sampler.extras.drop(one)
    with refused(EngineError, got=("1 of 1",)):
        sampler.extras.of_request(one, 2)


def test_each_request_keeps_the_likeliest_of_its_own_tokens():
    sampler = Hooked(head=2)
    one, greedy, other = everyone = [request("a"), request("b", greedy=True), request("c")]
    sampler.draw(everyone, [[-3.0, -0.7, NEG, -1.4], [-0.1, NEG, NEG, -2.3], [NEG, NEG, 0.0, NEG]])
    one.forwarded = 3
    sampler.draw([one], [[-0.2, -2.0, -9.0, -5.0]])
    kept = sampler.extras.of_request(one, 3)
    assert kept.keys() == {"head_ids", "head_logprobs"}
    assert (kept["head_ids"].tolist(), kept["head_ids"].dtype) == ([[1, 3], [0, 1]], np.int32)
    np.testing.assert_array_equal(kept["head_logprobs"], np.array([[-0.7, -1.4], [-0.2, -2.0]], np.float32))
    kept = sampler.extras.of_request(other, 2)
    assert kept["head_ids"][0, 0] == 2 and kept["head_logprobs"].tolist() == [[0.0, NEG]]
    assert sampler.extras.of_request(greedy, 2) == {}


def test_a_head_is_no_longer_than_the_vocabulary():
    sampler, one = Hooked(head=9, support=True), request("a")
    sampler.draw([one], [[NEG, -0.7, NEG, -0.7]])
    kept = sampler.extras.of_request(one, 2)
    assert kept["head_ids"].shape == (1, 4) and kept["support_ids"].tolist() == [1, 3]
