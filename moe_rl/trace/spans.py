"""Records which weights routed which rows: run-length lists over the rows of a record, in one canonical form."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moe_rl.errors import About, RouteValidationError
from moe_rl.types import Provenance, Span


def check_spans(spans: Sequence[Span], *, rows: int, where: About) -> tuple[Span, ...]:
    """Return canonical spans that cover exactly `rows` rows, or raise RouteValidationError. `where` names the
    sequence."""
    checked = []
    for span in spans:
        if not isinstance(span, Span) or _integer(span.rows) is None or span.rows < 1:
            raise RouteValidationError(
                "a span of rows is impossible",
                where=where,
                got=repr(span)[:80],
                expected="at least 1 row",
                fault="span",
            )
        version = _integer(span.weight_version)
        if version is None or not 0 <= version < 2**63:
            raise RouteValidationError(
                "weight version is unknown",
                where=where,
                got=repr(span.weight_version)[:40],
                expected="an integer from 0",
                do="record the version of the weights that sampled the rows",
                fault="weight version",
            )
        if span.provenance not in (0, 1, 2):
            raise RouteValidationError(
                "provenance is unknown",
                where=where,
                got=repr(span.provenance)[:40],
                expected="a Provenance",
                fault="provenance",
            )
        checked.append(Span(operator.index(span.rows), version, Provenance(span.provenance)))
    covered = sum(span.rows for span in checked)
    if covered != rows:
        raise RouteValidationError(
            "spans do not cover the rows",
            where=where,
            got=f"{covered} rows in {len(checked)} spans",
            expected=rows,
            do="give every forwarded token the weight version it was routed with",
            fault="spans",
        )
    return merge_spans(checked)


def spans_of_rows(weight_versions: np.ndarray, *, cached: int, prompt: int) -> tuple[Span, ...]:
    """Return the spans of a sequence's first rows, from the weight version [T] of each.

    `cached` rows were computed for another request. Rows after the `prompt` rows were decoded.
    """
    rows = len(weight_versions)
    changes = np.flatnonzero(weight_versions[1:] != weight_versions[:-1]) + 1
    bounds = sorted({0, min(cached, rows), min(max(cached, prompt), rows), *changes.tolist(), rows})

    def kind(row: int) -> Provenance:
        return Provenance.CACHED if row < cached else Provenance.PREFILL if row < prompt else Provenance.DECODE

    return tuple(Span(end - start, int(weight_versions[start]), kind(start)) for start, end in pairwise(bounds))


def versions_of_rows(spans: Iterable[Span]) -> np.ndarray:
    """Return the weight version int64 [T] of each row."""
    spans = tuple(spans)
    return np.repeat(np.array([span.weight_version for span in spans], np.int64), [span.rows for span in spans])


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge neighbouring spans with the same version and provenance."""
    merged: list[Span] = []
    for span in spans:
        if merged and (merged[-1].weight_version, merged[-1].provenance) == (span.weight_version, span.provenance):
            merged[-1] = Span(merged[-1].rows + span.rows, span.weight_version, span.provenance)
        else:
            merged.append(span)
    return tuple(merged)


def cut_spans(spans: Iterable[Span], first: int, last: int) -> tuple[Span, ...]:
    """Return the spans of rows [first, last)."""
    kept, start = [], 0
    for span in spans:
        rows = min(start + span.rows, last) - max(start, first)
        if rows > 0:
            kept.append(Span(rows, span.weight_version, span.provenance))
        start += span.rows
    return tuple(kept)


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
