"""Tests updates of the running engine: it loads exactly what was sent, or refuses before it samples any token."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from moe_rl.errors import EngineError, WeightSyncError
from moe_rl.types import sampled_by
from moe_rl.weights.shared_memory import SegmentWriter
from moe_rl.weights.update import SharedMemory
from tests.weights.sending import broadcast, by_disk, by_memory, part

CANARY = np.random.default_rng(9).integers(0, 512, 64).tolist()
SHARDS = (f"update-{number}" for number in itertools.count())


class Sent:
    """Sends updates to the shared engine; `way` puts tensors in place and returns the parts of an update."""

    def __init__(self, engine, requests_of, folder: Path):
        self.engine, self.requests_of, self.folder = engine, requests_of, folder
        self.stack = ExitStack()

    def version(self) -> int:
        (completion,) = self.engine.generate(self.requests_of(1, 1, max_tokens=1), shard=next(SHARDS))
        return completion.newest_version

    def parts(self, way, tensors, *, parts=1, version=None, **about):
        held = about.pop("replaces") if "replaces" in about else self.version()
        about |= {"version": version or held + 1, "replaces": held}
        if way == "disk":
            return [by_disk(self.folder, tensors, **about)]
        return [self.stack.enter_context(one) for one in by_memory(tensors, parts=parts, **about)]

    def __call__(self, way, tensors, **about):
        for one in self.parts(way, tensors, **about):
            self.engine.update_weights(one)

    def refused(self, parts, message):
        """Send the parts and return the refusal of the last one."""
        for one in parts[:-1]:
            self.engine.update_weights(one)
        with pytest.raises(WeightSyncError, match=f"(?s){message}.*pid {self.engine.sampler.pid}") as refusal:
            self.engine.update_weights(parts[-1])
        return str(refusal.value)

    def goes_on(self, canary, version) -> bool:
        np.testing.assert_array_equal(self.engine.score([CANARY])[0].logprobs[0], canary)
        return self.version() == version


@pytest.fixture
def send(engine, weights, requests_of, tmp_path):
    """Sends updates, and restores the engine's first weights after the test, with a higher version."""
    sent = Sent(engine, requests_of, tmp_path)
    with sent.stack:
        before = sent.version()
        yield sent
        sent("memory", weights, version=before + 10, changed=False)


