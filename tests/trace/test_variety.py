"""Tests which well-formed routes are refused as impossible. Routes of a real router, even a collapsed one, are
accepted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RouteValidationError
from moe_rl.trace import TraceSpec
from moe_rl.trace.variety import check_variety
from tests.support.refusals import refused

SPEC = TraceSpec("m", 32, 4, "mmdmmmmmm")
TOKENS = np.array([3, 9, 3, 4, 8, 1, 5, 3, 7, 2, 6, 9], np.int32)


def check(routes, tokens=TOKENS, spec=SPEC):
    layers = spec.moe_layers[: routes.shape[1]]
    check_variety(routes, tokens[: len(routes)], num_experts=spec.num_experts, layers=layers, where={"request": "r"})


@pytest.fixture
def routes(random_routes):
    return random_routes(SPEC, len(TOKENS)).astype(np.uint8)


def test_a_layer_with_the_rows_of_another_is_refused(routes):
    check(routes)
    routes[:, 2] = routes[:, 3]  # columns of layers 3 and 4
    with refused(RouteValidationError, fault="equal pair", request="r", layers="3 and 4", got=("12",)):
        check(routes)
    routes[11, 2] = [1, 2, 3, 5]  # one row differs from the other layer
    check(routes)


def test_two_layers_that_collapsed_to_the_same_set_are_not_refused(routes):
    routes[:, 2] = routes[:, 5] = [1, 7, 8, 30]
    check(routes)
    routes[4, 2] = routes[4, 5] = [2, 7, 8, 30]
    check(routes)
    for row, ids in ((5, [2, 9, 11, 13]), (6, [0, 1, 8, 21]), (7, [4, 5, 7, 29])):
        routes[row, 2] = routes[row, 5] = ids
    with refused(RouteValidationError, fault="equal pair", layers="3 and 6", got=("5",)):
        check(routes)


def test_a_layer_of_unwritten_rows_is_refused_and_a_collapsed_one_is_not(routes, random_routes):
    for unwritten in ([0, 1, 2, 3], [3, 1, 0, 2], [28, 29, 30, 31]):
        routes[:, 6] = unwritten
        with refused(RouteValidationError, fault="equal scores", request="r", layer=7):
            check(routes)
    check(routes, np.array([3, 9] * 6))  # of two tokens it tells nothing
    routes[:, 6] = [0, 1, 2, 4]
    check(routes)
    routes[:, 6] = [0, 1, 2, 3]
    routes[3, 6] = [0, 1, 2, 4]
    check(routes)
    routes[:, 6] = [0, 1, 2, 3]
    routes[:, 5] = [1, 7, 8, 30]
    check(routes)  # this model's routers do collapse, and one of many may well take the first experts
    some = TraceSpec("m", 16, 4, "mm")  # of 1,820 sets, too
    mixed = random_routes(some, len(TOKENS)).astype(np.uint8)
    mixed[:, 1] = [0, 1, 2, 3]
    check(mixed, spec=some)
    few = TraceSpec("m", 8, 2, "mm")  # of 28 sets a collapsed router may well take the first
    one = np.stack([np.arange(12) % 7, np.arange(12) % 7 + 1], -1).astype(np.uint8)
    check(np.stack([one, np.tile(np.uint8([0, 1]), (12, 1))], 1), spec=few)


def test_equal_rows_of_a_few_tokens_in_turn_are_not_refused(routes):
    routes[:] = routes[:1]
    check(routes, np.array([7] * 9 + [1, 2, 3]))  # a text of one token behind the end of a chat template
    with refused(RouteValidationError, fault="equal tokens", request="r"):
        check(routes)
    few = np.tile(np.uint8([0, 3, 5, 7]), (12, 8, 1)) ^ np.arange(8, dtype=np.uint8)[:, None]
    check(few, spec=TraceSpec("m", 8, 4, "m" * 8))  # a strong bias decides among eight experts


@settings(max_examples=200)
@given(st.data())
def test_routers_are_not_refused_healthy_or_collapsed(data):
    """Routers with one to all sets, each with its own numbering of experts, over tokens that repeat."""
    experts = data.draw(st.sampled_from([16, 32, 64]), "experts")
    top_k = data.draw(st.integers(2, 6), "top_k")
    layers = data.draw(st.integers(1, 12), "layers")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    tokens = rng.integers(0, data.draw(st.integers(2, 50), "vocabulary"), data.draw(st.integers(0, 40), "rows"))
    routes = np.empty((len(tokens), layers, top_k), np.uint8)
    for layer in range(layers):
        # The same tokens may fall into the same classes in several layers, as in the collapsed layers of a small model.
        sets = data.draw(st.sampled_from([1, 2, 3, 8, 60]), "sets")
        chosen = np.argsort(rng.random((sets, experts)), -1)[:, :top_k]
        if sets == 1 and (np.ptp(chosen) == top_k - 1):  # one of the two sets that a collapsed router must not have
            chosen[0] = 2 * np.arange(top_k) + 1
        routes[:, layer] = chosen[(tokens * 7 + np.arange(len(tokens)) // 3) % sets]
    whole = len(routes) and ((routes == routes[:1]).all() or (layers > 1 and (routes == routes[:, :1]).all()))
    if not whole:
        check_variety(routes, tokens, num_experts=experts, layers=range(layers), where="r")
