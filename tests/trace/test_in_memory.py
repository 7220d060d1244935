"""A batch's routes in memory: the same records and refusals as with the store, without a file."""

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import RouteValidationError, TraceError
from moe_rl.trace import MemoryTrace, ShardWriter, TraceStore, validate
from moe_rl.trace.source_sum import total
from moe_rl.types import Provenance, Span
from tests.support.refusals import refused

TOKENS = np.array([5, 6, 7, 8, 9])
SPANS = [Span(2, 6, Provenance.PREFILL), Span(3, 7, Provenance.DECODE)]


@pytest.mark.parametrize(("layers", "rows"), [(None, None), ((1, 3), (1, 4)), ((), (5, 5))])
def test_a_record_is_what_the_store_gives_back(tmp_path, spec, random_routes, layers, rows):
    routes, trace = random_routes(spec, 5), MemoryTrace(spec)
    with ShardWriter(tmp_path, "s", spec) as writer:
        of_store = writer.add("r", routes, TOKENS, SPANS)
    ref = trace.add("r", routes, TOKENS, SPANS)
    stored = TraceStore(tmp_path).read(of_store, layers=layers, rows=rows)
    (held,) = trace.read_each([(ref, rows)], layers=layers)
    for name in ("key", "spans", "aborted", "spec", "first_row", "layers"):
        assert getattr(held, name) == getattr(stored, name)
    for name in ("routes", "token_ids"):
        one, other = getattr(held, name), getattr(stored, name)
        assert np.array_equal(one, other) and one.dtype == other.dtype and not one.flags.writeable


def test_later_changes_by_the_caller_change_nothing(spec, random_routes):
    routes, tokens, trace = random_routes(spec, 5).astype(np.uint8), TOKENS.astype(np.int32), MemoryTrace(spec)
    ref = trace.add("r", routes, tokens, SPANS)
    before = routes.copy()
    routes[:], tokens[:] = 0, 0
    record = trace.read(ref)
    assert np.array_equal(record.routes, before)
    validate(record, token_ids=TOKENS, spec=spec, weight_version=7, max_staleness=1, ref=ref)
    with refused(RouteValidationError, fault="weight version", tokens="0 to 1"):
        validate(record, token_ids=TOKENS, spec=spec, weight_version=7, ref=ref)


def test_the_reference_has_the_checksum_of_the_rows_and_their_versions(spec, random_routes):
    sums = {
        MemoryTrace(spec)
        .add("r", random_routes(spec, 5, seed), TOKENS, [Span(5, version, Provenance.DECODE)])
        .source_sum
        for seed, version in ((0, 6), (0, 7), (1, 7))
    }
    assert len(sums) == 3 and total("r", np.zeros(5, np.uint64)) not in sums


def test_what_a_shard_refuses_is_refused(spec, random_routes):
    routes, trace = random_routes(spec, 5), MemoryTrace(spec)
    twice = routes.copy()
    twice[2, 1, 3] = twice[2, 1, 0]
    with refused(RouteValidationError, fault="expert twice", request="r", token=2, layer=1):
        trace.add("r", twice, TOKENS, SPANS)
    with refused(RouteValidationError, fault="token without routes", request="r", token=4):
        trace.add("r", routes[:-1], TOKENS, SPANS)
    with refused(RouteValidationError, fault="spans", request="r"):
        trace.add("r", routes, TOKENS, SPANS[1:])
    with refused(RouteValidationError, fault="token id", request="r"):
        trace.add("r", routes, [5, 6, -1, 8, 9], SPANS)
    ref = trace.add("r", routes, TOKENS, SPANS)
    with refused(TraceError, fault="key twice", request="r"):
        trace.add("r", routes, TOKENS, SPANS)
    for wrong in (replace(ref, key="other"), replace(ref, rows=6)):
        with refused(TraceError, record=wrong.key):
            record = trace.read(wrong)
            validate(record, token_ids=TOKENS, spec=spec, weight_version=7, max_staleness=1, ref=wrong)
    for layers in ((2,), (3, 1), (0, 0)):
        with refused(TraceError, record="r", got=layers):
            trace.read(ref, layers=layers)
    with refused(TraceError, record="r", fault="rows"):
        trace.read(ref, rows=(0, 6))
