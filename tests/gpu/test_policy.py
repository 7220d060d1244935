"""The trained policy on one CUDA device against the same independent reference.

The rounding of TF32 alone changes a log-probability by 1.3e-3.
"""

import pytest
import torch

from moe_rl.proof.cases import Case
from moe_rl.proof.matrix import merged
from tests.support.planted import Planted


@pytest.mark.parametrize("case", [Case(1), Case(1, train={"recompute": "uniform"})], ids=lambda case: case.name)
def test_replay_equals_the_reference_with_the_same_routes(proven, case):
    outcome = proven.outcome(case)
    print("largest differences:", outcome.logprobs, outcome.gradients)
    assert outcome.logprobs < 1e-2 and outcome.gradients < outcome.tolerance < outcome.free_gradients
    assert outcome.wrong_maps == outcome.wrong_received == 0
    assert outcome.consumed == outcome.expected > 0


@pytest.mark.parametrize("case", [Case(1, mode="native")], ids=[""])
def test_native_routing_equals_the_reference(proven, case):
    outcome = proven.outcome(case)
    assert outcome.logprobs < 1e-2 and outcome.gradients < outcome.tolerance


@pytest.mark.parametrize("case", [Case(1, train={"dtype": "bfloat16"})], ids=[""])
def test_bfloat16_trains_near_the_reference(proven, reference, case):
    logprobs = reference(forced=True).logprobs
    seen = merged(proven.ranks(case), "logprobs")
    difference = torch.cat([(seen[i] - logprobs[i]).abs() for i in logprobs])
    print("mean difference:", float(difference.mean()))
    assert 1e-4 < difference.mean() < 0.1


@pytest.mark.parametrize("fault", ["swapped", "repeated", "lost key"])
def test_a_planted_fault_is_refused(proven, fault):
    case = Planted(1, fault=fault)
    assert all(rank["error"] for rank in proven.ranks(case))
