"""Tests sequences recorded by several pipeline stages, each with its own layers, and joined by the reader."""

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, validate
from moe_rl.types import Provenance, RouteRef, Span
from tests.support.refusals import refused

SPEC = TraceSpec("m", 32, 4, "mdmmmm")  # MoE layers 0, 2, 3, 4, 5
STAGES = {"plain": [(0, 2), (3, 4), (5,)], "interleaved": [(0, 3), (2, 5), (4,)]}


def _joined(*refs):
    return RouteRef(refs[0].key, refs[0].rows, tuple(part for ref in refs for part in ref.parts))


def _columns(layers):
    return [SPEC.moe_layers.index(layer) for layer in layers]


@pytest.fixture(params=STAGES)
def stages(request, tmp_path, random_routes, decoded):
    """A prompt and its continuation recorded by three stages; store, references and routes."""
    prompt, more = random_routes(SPEC, 9, 1), random_routes(SPEC, 6, 2)
    refs = []
    for number, layers in enumerate(STAGES[request.param]):
        # Stages may use different chunk sizes.
        layout = {"layer_group": 1 + number % 2, "token_block": 4 + number // 2}
        with ShardWriter(tmp_path, f"stage{number}", SPEC, layers=layers, **layout) as writer:
            first = writer.add("p", prompt[:, _columns(layers)], range(9), decoded(9))
            parent = replace(first, rows=7)
            refs.append(writer.add("c", more[:, _columns(layers)], range(6), decoded(6), parent=parent))
            if number == 1:
                writer.mark_aborted("c")
    return TraceStore(tmp_path), refs, np.concatenate([prompt[:7], more])


def test_parts_are_joined(stages):
    store, refs, routes = stages
    for order in ([0, 1, 2], [2, 0, 1]):
        ref = _joined(*(refs[i] for i in order))
        record = store.read(ref)
        np.testing.assert_array_equal(record.routes, routes)
        tokens = [*range(7), *range(6)]
        validate(record, token_ids=tokens, spec=SPEC, weight_version=7, ref=ref)
        assert record.aborted  # one stage said so
        info = store.info(ref)
        assert info.layers == SPEC.moe_layers and info.stored_bytes == sum(store.info(r).stored_bytes for r in refs)
        assert len(info.parent.parts) == 3 and store.read(info.parent).routes.shape == (7, 5, 4)
        by_hand = [[int((routes[:, layer] == e).sum()) for e in range(32)] for layer in range(5)]
        np.testing.assert_array_equal(store.expert_counts(ref), by_hand)


def test_a_slice_over_parts(stages):
    store, refs, routes = stages
    ref = _joined(*refs)
    for layers in ([0], [2, 3], [0, 4, 5], [2, 3, 4, 5]):
        record = store.read(ref, layers=layers, rows=(5, 11))
        np.testing.assert_array_equal(record.routes, routes[5:11, _columns(layers)])
        out = np.empty((6 + 13, len(layers), 4), np.uint8)
        store.read_batch([(ref, (5, 11)), (ref, None)], out, layers=layers)
        np.testing.assert_array_equal(out, np.concatenate([routes[5:11], routes])[:, _columns(layers)])


def test_a_stage_reads_only_its_own_part(stages, tmp_path):
    store, refs, routes = stages
    own = store.info(refs[2]).layers
    for number in (0, 1):
        path = tmp_path / f"stage{number}.safetensors"
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        raw[start] ^= 1  # the first frame
        path.write_bytes(raw)
    np.testing.assert_array_equal(store.read(_joined(*refs), layers=own).routes, routes[:, _columns(own)])
    with refused(TraceError, shard=refs[0].parts[0].shard):
        store.read(_joined(*refs))


def test_missing_and_doubled_layers_are_refused(stages):
    store, refs, _ = stages
    with refused(TraceError, fault="layer in no part", record="c"):
        store.read(_joined(refs[0], refs[2]))
    with refused(TraceError, fault="layer in no part", record="c"):
        store.read(refs[1])
    with refused(TraceError, fault="layer twice", record="c"):
        store.read(_joined(*refs, refs[1]))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"token_ids": [0, 1, 2, 9]}, "tokens"),
        ({"spans": [Span(4, 8, Provenance.DECODE)]}, "spans"),
        ({"key": "d"}, "another request"),
        ({"rows": 3}, "rows"),
        ({"spec": replace(SPEC, model_fingerprint="other")}, "models"),
        ({"keep_order": True}, "models"),
    ],
)
def test_parts_of_different_sequences_are_refused(tmp_path, random_routes, decoded, change, fault):
    refs = []
    for number, layers in enumerate([(0, 2, 3), (4, 5)]):
        some = {
            "key": "k",
            "token_ids": [0, 1, 2, 3],
            "spans": decoded(4),
            "rows": 4,
            "spec": SPEC,
            "keep_order": False,
        }
        if number:
            some |= change
        writer = ShardWriter(tmp_path, f"s{number}", some["spec"], layers=layers, keep_order=some["keep_order"])
        rows = some["rows"]
        routes = random_routes(SPEC, rows, layers=len(layers))
        spans = some["spans"] if rows == 4 else decoded(rows)
        refs.append(writer.add(some["key"], routes, some["token_ids"][:rows], spans))
        writer.publish()
    ref = _joined(*refs)
    store = TraceStore(tmp_path)
    for use in (store.read, lambda ref: store.read_batch([(ref, None)], np.empty((4, 5, 4), np.uint8))):
        with refused(TraceError, fault=fault):
            use(ref)


def test_stages_that_continue_different_records(tmp_path, random_routes, decoded):
    """One stage stored the prompt separately, one as part of the sequence, and one split it at another row."""
    refs, routes = [], random_routes(SPEC, 9)
    for number, (layers, cut) in enumerate([((0, 2), 0), ((3, 4), 5), ((5,), 3)]):
        some = routes[:, _columns(layers)]
        with ShardWriter(tmp_path, f"s{number}", SPEC, layers=layers) as writer:
            parent = writer.add("p", some[:cut], range(cut), decoded(cut)) if cut else None
            refs.append(writer.add("k", some[cut:], range(cut, 9), decoded(9 - cut), parent=parent))
    store, ref = TraceStore(tmp_path), _joined(*refs)
    np.testing.assert_array_equal(store.read(ref, rows=(2, 8)).routes, routes[2:8])
    info = store.info(ref)
    assert (info.rows, info.own_rows, info.parent) == (9, 9, None)
    assert store.info(refs[1]).parent.rows == 5


def test_stages_that_forwarded_different_numbers_of_tokens_too_many(tmp_path, random_routes, decoded):
    refs, routes = [], random_routes(SPEC, 6)
    for number, layers in enumerate([(0, 2, 3), (4, 5)]):
        with ShardWriter(tmp_path, f"s{number}", SPEC, layers=layers) as writer:
            rows = 5 + number
            some = routes[:rows, _columns(layers)]
            refs.append(replace(writer.add("k", some, range(rows), decoded(rows)), rows=5))
    np.testing.assert_array_equal(TraceStore(tmp_path).read(_joined(*refs)).routes, routes[:5])
