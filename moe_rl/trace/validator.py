"""The one decision whether routes may be trained on. Every source of routes goes through it; nothing is ever repaired.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import numpy as np

from moe_rl.errors import RouteValidationError, describe
from moe_rl.trace.record import (
    RouteRecord,
    TraceSpec,
    check_key,
    check_weight_version,
    record_checksum,
    spec_digest,
    token_digest,
)
from moe_rl.types import RouteRef

# Sets compared at a time: K planes of this many ids stay in the processor's second-level cache.
_BLOCK = 1 << 15


def validate(
    record: RouteRecord,
    *,
    token_ids,
    spec: TraceSpec,
    weight_version: int,
    max_staleness: int = 0,
    ref: RouteRef | None = None,
) -> None:
    """Refuse routes that are not exactly those of `token_ids` under `spec`.

    token_ids [T]: the tokens that the trainer will feed, all but the last sampled one. spec: of the model being
    trained. weight_version: of the trainer now; the record's may be at most `max_staleness` older and never newer.
    ref: what the sampler sent, when the record came from the store; it must name this record and carry its checksum.
    Without it, well-formed routes in another layer order under the right tokens cannot be told from the right ones.
    Raises RouteValidationError naming request, token and layer.
    """
    where = f"request {record.key}"
    _same_model(record, spec, where)
    check_routes(record.routes, spec, rows=len(token_ids), where=where)
    tokens = token_digest(token_ids, where=where)
    if record.token_digest != tokens:
        raise RouteValidationError(
            describe(
                "routes were recorded from other tokens",
                where=f"{where}, tokens 0 to {len(token_ids) - 1}, all layers",
                got=f"token digest {record.token_digest}",
                expected=tokens,
                do="feed prompt + completion[:-1] exactly as the sampler forwarded it, or drop the sequence",
            )
        )
    version = check_weight_version(record.weight_version, record.key)
    oldest = max(0, weight_version - max_staleness)
    if not oldest <= version <= weight_version:
        raise RouteValidationError(
            describe(
                "routes are of weights that may not be trained on",
                where=where,
                got=f"weight version {version}",
                expected=f"{oldest} to {weight_version} (max_staleness {max_staleness})",
                do="sample the sequence again, or allow more staleness",
            )
        )
    if ref is not None:
        _same_record(record, ref, where)


def check_routes(routes: np.ndarray, spec: TraceSpec, *, rows: int, where: str) -> None:
    """Refuse anything but K distinct ids in [0, num_experts) for each of `rows` tokens and every layer of the spec.

    routes [T, L, K] uint8 or uint16; uint8 is refused when num_experts > 256, because its ids may have wrapped.
    where: whose they are, for the message.
    """
    allowed = ("uint8", "uint16") if spec.num_experts <= 256 else ("uint16",)
    if not isinstance(routes, np.ndarray) or routes.dtype.name not in allowed:
        raise RouteValidationError(
            describe(
                "routes have the wrong type",
                where=where,
                got=getattr(routes, "dtype", type(routes).__name__),
                expected=f"a numpy array of {' or '.join(allowed)} ({spec.num_experts} experts)",
                do="hand over the ids as they were recorded",
            )
        )
    if routes.ndim != 3:
        raise RouteValidationError(
            describe(
                "routes have the wrong shape",
                where=where,
                got=routes.shape,
                expected=f"[tokens, {spec.row_shape[0]}, {spec.top_k}]",
            )
        )
    layers = spec.moe_layers
    if routes.shape[1] != len(layers):
        recorded = routes.shape[1]
        at = (
            f"layer {layers[recorded]} has no routes"
            if recorded < len(layers)
            else f"layers after {layers[-1]} are not in the model"
        )
        raise RouteValidationError(
            describe(
                "routes do not cover the model's MoE layers",
                where=f"{where}, {at}",
                got=f"{recorded} layers",
                expected=len(layers),
                do="record every MoE layer of the model",
            )
        )
    if routes.shape[2] != spec.top_k:
        raise RouteValidationError(
            describe(
                "wrong number of experts per token",
                where=f"{where}, token 0, layer {layers[0]}",
                got=routes.shape[2],
                expected=spec.top_k,
            )
        )
    if len(routes) != rows:
        fault = (
            f"token {len(routes)} has no routes"
            if len(routes) < rows
            else f"routes from token {rows} on belong to no token"
        )
        raise RouteValidationError(
            describe(
                "rows are not the forwarded tokens",
                where=f"{where}, {fault}",
                got=f"{len(routes)} rows",
                expected=rows,
                do="record one row per forwarded token: prompt + completion - 1",
            )
        )
    bad = _first_bad_set(routes, spec.num_experts)
    if bad is not None:
        token, layer = divmod(bad, len(layers))
        ids = routes[token, layer].tolist()
        outside = [i for i in ids if i >= spec.num_experts]
        what = f"expert id {outside[0]} does not exist" if outside else "an expert was chosen twice"
        raise RouteValidationError(
            describe(
                what,
                where=f"{where}, token {token}, layer {layers[layer]}",
                got=ids,
                expected=f"{spec.top_k} distinct ids from 0 to {spec.num_experts - 1}",
                do="drop the sequence and look at the recorder: ids must be logical, one row per token",
            )
        )


def _first_bad_set(routes: np.ndarray, num_experts: int) -> int | None:
    """Index over [T * L] of the first set with a repeated or impossible id."""
    top_k = routes.shape[2]
    sets = routes.reshape(-1, top_k)
    for start in range(0, len(sets), _BLOCK):
        # One plane per choice makes every comparison a run over contiguous memory; sorting each tiny set is slower.
        planes = np.ascontiguousarray(sets[start : start + _BLOCK].T)
        bad = (planes >= num_experts).any(axis=0)
        for apart in range(1, top_k):
            bad |= (planes[apart:] == planes[:-apart]).any(axis=0)
        if bad.any():
            return start + int(bad.argmax())
    return None


def _same_model(record: RouteRecord, spec: TraceSpec, where: str) -> None:
    got = record.spec
    if got.model_fingerprint != spec.model_fingerprint:
        raise RouteValidationError(
            describe(
                "routes were recorded from another model",
                where=where,
                got=f"fingerprint {got.model_fingerprint}",
                expected=spec.model_fingerprint,
                do="sample with the model that is trained",
            )
        )
    for field in ("num_experts", "top_k"):
        if getattr(got, field) != getattr(spec, field):
            raise RouteValidationError(
                describe(
                    f"{field} of the routes is not the model's",
                    where=where,
                    got=getattr(got, field),
                    expected=getattr(spec, field),
                    do="sample with the model that is trained",
                )
            )
    if got.moe_layers != spec.moe_layers:
        missing = sorted(set(spec.moe_layers) - set(got.moe_layers))
        extra = sorted(set(got.moe_layers) - set(spec.moe_layers))
        at = f"layer {missing[0]} has no routes" if missing else f"layer {extra[0]} is no MoE layer of the model"
        raise RouteValidationError(
            describe(
                "routes do not cover the model's MoE layers",
                where=f"{where}, {at}",
                got=list(got.moe_layers),
                expected=list(spec.moe_layers),
                do="record every MoE layer of the model, by its global number",
            )
        )


def _same_record(record: RouteRecord, ref: RouteRef, where: str) -> None:
    if ref.key != record.key:
        raise RouteValidationError(
            describe(
                "the reference names another request",
                where=where,
                got=f"reference to {ref.key} in shard {ref.shard}",
                expected=record.key,
            )
        )
    routes = np.ascontiguousarray(record.routes, dtype=record.spec.dtype)
    checksum = record_checksum(
        spec_digest(record.spec),
        check_key(record.key).encode("ascii"),
        len(routes),
        int(record.token_digest, 16),
        record.weight_version,
        routes,
    )
    if ref.rows != len(routes) or ref.digest != f"{checksum:016x}":
        raise RouteValidationError(
            describe(
                "routes are not those that the sampler published",
                where=f"{where}, shard {ref.shard}",
                got=f"{len(routes)} rows, checksum {checksum:016x}",
                expected=f"{ref.rows} rows, checksum {ref.digest}",
                do="drop the sequence and find out which side changed it",
            )
        )
