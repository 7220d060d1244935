"""The trained policy on one CUDA device against the same independent reference: `pytest -m gpu`. Never run so far."""

import pytest
import torch
from tests.distributed.test_policy import merged, worst

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recompute", ["none", "uniform"])
def test_replay_equals_the_reference_with_the_same_routes(run_policy, reference, recompute):
    process, seen = run_policy(1, recompute=recompute)
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, gradients = reference(forced=True)
    print("largest difference:", worst(merged(seen, "logprobs"), logprobs), worst(merged(seen, "grads"), gradients))
    assert worst(merged(seen, "logprobs"), logprobs) < 1e-4
    assert worst(merged(seen, "grads"), gradients) < 1e-4
    (rank,) = seen
    assert all(t["consumed"] == t["expected"] > 0 and t["applied_mismatch"] == 0 for t in rank["tallies"])


def test_native_routing_equals_the_reference(run_policy, reference):
    process, seen = run_policy(1, mode="native")
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, gradients = reference(forced=False)
    assert worst(merged(seen, "logprobs"), logprobs) < 1e-4
    assert worst(merged(seen, "grads"), gradients) < 1e-4


def test_bfloat16_trains_near_the_reference(run_policy, reference):
    process, seen = run_policy(1, dtype="bfloat16")
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, _ = reference(forced=True)
    difference = torch.cat([(merged(seen, "logprobs")[i] - logprobs[i]).abs() for i in logprobs])
    print("mean difference:", float(difference.mean()))
    assert 1e-4 < difference.mean() < 0.1


@pytest.mark.parametrize("fault", ["swapped", "repeated", "missed"])
def test_a_planted_fault_is_refused(run_policy, fault):
    process, seen = run_policy(1, fault=fault)
    assert process.returncode != 0 and not seen and "ReplayError" in process.stderr
