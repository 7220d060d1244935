"""Decides whether routes may be trained on. Routes from every source are checked here; nothing is ever repaired.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_rl.errors import About, RouteValidationError
from moe_rl.trace.record import RouteRecord, TraceSpec, as_token_ids
from moe_rl.trace.spans import check_spans
from moe_rl.trace.variety import check_variety
from moe_rl.types import RouteRef

# Sets compared at a time: K planes of this many ids fit in the second-level cache.
_BLOCK = 1 << 15


def validate(
    record: RouteRecord,
    *,
    token_ids: Sequence[int] | np.ndarray,
    spec: TraceSpec,
    weight_version: int,
    max_staleness: int = 0,
    ref: RouteRef | None = None,
    layers: Sequence[int] | None = None,
) -> None:
    """Refuse routes that are not exactly those of `token_ids` under `spec`.

    Args:
        record: the routes.
        token_ids: [T] tokens that the trainer feeds with the record's rows: for a whole sequence all but the last
            sampled one, for a slice those of its rows.
        spec: the model being trained.
        weight_version: the trainer's current version; no row may be newer, or more than `max_staleness` older.
        max_staleness: in versions.
        ref: what the sampler sent; the record must belong to this request and be within its rows.
        layers: global numbers of the layers that the record must have; None: all.

    Raises:
        RouteValidationError: with request, token and layer.
    """
    where: About = {"request": record.key}
    _same_model(record, spec, where)
    wanted = spec.moe_layers if layers is None else tuple(layers)
    if tuple(record.layers) != wanted:
        raise _wrong_layers(record.layers, wanted, where)
    check_routes(record.routes, spec, rows=len(token_ids), where=where, layers=wanted)
    _same_tokens(record, as_token_ids(token_ids, where=where), where)
    check_variety(record.routes, record.token_ids, num_experts=spec.num_experts, layers=wanted, where=where)
    oldest = max(0, weight_version - max_staleness)
    row = record.first_row
    for span in check_spans(record.spans, rows=len(record.routes), where=where):
        if not oldest <= span.weight_version <= weight_version:
            raise RouteValidationError(
                "routes were sampled with weights that are too old or too new",
                where={**where, "tokens": f"{row} to {row + span.rows - 1}"},
                got=f"weight version {span.weight_version}",
                expected=f"{oldest} to {weight_version} (max_staleness {max_staleness})",
                do="sample the sequence again, or allow more staleness",
                fault="weight version",
            )
        row += span.rows
    if ref is not None:
        _same_request(record, ref, where)


def check_routes(
    routes: np.ndarray,
    spec: TraceSpec,
    *,
    rows: int,
    where: About,
    layers: Sequence[int] | None = None,
    sets: bool = True,
) -> None:
    """Refuse anything but K distinct ids in [0, num_experts) for each of `rows` tokens and every layer.

    Args:
        routes: [T, L, K] uint8 or uint16; uint8 is refused when num_experts > 256, because ids may have wrapped.
        spec: the model.
        rows: number of tokens.
        where: names the sequence in messages.
        layers: [L] global numbers; None: all MoE layers of the spec.
        sets: look at the ids, and not only at type and shape.
    """
    layers = spec.moe_layers if layers is None else layers
    allowed = ("uint8", "uint16") if spec.num_experts <= 256 else ("uint16",)
    if not isinstance(routes, np.ndarray) or routes.dtype.name not in allowed:
        raise RouteValidationError(
            "routes have the wrong type",
            where=where,
            got=getattr(routes, "dtype", type(routes).__name__),
            expected=f"a numpy array of {' or '.join(allowed)} ({spec.num_experts} experts)",
            do="hand over the ids as they were recorded",
            fault="type",
        )
    if routes.ndim != 3:
        raise RouteValidationError(
            "routes have the wrong shape",
            where=where,
            got=routes.shape,
            expected=f"[tokens, {len(layers)}, {spec.top_k}]",
            fault="shape",
        )
    if routes.shape[1] != len(layers):
        recorded = routes.shape[1]
        lacks = recorded < len(layers)
        raise RouteValidationError(
            "a MoE layer of the model has no routes" if lacks else "there are routes beyond the last MoE layer",
            where={**where, "layer": layers[recorded] if lacks else layers[-1]},
            got=f"{recorded} layers",
            expected=len(layers),
            do="record every MoE layer of the model",
            fault="layer without routes" if lacks else "layers too many",
        )
    if routes.shape[2] != spec.top_k:
        raise RouteValidationError(
            "wrong number of experts per token",
            where={**where, "token": 0, "layer": layers[0]},
            got=routes.shape[2],
            expected=spec.top_k,
            fault="experts per token",
        )
    if len(routes) != rows:
        raise RouteValidationError(
            "a forwarded token has no routes" if len(routes) < rows else "a row of routes belongs to no token",
            where={**where, "token": min(len(routes), rows)},
            got=f"{len(routes)} rows",
            expected=rows,
            do="record one row per forwarded token: prompt + completion - 1",
            fault="token without routes" if len(routes) < rows else "rows too many",
        )
    bad = _first_bad_set(routes, spec.num_experts) if sets else None
    if bad is not None:
        token, layer = divmod(bad, len(layers))
        ids = routes[token, layer].tolist()
        outside = [i for i in ids if i >= spec.num_experts]
        what = "an expert does not exist" if outside else "an expert was chosen twice"
        expert: About = {"expert": outside[0]} if outside else {}
        raise RouteValidationError(
            what,
            where={**where, "token": token, "layer": layers[layer], **expert},
            got=ids,
            expected=f"{spec.top_k} distinct ids from 0 to {spec.num_experts - 1}",
            do="drop the sequence and look at the recorder: ids must be logical, one row per token",
            fault="no expert" if outside else "expert twice",
        )


def _first_bad_set(routes: np.ndarray, num_experts: int) -> int | None:
    """Return the index in [T * L] of the first set with a repeated or impossible id."""
    top_k = routes.shape[2]
    sets = routes.reshape(-1, top_k)
    for start in range(0, len(sets), _BLOCK):
        # With one plane per choice, comparisons run over contiguous memory; sorting each tiny set is slower.
        planes = np.ascontiguousarray(sets[start : start + _BLOCK].T)
        bad = (planes >= num_experts).any(axis=0)
        for apart in range(1, top_k):
            bad |= (planes[apart:] == planes[:-apart]).any(axis=0)
        if bad.any():
            return start + int(bad.argmax())
    return None


def _same_model(record: RouteRecord, spec: TraceSpec, where: About) -> None:
    for field, what, fault in (
        ("model_fingerprint", "routes were recorded from another model", "model"),
        ("num_experts", "num_experts of the routes is not the model's", "num_experts"),
        ("top_k", "top_k of the routes is not the model's", "top_k"),
        ("layer_map", "routes were recorded from a model with other layers", "layer map"),
    ):
        got, expected = getattr(record.spec, field), getattr(spec, field)
        if got == expected:
            continue
        if field == "layer_map" and record.spec.moe_layers != spec.moe_layers:
            raise _wrong_layers(record.spec.moe_layers, spec.moe_layers, where)
        got, do = f"fingerprint {got}" if fault == "model" else got, "sample with the model that is trained"
        raise RouteValidationError(what, where=where, got=got, expected=expected, do=do, fault=fault)


def _wrong_layers(got: Sequence[int], expected: Sequence[int], where: About) -> RouteValidationError:
    missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    what, fault = "the MoE layers of routes are out of order", "layer order"
    if missing or extra:
        what = "a MoE layer of the model has no routes" if missing else "a layer has routes and was not asked for"
        fault = "layer without routes" if missing else "layer not asked for"
        where = {**where, "layer": (missing or extra)[0]}
    return RouteValidationError(
        what,
        where=where,
        got=list(got),
        expected=list(expected),
        do="record every MoE layer of the model, by its global number",
        fault=fault,
    )


def _same_tokens(record: RouteRecord, token_ids: np.ndarray, where: About) -> None:
    recorded = record.token_ids
    if len(recorded) == len(token_ids) and np.array_equal(recorded, token_ids):
        return
    different = np.flatnonzero(recorded[: len(token_ids)] != token_ids[: len(recorded)])
    row = int(different[0]) if len(different) else min(len(recorded), len(token_ids))
    got, expected = (
        f"token id {ids[row]}" if row < len(ids) else f"an end after {len(ids)} tokens" for ids in (recorded, token_ids)
    )
    raise RouteValidationError(
        "routes were recorded from other tokens",
        where={**where, "token": record.first_row + row},
        got=f"{got}, {max(1, len(different))} tokens differ",
        expected=expected,
        do="feed prompt + completion[:-1] exactly as the sampler forwarded it, or drop the sequence",
        fault="tokens",
    )


def _same_request(record: RouteRecord, ref: RouteRef, where: About) -> None:
    if ref.key != record.key:
        raise RouteValidationError(
            "the reference names another request",
            where=where,
            got=f"reference to {ref.key} in shard {', '.join(part.shard for part in ref.parts)}",
            expected=record.key,
            fault="another request",
        )
    if record.first_row + len(record.routes) > ref.rows:
        raise RouteValidationError(
            "routes go beyond the rows that the sampler referred to",
            where=where,
            got=f"rows to {record.first_row + len(record.routes)}",
            expected=f"at most {ref.rows}",
            fault="rows",
        )
