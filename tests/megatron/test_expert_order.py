"""Tests by which names the weights of an expert are found in either of Megatron's modules for experts."""

from types import SimpleNamespace

import pytest
import torch

from moe_rl.megatron.expert_order import expert_weights

EXPERTS = 23  # two digits too; the numbers of slots 1 and 2 occur in the names linear_fc1 and linear_fc2
NAMES = {f"linear_fc{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")}


def one_by_one():
    """Return the parameters {name: (slot, name within the expert)} of a SequentialMLP."""
    return {f"local_experts.{slot}.{name}": (slot, name) for slot in range(EXPERTS) for name in NAMES}


def grouped():
    """Return those of TransformerEngine's grouped linear layers, which number their matrices."""
    return {f"{name}{slot}": (slot, name) for slot in range(EXPERTS) for name in NAMES}


@pytest.mark.parametrize("named", [one_by_one, grouped])
def test_every_slot_has_the_same_names_and_its_own_weights(named):
    parameters = {name: torch.nn.Parameter(torch.zeros(())) for name in named()}
    experts = SimpleNamespace(named_parameters=parameters.items)
    found = expert_weights(SimpleNamespace(experts=experts, num_local_experts=EXPERTS))
    assert len(found) == EXPERTS
    for name, (slot, within) in named().items():
        assert found[slot][within] is parameters[name]
    assert all(weights.keys() == NAMES for weights in found)
