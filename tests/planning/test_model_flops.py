"""Tests by hand how many operations training a published model needs, and what a device can do."""

import pytest

from moe_rl.models.hf import read_published
from moe_rl.planning.model_flops import active_matrix_elements, forward_flops, peak_flops, training_flops
from tests.planning.meta_cases import ROOT

# Elements of the matrices that a token meets: attention, router and experts of the layers, then the output matrix.
QWEN = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048 + 8 * 3 * 768 * 2048) + 151936 * 2048
LATENT = 1536 * 7168 + 128 * 192 * 1536 + (512 + 64) * 7168 + 128 * 256 * 512 + 7168 * 128 * 128
DEEPSEEK = 61 * LATENT + 3 * 3 * 18432 * 7168 + 58 * (9 * 3 * 2048 * 7168 + 256 * 7168) + 129280 * 7168
GPT_OSS = 36 * (2 * 4096 * 2880 + 2 * 512 * 2880 + 128 * 2880 + 4 * 3 * 2880 * 2880) + 201088 * 2880


@pytest.fixture(scope="module")
def published():
    return lambda name: read_published(ROOT / f"configs/models/{name}.json")


@pytest.mark.parametrize(
    ("name", "elements", "billions"),
    [
        ("qwen3_30b_a3b", QWEN, 3.04),  # published: 3.3, with the embedding's 0.31
        ("deepseek_v3", DEEPSEEK, 36.6),  # published: 37, with the embedding's 0.93
        ("gpt_oss_120b", GPT_OSS, 5.13),  # published: 5.13, without the embedding
    ],
)
def test_the_matrices_that_a_token_meets(published, name, elements, billions):
    assert active_matrix_elements(published(name)) == elements
    assert elements / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_pass_over_sequences(published):
    """A token attends to itself and the tokens before it: 10 pairs in a sequence of 4, and 1 in a sequence of 1."""
    qwen, deepseek = published("qwen3_30b_a3b"), published("deepseek_v3")
    forward = 2 * QWEN * 5 + 48 * 2 * 32 * (128 + 128) * (10 + 1)
    assert forward_flops(qwen, [4, 1]) == forward and training_flops(qwen, [4, 1]) == 3 * forward
    assert forward_flops(qwen, []) == 0
    # frozen weights need no gradients, but attention has no weights
    assert training_flops(qwen, [4, 1], adapters=True) == 3 * forward - 2 * QWEN * 5
    # a head of latent attention has queries of 192 and values of 128
    assert forward_flops(deepseek, [4]) == 2 * DEEPSEEK * 4 + 61 * 2 * 128 * (192 + 128) * 10


def test_a_window_leaves_fewer_pairs(published):
    """Every second layer sees 128 tokens: all pairs of the first 128 tokens, then 128 for each token."""
    pairs = 18 * (200 * 201 // 2) + 18 * (128 * 129 // 2 + 72 * 128)
    assert forward_flops(published("gpt_oss_120b"), [200]) == 2 * GPT_OSS * 200 + 2 * 64 * (64 + 64) * pairs


def test_only_known_devices_in_bfloat16_have_a_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.5e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("CPU", "bfloat16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is None  # a part of the device
