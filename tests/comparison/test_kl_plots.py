"""Tests which rows of the result are one setting."""

import pytest

from moe_rl.comparison.kl_plots import _layers, _rows, settings

K3 = {"value": 1e-5, "low": 5e-6, "high": 2e-5}


def rows(updates):
    about = {"sampler": "bfloat16", "trainer_dtype": "float32", "source": "rollouts of step 4"}
    about |= {"staleness_updates": updates, "policy": {"k3": K3}, "native_less_this": {"k3": K3}}
    return [about | {"routing": routing} for routing in ("native", "R2", "R3")]


@pytest.mark.parametrize("updates", [(0, 1, 2), (0, 0, 2), (0, 2, 2)])
def test_two_checkpoints_with_as_many_updates_are_two_settings(updates):
    made = [row for count in updates for row in rows(count)]
    assert [list(setting) for _, setting in settings(made)] == [rows(count) for count in updates]
    assert "In 3 of 3 settings" in _rows({"rows": made}).reading


@pytest.mark.parametrize("rate", [None, 0.5])
def test_layers_are_drawn_though_completions_of_one_token_have_no_rows(rate):
    whole = {"set_mismatch": {"before": 0.25, "after": 0.125}}
    none = {"set_mismatch": {"before": rate, "after": rate}}
    result = {"layers": [{"layer": 3, "completion": none, "prompt": whole, "all": whole}]}
    assert "layer 3 25.00% native and 12.50% shadow" in _layers(result).reading
