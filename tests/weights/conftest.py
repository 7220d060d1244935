"""Provides tensors of a small checkpoint, and a sampler without an engine that starts from them."""

import pytest
import torch
from safetensors.torch import save_file

from tests.weights.taking import Taker

EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"
ATTENTION = "model.layers.{}.self_attn.q_proj.weight"


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    names = [EXPERT.format(layer, expert) for layer in range(2) for expert in range(6)]
    tensors = {name: torch.randn(4, 6, generator=generator) for name in names}
    tensors |= {ATTENTION.format(layer): torch.randn(6, 6, generator=generator) for layer in range(2)}
    tensors["model.norm.weight"] = torch.randn(7, generator=generator).bfloat16()
    tensors["model.embed_tokens.weight"] = torch.randn(33, 5, generator=generator).bfloat16()
    return tensors


@pytest.fixture(scope="session")
def weights():
    return random_tensors(1)


@pytest.fixture(scope="session")
def others():
    return random_tensors(2)


@pytest.fixture
def taker(weights, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    save_file(weights, tmp_path / "checkpoint" / "model.safetensors")
    return Taker(tmp_path / "checkpoint")
