"""Tests vLLM's own capture as a source. It runs only on GPUs: here its arrays are made up, the rest is real."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.errors import EngineError
from moe_rl.rollout.engine import VllmEngine
from moe_rl.trace import TraceStore, signed
from moe_rl.types import Provenance, Span
from moe_rl.vllm.recording import Recording, RecordingRequest
from moe_rl.vllm.route_source import NativeSource
from tests.support.refusals import refused

LAYERS, EXPERTS, TOP_K = (1, 3), 16, 4


@pytest.fixture
def source(tmp_path) -> NativeSource:
    model = SimpleNamespace(
        get_num_experts=lambda: EXPERTS,
        get_num_experts_per_tok=lambda: TOP_K,
        get_total_num_hidden_layers=lambda: 5,
    )
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    llm = SimpleNamespace(llm_engine=engine, collective_rpc=lambda method: [list(LAYERS)])
    return NativeSource(llm, Recording(str(tmp_path / "trace"), "fake"))


def captured(tokens: int) -> np.ndarray:
    """Make routes [tokens - 1, 5, K] as vLLM returns them: zeros where a layer has no experts."""
    rng = np.random.default_rng(tokens)
    routes = np.zeros((tokens - 1, 5, TOP_K), np.uint8)
    routes[:, LAYERS] = np.argsort(rng.random((tokens - 1, 2, EXPERTS)), -1)[..., :TOP_K]
    return routes


def result(routes, *, cached=0):
    """Make an output of vLLM with these routes; `cached` rows of its prompt came from the prefix cache."""
    return SimpleNamespace(outputs=[SimpleNamespace(routed_experts=routes)], num_cached_tokens=cached)


def test_arrays_of_finished_requests_become_records(source, tmp_path):
    source.set_weight_version(3)
    source.open("shard")
    prompt, tokens = (5, 6, 7, 8, 9), (10, 11, 12)
    routes = captured(8)
    source.finished(RecordingRequest("a", "shard"), prompt, tokens, result(routes, cached=4))
    source.publish("call", "shard", {"a": [*prompt, *tokens[:-1]]}, [])
    refs = source.references("call")
    record = TraceStore(tmp_path / "trace").read(refs["a"])
    np.testing.assert_array_equal(record.routes, np.sort(routes[:, LAYERS], -1))
    assert record.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert record.spec.layer_map == "dmdmd"
    own = signed(refs["a"], routes[:, LAYERS], LAYERS, [*prompt, *tokens[:-1]], versions=3)
    assert own == refs["a"] != replace(refs["a"], source_sum="")
    how = [Provenance.CACHED, Provenance.PREFILL, Provenance.DECODE]
    assert record.spans == tuple(Span(rows, 3, one) for rows, one in zip((4, 1, 2), how, strict=True))
    assert source.stats() == {"requests": 1, "recorded": 1, "forwarded": 3, "refused": 0}


@pytest.mark.parametrize(
    "change, error, facts",
    [
        (lambda routes: None, EngineError, {"request": "a", "got": "nothing", "expected": 7}),
        (lambda routes: routes[:-1], EngineError, {"request": "a", "got": ("6",), "expected": 7}),
        (lambda routes: routes.astype(np.int16), EngineError, {"request": "a", "got": "int16"}),
    ],
)
def test_what_cannot_be_trained_on_is_refused(source, change, error, facts):
    wrong = result(change(captured(8)))
    with refused(error, **facts):
        source.finished(RecordingRequest("a", "shard"), (5, 6, 7, 8, 9), (10, 11, 12), wrong)
    assert source.stats() == {"requests": 1, "recorded": 0, "forwarded": 0, "refused": 1}


@pytest.mark.parametrize(
    "change, reason", [(lambda routes: routes * 0, "[0, 0, 0, 0]"), (lambda routes: routes + 1, "expert 16")]
)
def test_impossible_experts_are_refused_when_the_record_is_published(source, change, reason):
    prompt, tokens = (5, 6, 7, 8, 9), (10, 11, 12)
    source.finished(RecordingRequest("a", "shard"), prompt, tokens, result(change(captured(8))))
    source.publish("call", "shard", {"a": [*prompt, *tokens[:-1]]}, [])
    with refused(EngineError, reason, fault="not recorded", request="a"):
        source.references("call")


@pytest.mark.long
def test_native_capture_is_refused_where_it_cannot_run(settings, tmp_path):
    asked = replace(settings, capture="native", log_path=tmp_path / "log", trace_root=tmp_path / "trace")
    with pytest.raises(
        EngineError, match="own capture cannot run here.*platform cpu.*rollout.capture to patch or worker"
    ):
        VllmEngine(asked)
