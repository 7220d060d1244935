"""Tests sampling with real vLLM: what was computed, what was recorded and what the completion says agree."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from moe_rl.errors import EngineError
from moe_rl.objectives.logprobs import Support, token_logprobs, token_scores
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore
from moe_rl.train.sampling_support import read_head, read_support
from moe_rl.types import Sequence
from tests.rollout.conftest import TEXTS, VOCAB, check_stopped, two_stop_strings
from tests.rollout.in_flight import ENDLESS
from tests.rollout.serving import MAX_LEN
from tests.support.near_ties import NEAR, gaps_of


def check_against_reference(completions, settings, reference, temperature=1.0) -> int:
    """Compare routes, tokens, rows and log-probabilities of every completion with Hugging Face's; return the row
    count."""
    store, rows = TraceStore(settings.trace_root), 0
    for completion in completions:
        tokens = completion.prompt_token_ids + completion.token_ids
        record = store.read(completion.routes)
        assert record.spec.moe_layers == (0, 1, 2, 3)
        assert record.routes.shape[0] == completion.routes.rows == len(tokens) - 1
        assert record.token_ids.tolist() == list(tokens[:-1])
        assert {span.weight_version for span in record.spans} == {completion.newest_version}
        computed = reference(tokens, temperature=temperature)
        computed.check(completion.key, record.routes, completion.logprobs, atol=1e-5)
        rows += len(tokens) - 1
    return rows


@pytest.mark.seeds(3)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_routes_and_logprobs_equal_hugging_face(engine, settings, reference, seed, requests_of, temperature):
    shard = f"reference-{temperature}-{seed}"
    completions = engine.generate(requests_of(6, 4, temperature=temperature), shard=shard)
    check_against_reference(completions, settings, reference, temperature)
    assert len({completion.token_ids for completion in completions}) == len(completions)
    # Witness: cached prefixes were used, so rows of other requests had to be found, and were stored once.
    store = TraceStore(settings.trace_root)
    continued = [completion for completion in completions if store.info(completion.routes).parent is not None]
    assert len(continued) == 6 * 3


def test_each_completion_is_told_as_it_ends(engine, requests_of, monkeypatch):
    requests = [replace(one, max_tokens=n) for one, n in zip(requests_of(1, 3), (2, 30, 5), strict=True)]
    told, messages, submit = [], [], engine.sampler.calls.submit
    monkeypatch.setattr(
        engine.sampler.calls,
        "submit",
        lambda call, hears: submit(call, lambda news: messages.append(len(news)) or hears(news)),
    )
    completions = engine.generate(requests, shard="told", ended=lambda at, one: told.append((at, one)))
    assert messages == [1, 1, 1] and [at for at, _ in told] == [0, 2, 1]
    for at, one in told:
        assert one.routes is None and (one.key, one.token_ids) == (completions[at].key, completions[at].token_ids)


def test_same_requests_give_the_same_completions(engine, requests_of):
    requests = requests_of(5, 4)
    first = engine.generate(requests, shard="again-0")
    engine.generate(requests_of(3, 2, prompt=40), shard="again-between")
    second = engine.generate(requests, shard="again-1")
    for one, other in zip(first, second, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.routes.parts[0].digest == other.routes.parts[0].digest
    moved = engine.generate([replace(request, seed=request.seed + 7) for request in requests], shard="again-2")
    assert all(one.token_ids != other.token_ids for one, other in zip(first, moved, strict=True))


@pytest.mark.seeds(3)
def test_order_and_stop_tokens(engine, settings, reference, seed, requests_of):
    requests = requests_of(4, 3)
    free = engine.generate(requests, shard=f"stop-0-{seed}")
    assert [completion.key for completion in free] == [request.key for request in requests]
    assert {completion.finish_reason for completion in free} == {"length"}
    stop = free[0].token_ids[4]
    unused = next(token for token in range(512) if not any(token in one.token_ids for one in free))
    asked = [replace(request, stop_token_ids=(unused, stop)) for request in requests]
    stopped = engine.generate(asked, shard=f"stop-1-{seed}")
    for before, after in zip(free, stopped, strict=True):
        if stop in before.token_ids:
            assert after.token_ids == before.token_ids[: before.token_ids.index(stop) + 1]
            assert (after.finish_reason, after.stop_token_id) == ("stop", stop)
        else:
            assert after.token_ids == before.token_ids
            assert (after.finish_reason, after.stop_token_id) == ("length", None)
    assert stopped[0].finish_reason == "stop"
    check_against_reference(stopped, settings, reference)


@pytest.mark.seeds(3)
def test_stop_strings_across_tokens(engine, settings, reference, seed, requests_of):
    codec = TextCodec(settings.model_path, ())
    # Where a prompt ends inside a character, vLLM takes the prompt's text for sampled, and finds stop strings there.
    whole = codec.encode("z")
    requests = [
        replace(one, prompt_token_ids=one.prompt_token_ids[: -len(whole)] + whole)
        for one in requests_of(4, 5, max_tokens=60)
    ]
    free = engine.generate(requests, shard=f"text-0-{seed}")
    stops = two_stop_strings(codec, free)
    asked = [replace(request, stop=("never sampled", *stops)) for request in requests]
    never = asyncio.Event()
    beside = asyncio.run(engine.sampler.sample(0, asked, shard=f"text-2-{seed}", leave=never))
    for stopped in (engine.generate(asked, shard=f"text-1-{seed}"), beside):
        check_stopped(codec, free, stopped, stops, seed=seed)
        check_against_reference(stopped, settings, reference)


@pytest.mark.seeds(3)
def test_score_equals_hugging_face(engine, reference):
    tokens = np.random.default_rng(5).integers(0, 512, 90).tolist()
    reference(tokens).check_logprobs("score", engine.score([tokens])[0].logprobs[0], atol=1e-5)
    with pytest.raises(EngineError, match="number of tokens to score"):
        engine.score([tokens[:1]])


def test_what_cannot_be_sampled_is_refused_and_the_engine_goes_on(engine, requests_of):
    (request,) = requests_of(1, 1)
    for wrong, message in (
        ([replace(request, max_tokens=MAX_LEN)], f"{MAX_LEN + 70} tokens, more than max_model_len {MAX_LEN}"),
        ([replace(request, max_tokens=0)], "max_tokens 0"),
        ([replace(request, prompt_token_ids=())], "an empty prompt"),
        ([request, request], "a key used twice"),
        ([replace(request, prompt_token_ids=(3, 512))], "token ids 3 to 512, expected 0 to 511"),
        ([replace(request, prompt_token_ids=(-1, 5))], "token ids -1 to 5, expected 0 to 511"),
    ):
        with pytest.raises(EngineError, match=f"request {request.key}.*{message}"):
            engine.generate(wrong, shard="refused")
    engine.generate([request], shard="refused")
    with pytest.raises(EngineError, match=rf"refused.*pid {engine.sampler.pid}"):
        engine.generate([request], shard="refused")
    assert engine.sampler.alive()
    assert len(engine.generate([request], shard="refused-2")) == 1


def test_the_environment_of_the_ranks_does_not_reach_the_engine(monkeypatch):
    from moe_rl.vllm.process import child_environment

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = child_environment("patch")
    assert not [
        name for name in environment if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "TORCHE", "GROUP"))
    ]
    assert environment["OMP_NUM_THREADS"] != "99"
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_is_compiled_only_if_it_uses_graphs(settings, monkeypatch, graphs):
    """The pool and a trainer on a CPU, whose environment an engine inherits, compile nothing."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "1")
    with patch("moe_rl.rollout.engine.ChildProcess") as child:
        VllmEngine(replace(settings, cuda_graphs=graphs), waits=False)
    environment = child.call_args.kwargs["environment"]
    assert environment["TORCH_COMPILE_DISABLE"] == environment["TORCHDYNAMO_DISABLE"] == str(int(not graphs))


