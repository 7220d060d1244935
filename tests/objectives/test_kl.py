import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.objectives.kl import k3

getcontext().prec = 80


@given(st.floats(-80, 80, width=32))
def test_never_negative_and_zero_only_at_zero(d):
    value = k3(torch.tensor(d, dtype=torch.float64)).item()
    assert value >= 0 and (value == 0) == (d == 0)


@pytest.mark.parametrize("d", [s * m for s in (1, -1) for m in (1e-14, 1e-8, 3e-5, 9.99e-4, 1e-3, 1.01e-3, 0.2, 5, 30)])
def test_equals_the_definition_at_80_digits(d):
    exact = Decimal(d).exp() - 1 - Decimal(d)
    got = k3(torch.tensor(d, dtype=torch.float64)).item()
    assert abs(Decimal(got) - exact) <= Decimal("1e-12") * exact


@pytest.mark.parametrize("d", [-40.0, -1.0, -1e-3, -2e-5, 0.0, 2e-5, 1e-3, 1.0, 40.0])
def test_slope_is_expm1(d):
    x = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    k3(x).backward()
    assert math.isclose(x.grad.item(), math.expm1(d), rel_tol=1e-12)
