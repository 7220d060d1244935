"""Tests the receiver in a worker, without vLLM's part: its state after a failed load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_rl.weights.update import encode
from tests.weights.sending import by_disk
from tests.weights.test_intake import equal


class Worker:
    """Tracks an update as vLLM's worker does."""

    moe_rl_recorder, active = None, False

    def __init__(self, engine):
        self.weight_transfer_engine = engine

    def start_weight_update(self):
        assert not self.active
        self.weight_transfer_engine.start_weight_update()
        self.active = True

    def update_weights(self, info):
        assert self.active
        try:
            self.weight_transfer_engine.update_weights(info)
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self):
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.weight_transfer_engine.finish_weight_update()
        self.active = False


class ReadingBack:
    """Notes what was confirmed, and finds wrong what `model.wrong` names. read_back.py has tests of its own."""

    def __init__(self, model):
        self.model = model

    def begin(self):
        self.model.confirmed = {}

    def confirmed(self, tensors):
        assert not tensors.keys() & self.model.loaded.keys(), "loaded before it was added up"
        self.model.confirmed |= tensors

    def wrong(self, version):
        return [f"{one} in version {version}" for one in self.model.wrong]


@pytest.fixture
def worker(taker, tmp_path, monkeypatch):
    """Make a worker. `model.loaded` lists what was loaded; `model.fault` is raised instead of loading."""
    from moe_rl.weights import receiver

    opened = []
    monkeypatch.setattr(receiver, "initialize_layerwise_reload", lambda model: opened.append("open"))
    monkeypatch.setattr(receiver, "finalize_layerwise_reload", lambda model, config: opened.append("closed"))
    monkeypatch.setattr(receiver, "collect_experts", lambda model: None)
    monkeypatch.setattr(receiver, "not_loaded", lambda model: [])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    model = SimpleNamespace(loaded={}, fault=None, opened=opened, wrong=[], confirmed={})
    monkeypatch.setattr(receiver, "ReadBack", lambda model, *about: ReadingBack(model))

    def load(tensors):
        if model.fault is not None:
            raise model.fault
        model.loaded |= dict(tensors)

    model.load_weights = load
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
        model_config=SimpleNamespace(
            model=str(tmp_path / "checkpoint"),
            hf_config=SimpleNamespace(tie_word_embeddings=False),
            word_embeddings_untied_by_checkpoint=False,
            dtype=torch.bfloat16,
        ),
    )
    return Worker(receiver.WeightReceiver(None, config, torch.device("cpu"), model))


def test_a_whole_update_may_follow_one_at_which_vllm_failed(worker, others, tmp_path):
    from moe_rl.weights.receiver import take

    update, model = encode(by_disk(tmp_path, others, version=1)), worker.weight_transfer_engine.model
    model.fault = KeyError("layers.7")
    with pytest.raises(KeyError, match="layers.7"):
        take(worker, update)
    assert model.opened == ["open", "closed"] and not worker.weight_transfer_engine.intake.holding().whole
    model.fault = None
    answer = take(worker, update)
    assert answer["whole"] and answer["version"] == 1 and not answer["refused"] and equal(model.loaded, others)
    assert model.opened == ["open", "closed"] * 2


def test_what_was_recorded_is_taken_before_the_weights_change(worker, others, tmp_path):
    from moe_rl.weights.receiver import take

    opened = worker.weight_transfer_engine.model.opened
    worker.moe_rl_recorder = SimpleNamespace(settle=lambda: opened.append("settled"), weight_version=0)
    assert take(worker, encode(by_disk(tmp_path, others, version=1)))["whole"]
    assert opened == ["settled", "open", "closed"] and worker.moe_rl_recorder.weight_version == 1


def test_what_is_no_update_is_refused_and_touches_nothing(worker, others, tmp_path):
    from moe_rl.weights.receiver import take

    update = encode(by_disk(tmp_path, others, version=1))
    answer = take(worker, update.replace(b'"final"', b'"fin"'))
    assert answer["whole"] and "fin" in answer["refused"] and not worker.weight_transfer_engine.model.opened
    assert take(worker, update)["version"] == 1


def test_a_model_that_computes_with_other_weights_samples_nothing_until_a_whole_update(worker, others, tmp_path):
    from moe_rl.weights.receiver import take

    model = worker.weight_transfer_engine.model
    model.wrong = ["layer 3, mlp.gate.weight: only zeros"]
    answer = take(worker, encode(by_disk(tmp_path, others, version=1)))
    assert equal(model.confirmed, others) and not answer["whole"]
    assert "vLLM computes with other weights" in answer["refused"] and model.wrong[0] in answer["refused"]
    model.wrong, model.loaded = [], {}
    answer = take(worker, encode(by_disk(tmp_path, others, version=2, replaces=1, changed=False)))
    assert answer["whole"] and answer["version"] == 2