@pytest.mark.seeds(3)
def test_a_call_that_is_left_keeps_the_rest_as_far_as_it_got(engine, settings, reference, seed, requests_of):
    requests = [replace(r, max_tokens=8 if at < 3 else ENDLESS) for at, r in enumerate(requests_of(4, 2))]

    async def run():
        leave, short = asyncio.Event(), []

        def ended(at, completion):
            short.append(at)
            if len(short) == 3:
                leave.set()

        return await engine.sampler.sample(0, requests, shard=f"left-{seed}", leave=leave, ended=ended)

    completions = asyncio.run(run())
    assert [c.finish_reason for c in completions] == ["length"] * 3 + ["abort"] * 5
    assert all(c.token_ids for c in completions[3:])
    check_against_reference(completions, settings, reference)
    store = TraceStore(settings.trace_root)
    assert [store.info(c.routes).aborted for c in completions] == [False] * 3 + [True] * 5


@pytest.mark.seeds(3)
def test_only_what_is_asked_for_is_recorded(engine, settings, reference, seed, requests_of):
    silent = [replace(request, record=False) for request in requests_of(2, 2)]
    assert all(c.routes is None for c in engine.generate(silent, shard=f"silent-{seed}"))
    assert f"silent-{seed}" not in TraceStore(settings.trace_root).shards()
    first, second = engine.generate([silent[0], requests_of(2, 2)[1]], shard=f"half-{seed}")
    assert first.routes is None
    check_against_reference([second], settings, reference)


