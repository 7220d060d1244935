"""Provides a tiny random Qwen3-MoE and engines that run it. Engines take seconds to start, so tests share them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.rollout.engine import VllmEngine
from moe_rl.types import GenerateRequest
from moe_rl.vllm.wire import EngineSettings

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 4, 512


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
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=1,
        initializer_range=0.15,
    )
    model = Qwen3MoeForCausalLM(config).float()
    model.save_pretrained(folder)
    shutil.copy("assets/tiny_moe/policy/tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory) -> Path:
    """A checkpoint with the same shapes and other weights."""
    return make_checkpoint(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="session")
def settings(checkpoint, tmp_path_factory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("engine")
    return EngineSettings(
        model_path=checkpoint,
        dtype="float32",
        max_model_len=256,
        max_concurrent=256,
        kv_cache_mib=64,
        trace_root=folder / "trace",
        model_fingerprint="tiny",
        log_path=folder / "engine.log",
        startup_timeout_seconds=600.0,
        seed=0,
    )


@pytest.fixture(scope="session")
def engine(settings):
    """The shared engine: float32, recording. A test that changes its weights restores them."""
    with VllmEngine.start(settings) as running:
        yield running


def make_requests(groups: int, size: int, *, max_tokens=12, stop=(), prompt=70, temperature=1.0) -> list:
    """Make `groups` random prompts of different lengths from `prompt` on, with `size` samples each."""
    rng = np.random.default_rng(groups)
    prompts = [tuple(rng.integers(0, VOCAB, prompt + 3 * at).tolist()) for at in range(groups)]
    return [
        GenerateRequest(f"prompt{at}:{sample}", tokens, 1000 * at + sample, max_tokens, temperature, tuple(stop))
        for at, tokens in enumerate(prompts)
        for sample in range(size)
    ]


@pytest.fixture(scope="session")
def requests_of():
    return make_requests


class Reference:
    """Runs Hugging Face's model in float32, which the engine should agree with."""

    def __init__(self, folder: Path):
        from transformers import Qwen3MoeForCausalLM

        self._model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, token_ids, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return sorted top-k experts [T, L, K] of every token, and the log-probability [T - 1] of all but the
        first."""
        tokens = torch.tensor([list(token_ids)])
        output = self._model(tokens, output_router_logits=True, use_cache=False)
        logprobs = (output.logits[0] / temperature).log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        routes = torch.stack([logits.topk(TOP_K, -1).indices.sort(-1).values for logits in output.router_logits], 1)
        return routes.numpy(), logprobs.numpy()

    @torch.no_grad()
    def logits(self, token_ids) -> torch.Tensor:
        """Return the logits [T, V] of every token."""
        return self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@pytest.fixture(scope="session")
def reference(checkpoint) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def other_reference(other_checkpoint) -> Reference:
    return Reference(other_checkpoint)
