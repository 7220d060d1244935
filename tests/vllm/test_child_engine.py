"""Tests what the engine's process tells of completions as they end. The engine itself is in tests/rollout."""

from types import SimpleNamespace

import pytest

from moe_rl.types import GenerateRequest
from moe_rl.vllm import child_engine
from moe_rl.vllm.child_engine import ChildEngine, RequestOutput, SampledCall

LENGTH = 5000


def output(length):
    tokens, flat = list(range(length)), SimpleNamespace(token_ids=list(range(length)), logprobs=[-0.5] * length)
    last = SimpleNamespace(
        token_ids=tokens, logprobs=flat, finish_reason="length", weight_versions=None, stop_reason=None
    )
    made = RequestOutput()
    made.take(SimpleNamespace(request_id="0-0", outputs=[last]), version=3)
    made.versions = made.came
    return made


def running(number, count):
    requests = [GenerateRequest(f"r{at}", (1, 2), 0, LENGTH, 1.0, ()) for at in range(count)]
    call = SampledCall(number, None, "", requests, [None] * count)
    call.outputs = [output(LENGTH) for _ in range(count)]
    return call


def test_many_completions_that_end_at_once_are_told_over_several_steps_and_each_once():
    call = running(7, 10)
    engine = SimpleNamespace(running={7: call}, _ended=[(call, at) for at in range(10)])
    told = []
    while news := ChildEngine.news(engine):
        (one,) = news
        assert one.number == 7
        assert sum(len(completion.token_ids) for _, completion in one.completions) <= child_engine._TOLD_TOKENS + LENGTH
        told.append([at for at, _ in one.completions])
    assert len(told) > 2 and sum(told, []) == list(range(10))


def test_all_of_a_call_that_has_ended_are_told_before_its_reply():
    ended, other = running(7, 10), running(8, 10)
    # `step` has ended call 7, and its reply goes out next
    engine = SimpleNamespace(running={8: other}, _ended=[(call, at) for at in range(10) for call in (other, ended)])
    news = {one.number: [at for at, _ in one.completions] for one in ChildEngine.news(engine)}
    assert news[7] == list(range(10)) and len(news[8]) < 10


def test_log_probabilities_of_other_tokens_are_refused():
    made = output(3)
    made.result.outputs[0].logprobs.token_ids = [0, 1, 3]
    with pytest.raises(RuntimeError, match="log-probabilities of other tokens: 0-0"):
        made.take(made.result, version=3)


class SlowSource:
    """Publishes a shard when it is told to."""

    def __init__(self):
        self.ready, self.published_shards, self.polls = False, [], 0

    def finished(self, *_):
        pass

    def stats(self):
        return {}

    def publish(self, call, sink, sequences, aborted, keep_open, cut):
        self.published_shards.append(sink)

    def published(self, sink):
        self.polls -= 1
        return self.ready or self.polls == 0

    def references(self, sink):
        return {}


def stepping(calls):
    """Return an engine that has these calls, and makes steps in which nothing happens."""
    engine = object.__new__(ChildEngine)
    engine.running, engine._paused, engine._advance = {call.number: call for call in calls}, False, lambda: None
    return engine


def published_slowly(number, source):
    call = running(number, 1)
    call.source, call.shard, call.unfinished = source, f"shard{number}", 0
    return call


def test_a_call_is_answered_when_its_shard_is_published_and_the_engine_goes_on_meanwhile():
    source, other = SlowSource(), running(8, 1)
    engine = stepping([published_slowly(7, source), other])
    assert engine.step() == engine.step() == [] and source.published_shards == ["shard7"]
    assert list(engine.running) == [7, 8]  # nobody may take the engine for idle
    source.ready = True
    assert [number for number, _ in engine.step()] == [7]
    assert list(engine.running) == [8]


@pytest.mark.parametrize(("seconds", "steps"), [(600, 3), (0, 1)])
def test_an_engine_without_other_work_waits_for_the_shard(monkeypatch, seconds, steps):
    """It takes calls and gives signs of life meanwhile, so that a slow disk is no hang; but not for ever."""
    source = SlowSource()
    engine = stepping([published_slowly(7, source)])
    monkeypatch.setattr(child_engine, "PUBLISH_SECONDS", seconds)
    source.polls = 3
    answers = [[number for number, _ in engine.step()] for _ in range(steps)]
    assert answers == [[]] * (steps - 1) + [[7]]
