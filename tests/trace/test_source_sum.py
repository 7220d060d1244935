"""Tests the checksum of what left the sampler's engine: parts add up, and any change on the way changes it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import TraceError
from moe_rl.trace import signed
from moe_rl.trace.source_sum import added, expert_salts, place_salts, request_salt, row_salts, rows_of, sum_of, total
from moe_rl.types import RouteRef
from tests.support.refusals import refused

LAYERS, EXPERTS, TOP_K = (1, 2, 5), 16, 3


def sequence(seed, tokens=8):
    """Routes [T, L, K] and token ids [T]."""
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((tokens, len(LAYERS), EXPERTS)), -1)[..., :TOP_K].astype(np.uint8)
    return routes, rng.integers(0, 150_000, tokens)


def of(routes, tokens, *, key="s1/p0/c0", layers=LAYERS, start=0, versions=0):
    return total(key, rows_of(routes, layers, tokens, start, versions=versions))


def test_layers_and_rows_that_were_summed_apart_add_up():
    routes, tokens = sequence(0)
    stages = [of(routes[:, :1], tokens, layers=LAYERS[:1]), of(routes[:, 1:], tokens, layers=LAYERS[1:])]
    assert added(stages) == of(routes, tokens)
    assert added([of(routes[:3], tokens[:3]), of(routes[3:], tokens[3:], start=3)]) == of(routes, tokens)
    assert added([]) == of(routes[:0], tokens[:0]) == "0" * 16
    # whole sequences have both salts in one
    rows = sum(expert_salts(layer, EXPERTS)[routes[:, at]].sum(-1) for at, layer in enumerate(LAYERS))
    assert f"{int((rows * row_salts('s1/p0/c0', tokens)).sum()):016x}" == of(routes, tokens)


def test_it_is_of_sets_and_not_of_how_they_are_stored():
    routes, tokens = sequence(1)
    for same in (np.sort(routes, -1), routes.astype(np.int32), np.asfortranarray(routes)):
        assert of(same, tokens.astype(np.int32)) == of(routes, tokens)
    assert np.array_equal(expert_salts(3, 8), expert_salts(3, 512)[:8])


def test_salts_differ_and_those_of_rows_are_odd():
    experts = np.concatenate([expert_salts(layer, 512) for layer in range(100)])
    assert len(set(experts.tolist())) == len(experts)
    places = place_salts(np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300))
    assert len(set(places.tolist())) == len(places) and (places % 2 == 1).all()
    places = place_salts(np.tile(np.arange(300), 300), 7, np.repeat(np.arange(300), 300))
    assert len(set(places.tolist())) == len(places) and (places % 2 == 1).all()
    assert len({int(request_salt(f"s1/p0/c{n}")) for n in range(1000)}) == 1000


def test_a_reference_carries_it_as_a_number_of_64_bits():
    routes, tokens = sequence(2)
    ref = RouteRef("k", 5, (), start=3)
    mine = signed(ref, routes[3:], LAYERS, tokens[3:])
    assert mine.source_sum == of(routes[3:], tokens[3:], key="k", start=3)
    assert sum_of(mine) % 2**64 == int(mine.source_sum, 16)
    for text, value in (("f" * 16, -1), ("8" + "0" * 15, -(2**63)), ("7" + "f" * 15, 2**63 - 1), ("0" * 16, 0)):
        assert sum_of(RouteRef("k", 5, (), 0, text)) == value
    for text in ("", "12", "x" * 16, "F" * 16, "0" * 17, "0" * 15 + "\n"):
        with refused(TraceError, record="k", got=repr(text)[:40]):
            sum_of(RouteRef("k", 5, (), 0, text))


@settings(deadline=None)
@given(st.data())
def test_any_change_on_the_way_changes_it(data):
    routes, tokens = sequence(data.draw(st.integers(0, 2**32)))
    (others, _), right = sequence(data.draw(st.integers(0, 2**32))), of(routes, tokens)
    row, other = data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True))
    layer, second = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=2, unique=True))
    wrong, change = routes.copy(), data.draw(st.sampled_from(
        ["expert", "rows", "layers", "layers of a row", "shift", "sequence", "key", "token", "start", "version",
         "dropped"]
    ))  # fmt: skip
    asked = {}
    if change == "expert":
        wrong[row, layer, 0] = data.draw(st.integers(0, EXPERTS - 1))
    elif change == "rows":
        wrong[[row, other]] = wrong[[other, row]]
    elif change == "layers":
        wrong[:, [layer, second]] = wrong[:, [second, layer]]
    elif change == "layers of a row":
        wrong[row, [layer, second]] = wrong[row, [second, layer]]
    elif change == "shift":
        wrong = np.roll(wrong, data.draw(st.integers(1, 7)), 0)
    elif change == "sequence":
        wrong = others
    elif change == "dropped":
        wrong, tokens = wrong[:-1], tokens[:-1]
    elif change == "token":
        tokens = tokens.copy()
        tokens[row] += 1
    else:
        versions = np.where(np.arange(8) == row, 1, 0)
        asked = {"key": {"key": "s1/p0/c1"}, "start": {"start": 1}, "version": {"versions": versions}}[change]
    same = wrong.shape == routes.shape and np.array_equal(np.sort(wrong, -1), np.sort(routes, -1))
    if not same or change in ("key", "token", "start", "version"):
        assert of(wrong, tokens, **asked) != right
