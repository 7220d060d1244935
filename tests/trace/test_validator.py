"""Tests that every planted fault is refused, with request, token and layer in the message."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RouteValidationError
from moe_rl.trace import RouteRecord, ShardWriter, TraceSpec, TraceStore, check_routes, validate
from moe_rl.types import Provenance, Span
from tests.support.refusals import refused

TOKENS = [5, 6, 7, 8, 9]


@pytest.fixture
def stored(tmp_path, spec, random_routes):
    """A valid record as the store returns it, and its reference. Layers 0, 1, 3; 5 tokens; weight version 7."""
    with ShardWriter(tmp_path, "s", spec) as writer:
        ref = writer.add("step1/p0:0", random_routes(spec, 5), TOKENS, [Span(5, 7, Provenance.DECODE)])
    return TraceStore(tmp_path).read(ref), ref


def _with(routes, token, layer, ids):
    routes = routes.copy()
    routes[token, layer] = ids
    return routes


def _versions(*versions):
    return {"spans": tuple(Span(1, version, Provenance.DECODE) for version in versions)}


# name: (change of the record, change of validate's arguments, what the refusal tells)
FAULTS = {
    "missing last row": (
        lambda r: {"routes": r.routes[:-1]},
        {},
        {"fault": "token without routes", "token": 4, "got": ("4",), "expected": 5},
    ),
    "missing first row": (lambda r: {"routes": r.routes[1:]}, {}, {"fault": "token without routes", "token": 4}),
    "no rows": (lambda r: {"routes": r.routes[:0]}, {}, {"fault": "token without routes", "token": 0}),
    "extra row": (
        lambda r: {"routes": np.concatenate([r.routes, r.routes[:1]])},
        {},
        {"fault": "rows too many", "token": 5, "got": ("6",)},
    ),
    "duplicate expert": (
        lambda r: {"routes": _with(r.routes, 2, 1, [3, 9, 3, 1])},
        {},
        {"fault": "expert twice", "token": 2, "layer": 1, "got": [3, 9, 3, 1]},
    ),
    "id == E": (
        lambda r: {"routes": _with(r.routes, 4, 2, [0, 1, 2, 32])},
        {},
        {"fault": "no expert", "token": 4, "layer": 3, "expert": 32},
    ),
    "-1 as uint8": (
        lambda r: {"routes": _with(r.routes, 0, 0, [255, 1, 2, 3])},
        {},
        {"fault": "no expert", "token": 0, "layer": 0, "expert": 255},
    ),
    "zero buffer": (
        lambda r: {"routes": np.zeros_like(r.routes)},
        {},
        {"fault": "expert twice", "token": 0, "layer": 0},
    ),
    "layer missing": (
        lambda r: {"routes": r.routes[:, :2]},
        {},
        {"fault": "layer without routes", "layer": 3, "got": ("2",)},
    ),
    "layer extra": (
        lambda r: {"routes": r.routes[:, [0, 1, 2, 2]]},
        {},
        {"fault": "layers too many", "layer": 3, "got": ("4",)},
    ),
    "k wrong": (
        lambda r: {"routes": r.routes[..., :3]},
        {},
        {"fault": "experts per token", "token": 0, "layer": 0, "got": 3, "expected": 4},
    ),
    "layers permuted": (
        lambda r: {"layers": (1, 0, 3)},
        {},
        {"fault": "layer order", "got": [1, 0, 3], "expected": [0, 1, 3]},
    ),
    "a layer not asked for": (lambda r: {}, {"layers": [0, 1]}, {"fault": "layer not asked for", "layer": 3}),
    "layers asked for not there": (
        lambda r: {"layers": (0, 1), "routes": r.routes[:, :2]},
        {},
        {"fault": "layer without routes", "layer": 3},
    ),
    "flat": (lambda r: {"routes": r.routes.reshape(5, -1)}, {}, {"fault": "shape"}),
    "int32": (lambda r: {"routes": r.routes.astype(np.int32)}, {}, {"fault": "type", "got": "int32"}),
    "a list": (lambda r: {"routes": r.routes.tolist()}, {}, {"fault": "type", "got": "list"}),
    "layer map of another model": (
        lambda r: {"spec": replace(r.spec, layer_map="mmmd")},
        {},
        {"fault": "layer without routes", "layer": 3, "got": [0, 1, 2], "expected": [0, 1, 3]},
    ),
    "layer map too long": (
        lambda r: {"spec": replace(r.spec, layer_map="mmmm")},
        {},
        {"fault": "layer not asked for", "layer": 2},
    ),
    "layers counted, not numbered": (
        lambda r: {},
        {"spec": TraceSpec("tiny-0123456789abcdef", 32, 4, "dmmdm")},
        {"fault": "layer without routes", "layer": 2},
    ),
    "another kind of layer": (
        lambda r: {"spec": replace(r.spec, layer_map="mmhm")},
        {},
        {"fault": "layer map", "got": "mmhm", "expected": "mmdm"},
    ),
    "experts": (
        lambda r: {"spec": replace(r.spec, num_experts=64)},
        {},
        {"fault": "num_experts", "got": 64, "expected": 32},
    ),
    "top_k": (lambda r: {"spec": replace(r.spec, top_k=8)}, {}, {"fault": "top_k", "got": 8, "expected": 4}),
    "other model": (
        lambda r: {"spec": replace(r.spec, model_fingerprint="other")},
        {},
        {"fault": "model", "got": ("other",)},
    ),
    "tokens shifted by one": (
        lambda r: {},
        {"token_ids": [4, 5, 6, 7, 8]},
        {"fault": "tokens", "token": 0, "got": ("id 5", "5 tokens"), "expected": ("4",)},
    ),
    "tokens swapped": (
        lambda r: {},
        {"token_ids": [5, 6, 8, 7, 9]},
        {"fault": "tokens", "token": 2, "got": ("7", "2"), "expected": ("8",)},
    ),
    "other request's tokens": (lambda r: {}, {"token_ids": [1, 2, 3, 4, 5]}, {"fault": "tokens"}),
    "tokens of the record cut": (
        lambda r: {"token_ids": r.token_ids[:4]},
        {},
        {"fault": "tokens", "token": 4, "got": ("4",), "expected": ("9",)},
    ),
    "last sampled token fed too": (
        lambda r: {},
        {"token_ids": [5, 6, 7, 8, 9, 10]},
        {"fault": "token without routes", "token": 5},
    ),
    "padding": (lambda r: {}, {"token_ids": [5, 6, 7, 8, -100]}, {"fault": "token id", "token": 4, "got": -100}),
    "stale version": (
        lambda r: {},
        {"weight_version": 8},
        {"fault": "weight version", "tokens": "0 to 4", "got": ("7",), "expected": ("8 to 8",)},
    ),
    "too stale": (
        lambda r: {},
        {"weight_version": 10, "max_staleness": 2},
        {"fault": "weight version", "got": ("7",), "expected": ("8 to 10", "2")},
    ),
    "version of the future": (
        lambda r: {},
        {"weight_version": 6, "max_staleness": 5},
        {"fault": "weight version", "got": ("7",), "expected": ("1 to 6",)},
    ),
    "one span too stale": (
        lambda r: _versions(7, 7, 6, 7, 7),
        {},
        {"fault": "weight version", "tokens": "2 to 2", "got": ("6",)},
    ),
    "one span of the future": (
        lambda r: _versions(7, 7, 7, 7, 8),
        {},
        {"fault": "weight version", "tokens": "4 to 4", "got": ("8",)},
    ),
    "version unknown": (lambda r: _versions(7, 7, -1, 7, 7), {}, {"fault": "weight version"}),
    "version None": (lambda r: _versions(7, 7, 7, 7, None), {}, {"fault": "weight version"}),
    "rows without a version": (lambda r: _versions(7, 7, 7, 7), {}, {"fault": "spans", "got": ("4",)}),
    "no versions": (lambda r: {"spans": ()}, {}, {"fault": "spans", "got": ("0",)}),
    "key rewritten": (lambda r: {"key": "step1/p1:0"}, {}, {"fault": "another request"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refused(stored, spec, name):
    record, ref = stored
    change, arguments, facts = FAULTS[name]
    good = {"token_ids": TOKENS, "spec": spec, "weight_version": 7, "ref": ref}
    validate(record, **good)
    bad = replace(record, **change(record))
    with refused(RouteValidationError, request=bad.key, **facts):
        validate(bad, **{**good, **arguments})


@pytest.mark.parametrize("change", [{"rows": 4}, {"key": "step1/p1:0"}])
def test_reference_of_another_record_is_refused(stored, spec, change):
    record, ref = stored
    with refused(RouteValidationError, request="step1/p0:0"):
        validate(record, token_ids=TOKENS, spec=spec, weight_version=7, ref=replace(ref, **change))


def test_what_the_limits_allow(stored, spec):
    record, ref = stored
    good = {"spec": replace(spec), "weight_version": 7, "ref": ref}
    validate(record, token_ids=np.array(TOKENS), **good | {"weight_version": 9, "max_staleness": 2})
    validate(replace(record, **_versions(5, 6, 6, 7, 7)), token_ids=TOKENS, **good | {"max_staleness": 2})
    validate(replace(record, routes=record.routes.astype(np.uint16)), token_ids=TOKENS, **good)


def test_a_slice_is_checked_against_its_own_tokens_and_layers(tmp_path, stored, spec):
    _, ref = stored
    part = TraceStore(tmp_path).read(ref, layers=[1, 3], rows=(1, 4))
    good = {"spec": spec, "weight_version": 7, "ref": ref, "layers": [1, 3]}
    validate(part, token_ids=TOKENS[1:4], **good)
    with refused(RouteValidationError, fault="tokens", token=3, got=("8",), expected=("9",)):
        validate(part, token_ids=[6, 7, 9], **good)
    with refused(RouteValidationError, fault="tokens", token=1):
        validate(part, token_ids=TOKENS[:3], **good)
    with refused(RouteValidationError, fault="layer without routes", layer=0):
        validate(part, token_ids=TOKENS[1:4], **good | {"layers": None})
    with refused(RouteValidationError, fault="rows", got=("4",), expected=("3",)):
        validate(part, token_ids=TOKENS[1:4], **good | {"ref": replace(ref, rows=3)})


def _record(spec, routes, tokens):
    spans = (Span(len(tokens), 0, Provenance.DECODE),)
    return RouteRecord("r", routes, np.array(tokens, np.int32), spans, False, spec, 0, spec.moe_layers)


def test_uint8_cannot_hold_more_than_256_experts(random_routes):
    spec = TraceSpec("m", 300, 2, "m")
    record = _record(spec, random_routes(spec, 4).astype(np.uint8), [1, 2, 3, 4])
    with refused(RouteValidationError, fault="type", request="r", got="uint8", expected=("300",)):
        validate(record, token_ids=[1, 2, 3, 4], spec=spec, weight_version=0)


def test_constant_buffers_are_refused(random_routes):
    spec = TraceSpec("m", 32, 4, "mmdmm")
    tokens, real = [*range(8)], random_routes(spec, 8)
    same_rows, same_layers = np.repeat(real[:1], 8, axis=0), np.repeat(real[:, :1], 4, axis=1)

    def check(routes, tokens=tokens, spec=spec):
        validate(_record(spec, routes, tokens), token_ids=tokens, spec=spec, weight_version=0)

    with refused(RouteValidationError, fault="equal tokens", request="r"):
        check(same_rows)
    with refused(RouteValidationError, fault="equal layers", request="r"):
        check(same_layers)
    with refused(RouteValidationError, fault="equal layers", got=("[0]",)):
        check(np.zeros((8, 16, 1), np.uint8), spec=TraceSpec("m", 32, 1, "m" * 16))
    # Valid cases: short sequences or few different tokens, models whose router has no choice, any variation at all, and
    # routers of few layers or few experts, which may collapse at once.
    check(same_rows, [1, 2] * 4)
    check(np.tile(np.array([[3], [9], [4], [20]], np.uint8), (8, 1, 1)), spec=TraceSpec("m", 32, 1, "mmmm"))
    check(same_rows[:, :3], spec=TraceSpec("m", 32, 4, "mmm"))
    check(same_rows[:7], tokens[:7])
    check(same_rows, [1] * 8)
    check(np.tile(np.arange(4, dtype=np.uint8), (8, 4, 1)), spec=TraceSpec("m", 4, 4, "mmdmm"))
    check(np.concatenate([same_rows[:7], real[7:]]))
    check(real[:, :1], spec=TraceSpec("m", 32, 4, "m"))


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
    spec = TraceSpec("m", experts, top_k, "md" * layers)
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
        check_routes(routes, spec, rows=rows, where={"request": "r"})
        return
    with refused(RouteValidationError, request="r", token=bad[0][0], layer=bad[0][1]):
        check_routes(routes, spec, rows=rows, where={"request": "r"})


def test_set_check_finds_a_fault_in_a_late_block(random_routes):
    spec = TraceSpec("m", 64, 8, "m" * 48)
    routes = np.tile(random_routes(spec, 32), (64, 1, 1))  # 98304 sets, several blocks
    check_routes(routes, spec, rows=2048, where={"request": "r"})
    routes[2047, 47, 7] = routes[2047, 47, 0]
    with refused(RouteValidationError, token=2047, layer=47):
        check_routes(routes, spec, rows=2048, where={"request": "r"})
