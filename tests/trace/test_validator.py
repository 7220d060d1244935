"""Every planted fault is refused, with a message that names request, token and layer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RouteValidationError
from moe_rl.trace.store import RouteRecord, ShardWriter, TraceSpec, TraceStore, token_digest, validate
from moe_rl.trace.validator import check_routes

TOKENS = [5, 6, 7, 8, 9]


@pytest.fixture
def stored(tmp_path, spec, random_routes):
    """A good record as the store gives it, and its reference. Layers 0, 1, 3; 5 tokens; weight version 7."""
    with ShardWriter(tmp_path, "s", spec) as writer:
        ref = writer.add("step1/p0:0", random_routes(spec, 5), TOKENS, 7)
    return TraceStore(tmp_path).read(ref), ref


def _with(routes, token, layer, ids):
    routes = routes.copy()
    routes[token, layer] = ids
    return routes


def _permuted(routes):
    return np.ascontiguousarray(routes[:, [1, 0, 2]])


# name: (change of the record, change of validate's arguments, parts of the message)
FAULTS = {
    "missing last row": (
        lambda r: {"routes": r.routes[:-1]},
        {},
        ["token 4 has no routes", "got 4 rows", "expected 5"],
    ),
    "missing first row": (lambda r: {"routes": r.routes[1:]}, {}, ["token 4 has no routes"]),
    "no rows": (lambda r: {"routes": r.routes[:0]}, {}, ["token 0 has no routes"]),
    "extra row": (
        lambda r: {"routes": np.concatenate([r.routes, r.routes[:1]])},
        {},
        ["routes from token 5 on belong to no token", "got 6 rows"],
    ),
    "duplicate expert": (
        lambda r: {"routes": _with(r.routes, 2, 1, [3, 9, 3, 1])},
        {},
        ["chosen twice", "token 2, layer 1", "[3, 9, 3, 1]"],
    ),
    "id == E": (
        lambda r: {"routes": _with(r.routes, 4, 2, [0, 1, 2, 32])},
        {},
        ["expert id 32 does not exist", "token 4, layer 3"],
    ),
    "-1 as uint8": (
        lambda r: {"routes": _with(r.routes, 0, 0, [255, 1, 2, 3])},
        {},
        ["expert id 255", "token 0, layer 0"],
    ),
    "zero buffer": (lambda r: {"routes": np.zeros_like(r.routes)}, {}, ["chosen twice", "token 0, layer 0"]),
    "layer missing": (lambda r: {"routes": r.routes[:, :2]}, {}, ["layer 3 has no routes", "got 2 layers"]),
    "layer extra": (lambda r: {"routes": r.routes[:, [0, 1, 2, 2]]}, {}, ["layers after 3", "got 4 layers"]),
    "k wrong": (
        lambda r: {"routes": r.routes[..., :3]},
        {},
        ["experts per token", "token 0, layer 0", "got 3", "expected 4"],
    ),
    "layers permuted": (
        lambda r: {"routes": _permuted(r.routes)},
        {},
        ["not those that the sampler published", "shard s"],
    ),
    "rows permuted": (lambda r: {"routes": r.routes[::-1]}, {}, ["not those that the sampler published"]),
    "one id changed": (
        lambda r: {"routes": _with(r.routes, 1, 1, np.sort(np.setdiff1d(range(32), r.routes[1, 1]))[:4])},
        {},
        ["not those that the sampler published"],
    ),
    "flat": (lambda r: {"routes": r.routes.reshape(5, -1)}, {}, ["wrong shape"]),
    "int32": (lambda r: {"routes": r.routes.astype(np.int32)}, {}, ["wrong type", "got int32"]),
    "a list": (lambda r: {"routes": r.routes.tolist()}, {}, ["wrong type", "got list"]),
    "layer map of another model": (
        lambda r: {"spec": replace(r.spec, moe_layers=(0, 1, 2))},
        {},
        ["layer 3 has no routes", "[0, 1, 2]", "[0, 1, 3]"],
    ),
    "layer map too long": (
        lambda r: {"spec": replace(r.spec, moe_layers=(0, 1, 2, 3))},
        {},
        ["layer 2 is no MoE layer"],
    ),
    "layers counted, not numbered": (
        lambda r: {},
        {"spec": TraceSpec("tiny-0123456789abcdef", 32, 4, (1, 2, 4))},
        ["layer 2 has no routes"],
    ),
    "experts": (lambda r: {"spec": replace(r.spec, num_experts=64)}, {}, ["num_experts", "got 64", "expected 32"]),
    "top_k": (lambda r: {"spec": replace(r.spec, top_k=8)}, {}, ["top_k", "got 8", "expected 4"]),
    "other model": (
        lambda r: {"spec": replace(r.spec, model_fingerprint="other")},
        {},
        ["another model", "got fingerprint other"],
    ),
    "tokens shifted by one": (
        lambda r: {},
        {"token_ids": [4, 5, 6, 7, 8]},
        ["other tokens", "tokens 0 to 4, all layers"],
    ),
    "tokens swapped": (lambda r: {}, {"token_ids": [5, 6, 8, 7, 9]}, ["other tokens"]),
    "other request's tokens": (lambda r: {}, {"token_ids": [1, 2, 3, 4, 5]}, ["other tokens"]),
    "last sampled token fed too": (lambda r: {}, {"token_ids": [5, 6, 7, 8, 9, 10]}, ["token 5 has no routes"]),
    "padding": (lambda r: {}, {"token_ids": [5, 6, 7, 8, -100]}, ["token id out of range", "token 4", "no padding"]),
    "stale version": (lambda r: {}, {"weight_version": 8}, ["weight version 7", "expected 8 to 8"]),
    "too stale": (
        lambda r: {},
        {"weight_version": 10, "max_staleness": 2},
        ["weight version 7", "8 to 10 (max_staleness 2)"],
    ),
    "version of the future": (lambda r: {}, {"weight_version": 6, "max_staleness": 5}, ["weight version 7", "1 to 6"]),
    "version unknown": (lambda r: {"weight_version": -1}, {"weight_version": 0}, ["weight version is unknown"]),
    "version None": (lambda r: {"weight_version": None}, {}, ["weight version is unknown"]),
    "version rewritten": (
        lambda r: {"weight_version": 8},
        {"weight_version": 8},
        ["not those that the sampler published"],
    ),
    "key rewritten": (lambda r: {"key": "step1/p1:0"}, {}, ["another request"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refused(stored, spec, name):
    record, ref = stored
    change, arguments, parts = FAULTS[name]
    good = {"token_ids": TOKENS, "spec": spec, "weight_version": 7, "ref": ref}
    validate(record, **good)
    bad = replace(record, **change(record))
    with pytest.raises(RouteValidationError) as caught:
        validate(bad, **{**good, **arguments})
    for part in [f"request {bad.key}", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("change", [{"rows": 4}, {"digest": "0" * 16}, {"key": "step1/p1:0"}])
def test_reference_of_another_record_is_refused(stored, spec, change):
    record, ref = stored
    with pytest.raises(RouteValidationError, match="step1/p0:0"):
        validate(record, token_ids=TOKENS, spec=spec, weight_version=7, ref=replace(ref, **change))


def test_what_the_limits_allow(stored, spec):
    record, ref = stored
    validate(record, token_ids=np.array(TOKENS), spec=replace(spec), weight_version=9, max_staleness=2, ref=ref)
    validate(
        replace(record, routes=record.routes.astype(np.uint16)), token_ids=TOKENS, spec=spec, weight_version=7, ref=ref
    )


def test_uint8_cannot_hold_more_than_256_experts(random_routes):
    spec = TraceSpec("m", 300, 2, (0,))
    wrapped = random_routes(spec, 4).astype(np.uint8)
    record = RouteRecord("r", wrapped, token_digest([1, 2, 3, 4]), 0, spec)
    with pytest.raises(RouteValidationError, match="request r.*got uint8.*300 experts"):
        validate(record, token_ids=[1, 2, 3, 4], spec=spec, weight_version=0)


@settings(max_examples=200, deadline=None)
@given(
    experts=st.one_of(st.integers(1, 24), st.sampled_from([255, 256, 257, 512])),
    top_k=st.integers(1, 16),
    rows=st.integers(0, 6),
    layers=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    plant=st.booleans(),
)
def test_set_check_agrees_with_plain_python(experts, top_k, rows, layers, seed, plant):
    top_k = min(top_k, experts)
    spec = TraceSpec("m", experts, top_k, tuple(range(0, 2 * layers, 2)))
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((rows, layers, experts)), axis=-1)[..., :top_k].astype(np.uint16)
    if plant and rows:
        token, layer, choice = rng.integers(rows), rng.integers(layers), rng.integers(top_k)
        routes[token, layer, choice] = rng.integers(0, experts + 2)
    bad = [
        (token, 2 * layer)
        for token in range(rows)
        for layer in range(layers)
        if len(set(routes[token, layer].tolist())) < top_k or max(routes[token, layer].tolist()) >= experts
    ]
    if not bad:
        check_routes(routes, spec, rows=rows, where="r")
        return
    with pytest.raises(RouteValidationError, match=f"token {bad[0][0]}, layer {bad[0][1]}\\)"):
        check_routes(routes, spec, rows=rows, where="r")


def test_set_check_finds_a_fault_in_a_late_block(random_routes):
    spec = TraceSpec("m", 64, 8, tuple(range(48)))
    routes = np.tile(random_routes(spec, 32), (64, 1, 1))  # 98304 sets, several blocks
    check_routes(routes, spec, rows=2048, where="r")
    routes[2047, 47, 7] = routes[2047, 47, 0]
    with pytest.raises(RouteValidationError, match="token 2047, layer 47"):
        check_routes(routes, spec, rows=2048, where="r")