@pytest.mark.parametrize("way, parts", [("disk", 1), ("memory", 7)])
def test_same_weights_leave_every_bit(send, weights, requests_of, way, parts):
    requests, engine = requests_of(4, 4), send.engine
    before, scored, version = (
        engine.generate(requests, shard=next(SHARDS)),
        engine.score([CANARY])[0].logprobs[0],
        send.version(),
    )
    send(way, weights, parts=parts, changed=False)
    np.testing.assert_array_equal(engine.score([CANARY])[0].logprobs[0], scored)
    for one, other in zip(before, engine.generate(requests, shard=next(SHARDS)), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert (one.newest_version, other.newest_version) == (version, version + 1)


@pytest.mark.seeds(3)
@pytest.mark.parametrize("way, parts", [("disk", 1), ("memory", 7)])
def test_new_weights_are_sampled_from(send, others, other_reference, settings, requests_of, way, parts):
    from moe_rl.trace import TraceStore

    engine = send.engine
    before, version = engine.score([CANARY])[0].logprobs[0], send.version() + 5
    send(way, others, parts=parts, version=version)
    computed = other_reference(CANARY)
    computed.check_logprobs("canary", engine.score([CANARY])[0].logprobs[0], atol=1e-4)
    assert np.abs(before - computed.logprobs).mean() > 0.1
    # The same prompts were cached under the old weights: none of those rows may come back.
    for completion in engine.generate(requests_of(4, 4), shard=next(SHARDS)):
        tokens = completion.prompt_token_ids + completion.token_ids
        record = TraceStore(settings.trace_root).read(completion.routes)
        other_reference(tokens).check_routes(completion.key, record.routes)
        assert completion.versions == sampled_by(version, len(completion.token_ids)) and {
            span.weight_version for span in record.spans
        } == {version}


@pytest.mark.seeds(3)
def test_a_trainer_fills_its_segment_again_once_a_part_is_loaded(send, others, other_reference):
    """vLLM loads a layer when its last tensor has come; tensors that it keeps until then must be copies."""
    writer, names, version = SegmentWriter(), sorted(others), send.version()
    runs = [names[at::5] for at in range(5)]  # tensors of every layer in every part
    for number, run in enumerate(runs):
        writer.clear()
        for name in run:
            writer.append(others[name])
        about = {"version": version + 1, "replaces": version, "number": number, "final": number == 4}
        tensors = {name: others[name] for name in run}
        send.engine.update_weights(part(tensors, SharedMemory([writer.segment()]), **about))
    other_reference(CANARY).check_logprobs("canary", send.engine.score([CANARY])[0].logprobs[0], atol=1e-4)


def test_one_changed_expert_is_seen_by_the_canary(send, reference, weights):
    """A change of a single expert changes the canary's scores, if any of its tokens uses that expert."""
    before = send.engine.score([CANARY])[0].logprobs[0]
    expert = np.bincount(reference(CANARY).sets[:, 2].ravel()).argmax()
    name = f"model.layers.2.mlp.experts.{expert}.down_proj.weight"
    send("memory", weights | {name: weights[name] * 1.5})
    assert np.abs(send.engine.score([CANARY])[0].logprobs[0] - before).max() > 1e-4


# Every single fault is in tests/weights/test_intake.py; here is what a real engine does then.


def another(update, name):
    """Change one tensor's digest in the update, as if a bit had flipped on the way."""
    tensors = [msgspec.structs.replace(i, digest="0" * 32) if i.name == name else i for i in update.tensors]
    assert tensors != update.tensors
    return msgspec.structs.replace(update, tensors=tensors)


@pytest.mark.parametrize("way", ["disk", "memory"])
def test_other_bytes_than_the_trainer_meant_are_refused_and_the_old_weights_stay(send, others, way):
    before, version = send.engine.score([CANARY])[0].logprobs[0], send.version()
    (update,) = send.parts(way, others)
    said = send.refused([another(update, "lm_head.weight")], "got other weights than were sent.*lm_head.weight")
    assert f"continues with version {version}" in said and send.goes_on(before, version)


@pytest.mark.parametrize("fault", ["broken off", "damaged"])
def test_a_torn_update_leaves_an_engine_that_samples_nothing_until_a_whole_one(send, weights, others, fault):
    before, version = send.engine.score([CANARY])[0].logprobs[0], send.version()
    parts = send.parts("memory", others, parts=4, replaces=version, version=version + 1)
    for one in parts[:2]:
        send.engine.update_weights(one)
    if fault == "damaged":
        damaged = another(parts[2], parts[2].tensors[-1].name)
        assert "until then nothing is sampled" in send.refused([damaged], "got other weights than were sent")
    for call in (lambda: send.engine.score([CANARY])[0].logprobs[0], send.version):
        with pytest.raises(WeightSyncError, match="no whole set of weights.*nothing is sampled"):
            call()
    send("memory", weights, replaces=version, version=version + 2, parts=3, changed=False)
    assert send.goes_on(before, version + 2)


def test_a_broadcast_is_loaded_bucket_by_bucket(send, weights, others, other_reference):
    """From three senders over gloo; a broadcast with wrong bytes leaves incomplete weights."""
    from moe_rl.weights.broadcast import Sender

    engine, version = send.engine, send.version()

    senders = [Sender(rank, "127.0.0.1", len(engine.workers), torch.device("cpu")) for rank in range(3)]
    send_all = partial(broadcast, engine, senders, bucket=100_000)
    assert send_all(others, version=version + 1, replaces=version)
    other_reference(CANARY).check_logprobs("canary", engine.score([CANARY])[0].logprobs[0], atol=1e-4)
    experts = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (3, 5)]
    turned = weights | dict(zip(experts, (weights[name] for name in experts[::-1]), strict=True))
    with pytest.raises(WeightSyncError, match="(?s)got other weights than were sent.*until then nothing is sampled"):
        send_all(weights, sent=turned, version=version + 2, replaces=version + 1)
    with pytest.raises(WeightSyncError, match="nothing is sampled"):
        engine.score([CANARY])[0].logprobs[0]
    assert send_all(weights, version=version + 2, replaces=version + 1), "the way is open still"
    assert send.version() == version + 2


def test_an_engine_that_sleeps_answers_nothing_until_it_is_awake(send, weights, others):
    """On a CPU vLLM keeps the memory; the order of the calls is the same."""
    engine = send.engine
    before, version = engine.score([CANARY])[0].logprobs[0], send.version()
    log = engine.sampler._settings.log_path
    seen = log.read_text().count("sleep mode is not supported on CPU")
    assert engine.sleep(1) is False
    with pytest.raises(EngineError, match="The vLLM engine sleeps: got no kv_cache and weights. Wake it first"):
        send.version()
    engine.wake("weights")
    with pytest.raises(EngineError, match="sleeps: got no kv_cache"):
        engine.score([CANARY])[0].logprobs[0]
    engine.wake("kv_cache")
    engine.wake("kv_cache")
    assert send.goes_on(before, version)
    assert log.read_text().count("sleep mode is not supported on CPU") == seen + 3, "vLLM was not asked"
    # Level 2 discards the weights: only an update brings them back.
    engine.sleep(2)
    engine.wake("weights")
    engine.wake("kv_cache")
    with pytest.raises(WeightSyncError, match="nothing is sampled"):
        engine.score([CANARY])[0].logprobs[0]
    send("memory", weights, replaces=version, version=version + 1, changed=False)
    assert send.goes_on(before, version + 1)
