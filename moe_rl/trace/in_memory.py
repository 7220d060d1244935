"""Keeps routes in memory, for trainers whose routes travel with the batch.

trace = MemoryTrace(spec)
ref = trace.add("prompt3:1", routes, token_ids, [Span(len(token_ids), 7, Provenance.DECODE)])
validate(trace.read(ref), token_ids=token_ids, spec=spec, weight_version=7, ref=ref)

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_rl.errors import About, TraceError
from moe_rl.trace.record import RouteRecord, TraceSpec, as_token_ids, check_key
from moe_rl.trace.source_sum import signed
from moe_rl.trace.spans import check_spans, cut_spans, versions_of_rows
from moe_rl.trace.store import Rows, check_rows
from moe_rl.trace.validator import check_routes
from moe_rl.types import RouteRef, Span


class MemoryTrace:
    """Holds the records of a batch: checks them as a ShardWriter does, and gives them back as a TraceStore does.

    `Microbatch.read_routes` takes it in place of a store. The experts of a set keep their order.

    Args:
        spec: the model.
    """

    def __init__(self, spec: TraceSpec):
        self.spec = spec
        self._records: dict[str, RouteRecord] = {}

    def add(
        self, key: str, routes: np.ndarray, token_ids: Sequence[int] | np.ndarray, spans: Sequence[Span]
    ) -> RouteRef:
        """Keep a copy of one sequence's routes.

        Args:
            key: the record's key, unique in the batch.
            routes: [T, L, K] uint8 or uint16, logical expert ids of the T forwarded tokens in all MoE layers.
            token_ids: [T].
            spans: cover the T rows.

        Returns:
            The reference, with the checksum of these arrays: it protects the routes from here on.

        Raises:
            RouteValidationError: the routes could not be trained on.
            TraceError: the key is repeated or not allowed.
        """
        where: About = {"request": check_key(key)}
        if key in self._records:
            raise TraceError(
                "record key is used twice", where=where, do="give every sequence its own key", fault="key twice"
            )
        ids, spec = as_token_ids(token_ids, where=where).copy(), self.spec
        check_routes(routes, spec, rows=len(ids), where=where)
        spans = check_spans(spans, rows=len(ids), where=where)
        own_routes = np.array(routes, spec.dtype, order="C")
        own_routes.flags.writeable = ids.flags.writeable = False
        self._records[key] = RouteRecord(key, own_routes, ids, spans, False, spec, 0, spec.moe_layers)
        return signed(RouteRef(key, len(ids), ()), own_routes, spec.moe_layers, ids, versions=versions_of_rows(spans))

    def read(self, ref: RouteRef, *, layers: Sequence[int] | None = None, rows: Rows | None = None) -> RouteRecord:
        """Return the record that `ref` names, or its part, as TraceStore.read does. Raises TraceError."""
        where: About = {"record": ref.key}
        record = self._records.get(ref.key)
        if record is None or ref.rows > len(record.routes):
            raise TraceError("record was not added", where=where, expected="a reference that add() returned")
        first, last = check_rows(ref, rows)
        wanted = record.layers if layers is None else tuple(layers)
        if list(wanted) != sorted(set(wanted) & set(record.layers)):
            raise TraceError(
                "layers are not in the record, or not increasing",
                where=where,
                got=wanted,
                expected=f"some of {record.layers}",
            )
        routes = record.routes[first:last, [record.layers.index(layer) for layer in wanted]]
        routes.flags.writeable = False
        return replace(
            record,
            routes=routes,
            token_ids=record.token_ids[first:last],
            spans=cut_spans(record.spans, first, last),
            first_row=first,
            layers=wanted,
        )

    def read_each(
        self, items: Sequence[tuple[RouteRef, Rows | None]], *, layers: Sequence[int] | None = None
    ) -> list[RouteRecord]:
        """Return a record for each item, as read() does."""
        return [self.read(ref, layers=layers, rows=rows) for ref, rows in items]
