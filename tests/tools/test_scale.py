"""Tests from what the costs at full size are extrapolated, and how."""

import pytest


def test_the_step_of_a_config(benchmark):
    target = benchmark("scale_parts.target").Target.of("qwen3_30b_a3b")
    assert (target.sequences, target.longest, target.tokens) == (2048, 9216, 2048 * 5120)
    assert target.rank_tokens == target.tokens // 8  # 32 GPUs in tensor groups of 4
    assert (len(target.spec.moe_layers), target.spec.num_experts, target.spec.top_k) == (48, 128, 8)


def test_a_cost_at_full_size_follows_the_fitted_law(benchmark):
    at_full_size = benchmark("scale_parts.target").at_full_size
    assert at_full_size({10: 3.0, 20: 12.0, 40: 48.0}, 100) == pytest.approx((300.0, 2.0))
    assert at_full_size({10: 3.0, 20: 3.0, 40: 3.0}, 1000) == pytest.approx((3.0, 0.0))


def test_every_part_can_be_measured(benchmark):
    for name in benchmark("scale").PARTS:
        assert callable(benchmark(f"scale_parts.{name}").measured)
