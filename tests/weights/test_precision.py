"""Tests float8 rounding: every value becomes the nearest one that float8 holds at its block's scale."""

import math

import pytest
import torch

from moe_rl.weights.sender import FP8_BLOCK, fp8_rounded, is_rounded

# Every finite float8 e4m3 value, from its definition: 4 bits of exponent (bias 7), 3 of mantissa, no infinities.
E4M3 = sorted(
    sign * value
    for sign in (1, -1)
    for value in (
        *(m / 8 * 2.0**-6 for m in range(8)),
        *((1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)),
    )
)


def test_the_values_of_e4m3():
    assert max(E4M3) == 448 and len(set(E4M3)) == 253


@pytest.mark.parametrize("shape", [(3, 5), (FP8_BLOCK, FP8_BLOCK), (FP8_BLOCK + 2, 2 * FP8_BLOCK + 1)])
def test_every_value_becomes_the_nearest_of_its_block(shape):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[1])
    rounded = fp8_rounded(weight)
    for row in range(0, shape[0], 7):
        for column in range(0, shape[1], 5):
            r, c = row // FP8_BLOCK * FP8_BLOCK, column // FP8_BLOCK * FP8_BLOCK
            scale = weight[r : r + FP8_BLOCK, c : c + FP8_BLOCK].abs().max().item() / 448
            nearest = min(abs(value * scale - weight[row, column].item()) for value in E4M3)
            error = abs(rounded[row, column].item() - weight[row, column].item())
            assert error == pytest.approx(nearest, rel=1e-3, abs=1e-6 * scale)
    assert not torch.equal(rounded, weight)
    assert rounded.is_contiguous(), "a rank sends it to rank 0 as a run of bytes"


def test_what_float8_holds_stays_and_is_the_same_when_rounded_again():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    once = fp8_rounded(weight)
    assert once.dtype == torch.bfloat16
    assert (once - weight).abs().max() <= weight.abs().max() / 16
    zeros = torch.zeros(4, 4)
    assert torch.equal(fp8_rounded(zeros), zeros)
    exact = torch.tensor([E4M3])
    assert torch.equal(fp8_rounded(exact), exact)


def test_the_largest_value_of_a_block_is_kept():
    weight = torch.randn(40, 40, generator=torch.Generator().manual_seed(3))
    assert fp8_rounded(weight).abs().max().item() == pytest.approx(weight.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("weight", [torch.zeros(3), torch.tensor([[math.nan]]), torch.tensor([[math.inf]])])
def test_what_cannot_be_rounded_is_refused(weight):
    with pytest.raises(ValueError, match="cannot be rounded to float8"):
        fp8_rounded(weight)


def test_routers_embeddings_and_norms_are_left_alone():
    layer = "model.layers.3."
    rounded = (
        *("self_attn.q_proj", "self_attn.o_proj", "self_attn.kv_a_proj_with_mqa"),
        *("mlp.experts.7.gate_proj", "mlp.shared_experts.down_proj"),
    )
    kept = ("mlp.gate", "input_layernorm", "self_attn.q_norm")
    assert all(is_rounded(f"{layer}{name}.weight") for name in rounded)
    assert not any(is_rounded(f"{layer}{name}.weight") for name in kept)
    assert not any(map(is_rounded, ("lm_head.weight", "model.embed_tokens.weight", f"{layer}self_attn.q_proj.bias")))
