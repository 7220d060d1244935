"""Sampling with real vLLM: what was computed, what was recorded and what the completion says are the same thing."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import EngineError
from moe_rl.trace.store import TraceStore, token_digest

pytestmark = pytest.mark.slow


def check_against_reference(completions, settings, reference, temperature=1.0) -> int:
    """Routes, tokens, rows and logprobs of every completion equal Hugging Face's. Returns the rows compared."""
    store, rows = TraceStore(settings.trace_root), 0
    for completion in completions:
        tokens = completion.prompt_token_ids + completion.token_ids
        routes, logprobs = reference(tokens, temperature)
        record = store.read(completion.routes)
        assert record.spec.moe_layers == (0, 1, 2, 3)
        assert record.routes.shape[0] == completion.routes.rows == len(tokens) - 1
        np.testing.assert_array_equal(np.sort(record.routes, -1), routes[:-1], err_msg=completion.key)
        assert record.token_digest == token_digest(np.asarray(tokens[:-1], np.int32))
        assert record.weight_version == completion.weight_version
        sampled = logprobs[len(completion.prompt_token_ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, sampled, rtol=0, atol=1e-5, err_msg=completion.key)
        rows += len(tokens) - 1
    return rows


def logged(settings, shard: str) -> dict[str, int]:
    """What the engine's log says about a shard: rows, tokens forwarded, preemptions."""
    (line,) = [line for line in settings.log_path.read_text().splitlines() if line.startswith(f"shard {shard}: ")]
    found = re.search(r"(\d+) rows, (\d+) tokens forwarded, (\d+) preemptions", line)
    return dict(zip(("rows", "forwarded", "preemptions"), map(int, found.groups()), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_routes_and_logprobs_equal_hugging_face(engine, settings, reference, requests_of, temperature):
    shard = f"reference-{temperature}"
    completions = engine.generate(requests_of(6, 4, temperature=temperature), shard=shard)
    rows = check_against_reference(completions, settings, reference, temperature)
    assert len({completion.token_ids for completion in completions}) == len(completions)
    assert {completion.weight_version for completion in completions} == {0}
    # Witness: cached prefixes were really used, so rows of other requests had to be found.
    told = logged(settings, shard)
    assert told["rows"] == rows
    assert told["forwarded"] < rows - 6 * 3 * 32


def test_same_requests_give_the_same_completions(engine, requests_of):
    requests = requests_of(5, 4)
    first = engine.generate(requests, shard="again-0")
    engine.generate(requests_of(3, 2, prompt=40), shard="again-between")
    second = engine.generate(requests, shard="again-1")
    for one, other in zip(first, second, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.routes.digest == other.routes.digest
    moved = engine.generate([replace(request, seed=request.seed + 7) for request in requests], shard="again-2")
    assert all(one.token_ids != other.token_ids for one, other in zip(first, moved, strict=True))


def test_order_and_stop_tokens(engine, settings, reference, requests_of):
    requests = requests_of(4, 3)
    free = engine.generate(requests, shard="stop-0")
    assert [completion.key for completion in free] == [request.key for request in requests]
    assert {completion.finish_reason for completion in free} == {"length"}
    stop = free[0].token_ids[4]
    stopped = engine.generate([replace(request, stop_token_ids=(stop,)) for request in requests], shard="stop-1")
    for before, after in zip(free, stopped, strict=True):
        if stop in before.token_ids:
            assert after.token_ids == before.token_ids[: before.token_ids.index(stop) + 1]
            assert after.finish_reason == "stop"
        else:
            assert after.token_ids == before.token_ids
            assert after.finish_reason == "length"
    assert stopped[0].finish_reason == "stop"
    check_against_reference(stopped, settings, reference)


def test_score_equals_hugging_face(engine, reference):
    tokens = np.random.default_rng(5).integers(0, 512, 90).tolist()
    np.testing.assert_allclose(engine.score(tokens), reference(tokens)[1], rtol=0, atol=1e-5)
    with pytest.raises(EngineError, match="Too few or many"):
        engine.score(tokens[:1])


def test_what_cannot_be_sampled_is_refused_and_the_engine_goes_on(engine, requests_of):
    (request,) = requests_of(1, 1)
    for wrong, message in (
        ([replace(request, max_tokens=300)], "370 tokens, more than max_model_len 256"),
        ([replace(request, max_tokens=0)], "max_tokens 0"),
        ([replace(request, prompt_token_ids=())], "an empty prompt"),
        ([request, request], "a key used twice"),
    ):
        with pytest.raises(EngineError, match=f"request {request.key}.*{message}"):
            engine.generate(wrong, shard="refused")
    engine.generate([request], shard="refused")
    with pytest.raises(EngineError, match=rf"refused.*pid {engine.pid}"):
        engine.generate([request], shard="refused")
    assert engine.alive()
    assert len(engine.generate([request], shard="refused-2")) == 1


def test_the_environment_of_the_ranks_does_not_reach_the_engine(monkeypatch):
    from moe_rl.rollout.engine import _environment

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = _environment()
    assert not [
        name for name in environment if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "TORCHE", "GROUP"))
    ]
    assert environment["OMP_NUM_THREADS"] != "99"
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
