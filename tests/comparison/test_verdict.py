"""Tests which results pass, and the reasons given for the others."""

import copy

import pytest

from moe_rl.comparison.experiment import verdict


def estimate(value, low, high):
    return {"value": value, "low": low, "high": high}


GOOD = {
    "rows": [
        {"routing": "native", "source": "step 3", "applied": None},
        {"routing": "R3", "source": "step 3", "applied": {"mismatch": 0, "checked": 9, "consumed": 4, "expected": 4}},
    ],
    "decision": {
        "outcome": "lower", "confidence": 0.975,
        "looks": [{"tokens": 2_000, "difference": estimate(2e-3, 1e-3, 3e-3)}],
    },
    "self_test": {"problems": []},
}  # fmt: skip


def test_exact_lower_and_every_fault_found():
    assert verdict(GOOD) == {"passed": True, "exit_code": 0, "reasons": []}


def test_one_route_that_was_not_applied():
    for counts in ({"mismatch": 1}, {"consumed": 3}):
        bad = copy.deepcopy(GOOD)
        bad["rows"][1]["applied"] |= counts
        got = verdict(bad)
        assert got["exit_code"] == 3 and "R3 on step 3: routes were not applied exactly" in got["reasons"][0]


@pytest.mark.parametrize(
    ("outcome", "difference", "said"),
    [
        ("undecided", estimate(1e-3, -1e-3, 3e-3), "the budget of tokens is spent"),
        ("higher", estimate(-2e-3, -3e-3, -1e-3), "replay raises it"),
    ],
)
def test_a_difference_that_is_not_above_0(outcome, difference, said):
    bad = copy.deepcopy(GOOD)
    bad["decision"] |= {"outcome": outcome, "looks": [{"tokens": 2_000, "difference": difference}]}
    got = verdict(bad)
    (reason,) = got["reasons"]
    assert got["exit_code"] == 3 and said in reason
    assert "2,000 tokens" in reason and f"97.5% interval {difference['low']:.3g} to {difference['high']:.3g}" in reason


def test_a_fault_that_was_not_found():
    bad = GOOD | {"self_test": {"problems": ["layers permuted: exchanged in the trainer and not refused"]}}
    assert verdict(bad)["reasons"] == ["self-test: layers permuted: exchanged in the trainer and not refused"]
