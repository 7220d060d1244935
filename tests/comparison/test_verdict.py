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
    "quantities": {"completion": {"policy": {"k3": {
        "before": estimate(3e-3, 2e-3, 4e-3), "after": estimate(1e-3, 5e-4, 1.9e-3),
    }}}},
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


@pytest.mark.parametrize("high", [2e-3, 2.5e-3])
def test_intervals_that_touch(high):
    bad = copy.deepcopy(GOOD)
    bad["quantities"]["completion"]["policy"]["k3"]["after"]["high"] = high
    got = verdict(bad)
    assert got["exit_code"] == 3 and "is not below the interval before replay, 0.002 to 0.004" in got["reasons"][0]


def test_a_fault_that_was_not_found():
    bad = GOOD | {"self_test": {"problems": ["layers permuted: exchanged in the trainer and not refused"]}}
    assert verdict(bad)["reasons"] == ["self-test: layers permuted: exchanged in the trainer and not refused"]
