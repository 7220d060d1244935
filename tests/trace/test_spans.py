"""Which rows of a sequence which weights routed, and how the sampler came by them."""

import numpy as np
import pytest

from moe_rl.trace.spans import cut_spans, spans_of_rows
from moe_rl.types import Provenance, Span

CACHED, PREFILL, DECODE = Provenance.CACHED, Provenance.PREFILL, Provenance.DECODE


@pytest.mark.parametrize(
    ("versions", "cached", "prompt", "spans"),
    [
        ([3, 3, 3, 4, 4], 1, 3, (Span(1, 3, CACHED), Span(2, 3, PREFILL), Span(2, 4, DECODE))),
        ([3, 4, 4, 4], 0, 2, (Span(1, 3, PREFILL), Span(1, 4, PREFILL), Span(2, 4, DECODE))),
        ([5, 5], 2, 2, (Span(2, 5, CACHED),)),
        ([5], 0, 1, (Span(1, 5, PREFILL),)),
        ([], 0, 0, ()),
    ],
)
def test_a_span_ends_where_the_weights_or_the_way_of_the_rows_change(versions, cached, prompt, spans):
    assert spans_of_rows(np.array(versions, np.int64), cached=cached, prompt=prompt) == spans


def test_a_slice_has_the_spans_of_its_own_rows():
    spans = (Span(2, 1, CACHED), Span(3, 1, PREFILL), Span(4, 2, DECODE))
    rows = [(span.weight_version, span.provenance) for span in spans for _ in range(span.rows)]
    for first in range(10):
        for last in range(first, 10):
            cut = cut_spans(spans, first, last)
            assert [(s.weight_version, s.provenance) for s in cut for _ in range(s.rows)] == rows[first:last]
