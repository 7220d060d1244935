"""Tests when a layer's experts are loaded, and what is held until then, on layers without vLLM's loading."""

from types import SimpleNamespace

import pytest
import torch

EXPERTS = 4


@pytest.fixture
def opened(monkeypatch):
    """Make a layer of experts that is open for loading, of whose experts the first two are here."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from moe_rl.weights import receiver

    def layer_of(parameters=("w13_weight", "w2_weight"), *, copies=0, gated=True):
        layer = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(layer)
        for name in parameters:
            layer.register_parameter(name, torch.nn.Parameter(torch.zeros(1), requires_grad=False))
            getattr(layer, name).weight_loader = vllms
        layer.moe_config = SimpleNamespace(
            num_experts=EXPERTS + copies, num_logical_experts=EXPERTS, is_act_and_mul=gated
        )
        layer._map_global_expert_id_to_local_expert_id = lambda expert: expert if expert < 2 else -1
        return layer, info

    def vllms(param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        raise AssertionError("loaded before the layer is complete")

    info, loaded = SimpleNamespace(loaded_weights=[]), []
    monkeypatch.setattr(receiver, "get_layerwise_info", lambda layer: info)
    monkeypatch.setattr(receiver, "_layerwise_process", lambda layer, info: loaded.append(len(info.loaded_weights)))
    layer_of.loaded, layer_of.vllms = loaded, vllms
    return layer_of


def calls(gated=True):
    for part in ("w1", "w2", "w3")[: 3 if gated else 2]:
        for expert in range(EXPERTS):
            yield "w2_weight" if part == "w2" else "w13_weight", part, expert


@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_is_loaded_once_with_its_last_tensor(opened, gated):
    from moe_rl.weights.receiver import collect_experts

    layer, info = opened(gated=gated)
    collect_experts(layer)
    every = list(calls(gated))
    for number, (name, part, expert) in enumerate([*every[:3], every[0], *every[3:]], 1):
        assert opened.loaded == []
        loader = getattr(layer, name).weight_loader
        here = loader(None, torch.ones(1), name, shard_id=part, expert_id=expert, return_success=True)
        assert here == (expert < 2) and len(info.loaded_weights) == number
    assert opened.loaded == [len(every) + 1]
    for name, bound in info.loaded_weights:
        held = bound.arguments["loaded_weight"]
        assert name in ("w13_weight", "w2_weight") and (held is None) == (bound.arguments["expert_id"] >= 2)
    assert loader.__wrapped__ is opened.vllms and loader.__name__ == "online_process_loader"


@pytest.mark.parametrize("other", [{"parameters": ("w13_weight", "w2_weight", "w13_bias")}, {"copies": 1}])
def test_vllm_counts_in_other_layers(opened, other):
    from moe_rl.weights.receiver import collect_experts

    layer, _ = opened(**other)
    collect_experts(layer)
    assert layer.w13_weight.weight_loader is opened.vllms
