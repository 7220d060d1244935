"""Provides a tiny random Qwen3-MoE and engines that run it. Engines take seconds to start, so tests share them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.types import GenerateRequest
from moe_rl.vllm.wire import EngineSettings
from tests.rollout.serving import MAX_LEN
from tests.support.independent import Independent
from tests.weights.sending import by_disk

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 4, 512
TEXTS = 320  # the tokenizer knows these first ids


def make_checkpoint(folder: Path, seed: int) -> Path:
    """Make a random Qwen3-MoE whose routers and logits are spread out enough to tell errors from rounding."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
        eos_token_id=1,
        initializer_range=0.15,
    )
    model = Qwen3MoeForCausalLM(config).float()
    model.save_pretrained(folder)
    shutil.copy("assets/tiny_moe/policy/tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, seed) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=1 + seed)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory, seed) -> Path:
    """A checkpoint with the same shapes and other weights."""
    return make_checkpoint(tmp_path_factory.mktemp("other"), seed=2 + seed)


@pytest.fixture(scope="session")
def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="session")
def others(other_checkpoint):
    return load_file(other_checkpoint / "model.safetensors")


@pytest.fixture(scope="session")
def settings(tmp_path_factory) -> EngineSettings:
    """Those of the shared engine, which starts with the model of seed 0."""
    folder = tmp_path_factory.mktemp("engine")
    return EngineSettings(
        model_path=make_checkpoint(tmp_path_factory.mktemp("model"), seed=1),
        dtype="float32",
        max_model_len=MAX_LEN,
        max_concurrent=256,
        kv_cache_mib=64,
        trace_root=folder / "trace",
        model_fingerprint="tiny",
        log_path=folder / "engine.log",
        startup_timeout_seconds=600.0,
        seed=0,
        reads_text=True,
    )


@pytest.fixture(scope="session")
def started(settings):
    with Blocking(VllmEngine(settings)) as running:
        yield running


@pytest.fixture(scope="session")
def engine(started, weights, seed, tmp_path_factory):
    """The shared engine: float32, recording, with the weights of the seed. A test that changes them restores them."""
    if seed:
        (one,) = started.generate(make_requests(1, 1, max_tokens=1), shard=f"seed-{seed}")
        held = one.newest_version
        started.update_weights(by_disk(tmp_path_factory.mktemp("seed"), weights, version=held + 1, replaces=held))
    return started


def two_stop_strings(codec, completions):
    """A text that begins inside a token and ends inside the next, and one with a token between that has no text."""

    def text(token):
        return codec.decode([token]) if token < TEXTS else ""

    def found(good):
        for one in completions:
            for before, token, after in zip(one.token_ids, one.token_ids[1:], one.token_ids[2:], strict=False):
                if good(before, token, after):
                    return before, token, after
        raise AssertionError("no such tokens were sampled")

    def plain(token):
        return len(text(token)) > 1 and text(token).isascii() and text(token).isalpha()

    first, second, _ = found(lambda before, token, _: plain(before) and plain(token))
    left, _, right = found(lambda before, token, after: plain(before) and token >= TEXTS and plain(after))
    return text(first)[-1] + text(second)[0], text(left) + text(right)[0]


def check_stopped(codec, free, stopped, stops, *, seed=0) -> None:
    """Check that each completion ends with the token that completes the first stop string, as the one without end
    shows, and has all tokens up to there. With another seed than 0 one of the strings may always come first."""
    for before, after in zip(free, stopped, strict=True):
        texts = [codec.decode([t for t in before.token_ids[:n] if t < TEXTS]) for n in range(len(before.token_ids) + 1)]
        ends = [n for n, text in enumerate(texts) if any(stop in text for stop in stops)]
        assert after.token_ids == before.token_ids[: ends[0] if ends else None] and after.stop_token_id is None
        assert (after.finish_reason, after.stop_string in stops) == (("stop", True) if ends else ("length", False))
        if ends:
            wanted = texts[ends[0]][: texts[ends[0]].index(after.stop_string)]
            assert codec.text(after).replace("\ufffd", "") == wanted.replace("\ufffd", "")
    found = {one.stop_string for one in stopped}
    assert found == {None, *stops} or (seed and len(found) > 1)


def make_requests(groups: int, size: int, *, max_tokens=12, stop=(), prompt=70, temperature=1.0, seed=0) -> list:
    """Make `groups` random prompts of different lengths from `prompt` on, with `size` samples each."""
    rng = np.random.default_rng([groups, seed])
    prompts = [tuple(rng.integers(0, VOCAB, prompt + 3 * at).tolist()) for at in range(groups)]
    return [
        GenerateRequest(f"prompt{at}:{sample}", tokens, 1000 * at + sample, max_tokens, temperature, tuple(stop))
        for at, tokens in enumerate(prompts)
        for sample in range(size)
    ]


@pytest.fixture(scope="session")
def requests_of(seed):
    return partial(make_requests, seed=seed)


@pytest.fixture(scope="session")
def reference(checkpoint) -> Independent:
    return Independent(checkpoint)


@pytest.fixture(scope="session")
def other_reference(other_checkpoint) -> Independent:
    return Independent(other_checkpoint)