@pytest.mark.seeds(3)
def test_a_dialogue_continues_its_record(engine, settings, reference, seed, requests_of):
    (request,) = requests_of(1, 1)
    (one,) = engine.generate([request], shard=f"turn-1-{seed}")
    dialogue = one.prompt_token_ids + one.token_ids + (1, 2, 3)
    (two,) = engine.generate([replace(request, prompt_token_ids=dialogue, parent=one.routes)], shard=f"turn-2-{seed}")
    check_against_reference([two], settings, reference)
    info = TraceStore(settings.trace_root).info(two.routes)
    assert info.own_rows == two.routes.rows - one.routes.rows
    with pytest.raises(EngineError, match="does not continue its parent.*position 0"):
        wrong = replace(request, prompt_token_ids=(dialogue[0] ^ 1, *dialogue[1:]), parent=one.routes)
        engine.generate([wrong], shard=f"turn-3-{seed}")
    assert engine.sampler.alive()


@pytest.mark.long
def test_what_else_is_recorded_is_in_the_store(settings, reference, requests_of, tmp_path):
    asked = replace(
        settings,
        trace_root=tmp_path / "trace",
        log_path=tmp_path / "engine.log",
        support=True,
        log_normalizer=True,
        router_logits_fraction=1.0,
        head=4,
        yields=True,
    )
    requests = [replace(request, top_k=10, top_p=0.9) for request in requests_of(2, 1, max_tokens=40)]
    with Blocking(VllmEngine(asked)) as engine:
        assert os.getpriority(os.PRIO_PROCESS, engine.sampler.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        completions = engine.generate(requests, shard="extras")
        codec = TextCodec(settings.model_path, ())
        texts = [[codec.decode([token]) for token in one.token_ids[:-1] if token < TEXTS] for one in completions]
        stops = [[text for text in each if text.isascii()][-1] for each in texts]
        stopping = [replace(request, stop=(stop,)) for request, stop in zip(requests, stops, strict=True)]
        completions += engine.generate(stopping, shard="extras-stop")
    assert [one.finish_reason for one in completions] == ["length"] * 2 + ["stop"] * 2
    store = TraceStore(tmp_path / "trace")
    for completion in completions:
        assert completion.versions[0].weight_version == 0, "the checkpoint's own"
        counts = store.aux(completion.routes, "support_counts")[store.aux(completion.routes, "support_sets")]
        counts = counts[: len(completion.token_ids)]
        assert len(counts) == len(completion.token_ids) and 1 <= counts.min() <= counts.max() <= 10
        tokens = completion.prompt_token_ids + completion.token_ids
        # Under the mask a token is more likely; the log-normaliser undoes that.
        computed, first = reference(tokens), len(completion.prompt_token_ids) - 1
        clear = max(computed.clear - first, 0)
        masked = completion.logprobs + store.aux(completion.routes, "log_normalizer")[: len(counts)]
        computed.check_logprobs(completion.key, masked, atol=1e-4)
        assert (completion.logprobs > masked + 0.01).all()
        # From the support the trainer computes the sampler's own log-probabilities.
        trained = Sequence(completion.key, completion.prompt_token_ids, completion.token_ids, completion.logprobs, 0.0,
                           completion.versions, completion.routes)  # fmt: skip
        support = read_support(store, trained, VOCAB)
        support = Support.of(support.sets, support.counts, support.ids, torch.device("cpu"))
        logits = computed.logits[first:]
        ours = token_logprobs(logits, torch.tensor(completion.token_ids), 1.0, support=support)
        np.testing.assert_allclose(ours[:clear], completion.logprobs[:clear], rtol=0, atol=1e-5)
        head = read_head(store, trained, VOCAB, 4)
        ids = torch.from_numpy(head.ids.astype(np.int64))
        ours = token_scores(logits, torch.tensor(completion.token_ids), 1.0, others=ids, support=support)[1:].T
        np.testing.assert_allclose(ours[:clear], head.logprobs[:clear], rtol=0, atol=1e-5)
        kept = store.aux(completion.routes, "router_logits")
        rows = store.aux(completion.routes, "router_logits_rows")
        best = np.sort(np.argsort(kept, -1)[..., -4:], -1)
        apart = gaps_of(torch.tensor(kept), 4) >= NEAR
        np.testing.assert_array_equal(best[apart], store.read(completion.routes).routes[rows][apart])
