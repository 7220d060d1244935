"""Tests vLLM's own capture in Model Runner V2, whose Triton kernels an interpreter runs (interpreted_triton).

Servers and engine are vLLM's own. Their routes must be those of `transformers`, and of the recorder (patch 0001, Model
Runner V1) when it is fed the same tokens. A step takes up to a second, so requests are short.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import EngineError
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.trace import TraceStore
from moe_rl.types import GenerateRequest
from moe_rl.vllm.sampling import Growing
from tests.rollout.conftest import make_requests
from tests.rollout.serving import INTERPRETED, agree, serving, whole_update
from tests.weights.sending import by_disk

# The first test of a server waits for it, which on a busy machine takes long.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """A server of two data-parallel ranks, each with half of the experts. It prefills in chunks of 48 tokens."""
    layout = "--data-parallel-size", "2", "--max-num-batched-tokens", "48"
    with serving(checkpoint, tmp_path_factory.mktemp("server"), *layout, capture="native") as running:
        yield running


def check(store: TraceStore, engine, settings, completions, shard: str) -> None:
    """Compare the routes with those of the recorder."""
    scored = engine.score([[*one.prompt_token_ids, *one.token_ids] for one in completions], shard=shard)[0]
    for one, ref in zip(completions, scored.routes, strict=True):
        mine, theirs = store.read(one.routes), TraceStore(settings.trace_root).read(ref)
        np.testing.assert_array_equal(mine.routes, theirs.routes)
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)


def test_each_rank_of_a_server_records_what_the_recorder_would(server, engine, reference, settings):
    log = server.log.read_text(errors="replace")
    assert "[EP Rank 1/2] Expert parallelism is enabled" in log and "Local/global number of experts: 8/16" in log
    served = server.client().recording()
    assert (served.capture, served.gpus) == ("native", 2)
    completions = server.client(alone=True, timeout_seconds=900).generate(make_requests(2, 2, max_tokens=6), shard="a")
    agree(server.store, reference, completions)
    check(server.store, engine, settings, completions, "native-a")
    assert len({one.routes.parts[0].shard for one in completions}) == 1


def test_scored_tokens_have_routes(server, reference):
    tokens = list(range(3, 60))
    scored = asyncio.run(server.client().score([tokens], shard="scored"))
    reference(tokens).check("scored", server.store.read(scored.routes[0]).routes, scored.logprobs[0], atol=1e-5)


def test_a_turn_continues_a_record(server, reference):
    client = server.client(timeout_seconds=600)
    (first,) = client.generate([GenerateRequest("first", tuple(range(5, 75)), 1, 4, 1.0, ())], shard="turn1")
    prompt = (*first.prompt_token_ids, *first.token_ids, 7, 8, 9)
    asked = GenerateRequest("second", prompt, 2, 4, 1.0, (), parent=first.routes)
    (second,) = client.generate([asked], shard="turn2")
    agree(server.store, reference, [second])
    (parent,) = server.store.parents([second.routes])
    assert parent is not None and (parent.key, second.routes.rows) == ("first", len(prompt) + 3)


def test_an_aborted_request_keeps_its_rows(server, reference):
    asked, samples = GenerateRequest("left", tuple(range(4, 40)), 3, 500, 1.0, ()), [Growing()]

    async def leaves():
        leave = asyncio.Event()
        client = server.client(timeout_seconds=600)
        call = asyncio.create_task(client.sample([asked], "left", leave=leave, samples=samples))
        while not samples[0].token_ids:
            await asyncio.sleep(0.05)
        leave.set()
        return await call

    (one,) = asyncio.run(leaves())
    assert one.finish_reason == "abort" and 1 <= len(one.token_ids) < 500
    agree(server.store, reference, [one])


def test_records_name_the_weights_and_a_pause_is_refused(server, checkpoint, other_checkpoint, other_reference):
    client = server.client(timeout_seconds=600)
    assert client.update_weights(whole_update(server, other_checkpoint, 5, 0)).whole
    completions = client.generate(make_requests(1, 2, max_tokens=3), shard="five")
    agree(server.store, other_reference, completions, version=5)
    with pytest.raises(EngineError, match="which weights made which row"):
        asyncio.run(client.pause())
    assert client.update_weights(whole_update(server, checkpoint, 6, 5)).whole


def test_an_engine_beside_the_trainer_records_too(settings, weights, others, reference, other_reference, tmp_path):
    path = os.pathsep.join(filter(None, [str(INTERPRETED), os.environ.get("PYTHONPATH")]))
    asked = replace(settings, capture="native", log_path=tmp_path / "log", trace_root=tmp_path / "trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        native = Blocking(VllmEngine(asked))
    with native:
        store, held = TraceStore(tmp_path / "trace"), 0
        for version, (tensors, model) in enumerate([(weights, reference), (others, other_reference)], start=1):
            native.update_weights(by_disk(tmp_path, tensors, version=version, replaces=held))
            before = native.counts()["forwarded"]
            completions = native.generate(make_requests(1, 3, max_tokens=3), shard=f"v{version}")
            agree(store, model, completions, version=version)
            rows = sum(completion.routes.rows for completion in completions)
            assert native.counts()["forwarded"] - before == rows - 2 * 64, "two of three prompts come from the cache"
            tokens, held = [*completions[0].prompt_token_ids, *completions[0].token_ids], version
            scored = native.score([tokens], shard=f"scored{version}")[0]
            model(tokens).check("scored", store.read(scored.routes[0]).routes, scored.logprobs[0], atol=1e-5)
