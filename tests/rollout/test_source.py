"""Tests what is made of vLLM's own capture. Its arrays are made up here; test_native.py runs vLLM."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.errors import EngineError, RequestRefused
from moe_rl.rollout.engine import VllmEngine
from moe_rl.trace import TraceStore, signed
from moe_rl.types import Provenance, Span
from moe_rl.vllm.native_source import NativeSource
from moe_rl.vllm.recording import Recording, RecordingRequest
from tests.support.refusals import refused

LAYERS, EXPERTS, TOP_K = (1, 3), 16, 4
PROMPT, TOKENS = (5, 6, 7, 8, 9), (10, 11, 12)
ASK = RecordingRequest("a", "shard")


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


def result(routes, *, cached=0, versions=("3",), token_ids=TOKENS, finished=True):
    """Make an output of vLLM with these routes; `cached` rows of its prompt came from the prefix cache."""
    spans = [SimpleNamespace(version=version) for version in versions]
    last = SimpleNamespace(routed_experts=routes, weight_versions=spans, token_ids=list(token_ids))
    return SimpleNamespace(outputs=[last], num_cached_tokens=cached, prompt_token_ids=list(PROMPT), finished=finished)


def references(source: NativeSource) -> dict:
    source.publish("call", "shard", {"a": [*PROMPT, *TOKENS[:-1]]}, [])
    return source.references("call")


def test_arrays_of_finished_requests_become_records(source, tmp_path):
    source.open("shard")
    routes = captured(8)
    source.finished(ASK, TOKENS, result(routes, cached=4))
    refs = references(source)
    record = TraceStore(tmp_path / "trace").read(refs["a"])
    np.testing.assert_array_equal(record.routes, np.sort(routes[:, LAYERS], -1))
    assert record.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert record.spec.layer_map == "dmdmd"
    own = signed(refs["a"], routes[:, LAYERS], LAYERS, [*PROMPT, *TOKENS[:-1]], versions=3)
    assert own == refs["a"] != replace(refs["a"], source_sum="")
    how = [Provenance.CACHED, Provenance.PREFILL, Provenance.DECODE]
    assert record.spans == tuple(Span(rows, 3, one) for rows, one in zip((4, 1, 2), how, strict=True))
    assert source.stats() == {"requests": 1, "recorded": 1, "forwarded": 3, "refused": 0}


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        (result(None), {"got": "nothing", "expected": 7}),
        (result(captured(7)), {"got": "6 rows", "expected": 7}),
        (result(captured(8).astype(np.int16)), {"got": "int16"}),
        (result(captured(8), versions=("3", "4")), {"got": "tokens of weight versions [3, 4]", "expected": "one"}),
        (result(captured(8), versions=()), {"got": "tokens of weight versions []"}),
    ],
)
def test_what_cannot_be_trained_on_is_refused(source, wrong, facts):
    source.finished(ASK, TOKENS, wrong)
    assert source.stats() == {"requests": 1, "recorded": 0, "forwarded": 0, "refused": 1}
    with refused(RequestRefused, *map(str, facts.values()), fault="nothing"):
        references(source)


@pytest.mark.parametrize(
    "change, reason", [(lambda routes: routes * 0, "[0, 0, 0, 0]"), (lambda routes: routes + 1, "expert 16")]
)
def test_impossible_experts_are_refused_when_the_record_is_published(source, change, reason):
    source.finished(ASK, TOKENS, result(change(captured(8))))
    with refused(EngineError, reason, fault="not recorded", request="a"):
        references(source)


def streamed(closed: list):
    """Stand in for AsyncLLM.generate: three tokens in two pieces, and the routes with the last."""

    async def generate(prompt, params, request_id, *, priority):
        assert (prompt, priority) == ("prompt", 7)
        try:
            yield result(None, token_ids=TOKENS[:2], finished=False)
            yield result(captured(8), token_ids=TOKENS[2:])
        finally:
            closed.append(request_id)

    return generate


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_a_server_records_a_request_before_its_last_output_which_has_no_routes(source, ends, asks):
    closed, recorder = [], source._recorder
    params = SimpleNamespace(extra_args=ASK.extra_args() if asks else None)

    async def sample():
        pieces = []
        async with aclosing(recorder.wrap(streamed(closed))("prompt", params, "id", priority=7)) as outputs:
            async for output in outputs:
                assert recorder.unfinished("shard") == ["a"] * asks and recorder.unfinished("other") == []
                pieces += output.outputs[0].token_ids
                assert output.outputs[0].routed_experts is None
                assert recorder.stats["recorded"] == (asks and output.finished)
                if not ends:
                    break
        return pieces

    assert asyncio.run(sample()) == list(TOKENS if ends else TOKENS[:2])
    assert closed == ["id"] and recorder.unfinished("shard") == []
    if asks and ends:
        assert references(source)["a"].rows == 7


@pytest.mark.long
def test_native_capture_is_refused_where_it_cannot_run(settings, tmp_path):
    asked = replace(settings, capture="native", log_path=tmp_path / "log", trace_root=tmp_path / "trace")
    with pytest.raises(
        EngineError, match="own capture cannot run here.*platform cpu.*rollout.capture to patch or worker"
    ):
        VllmEngine(asked)
