"""Computes one checksum over all experts of a sequence, where rows leave the sampler's engine.

The checksum is the sum over the sequence's rows and over the layers, modulo 2**64, of

    salt(request) * salt(position, token, weight version) * sum over the row's experts of  salt(layer, expert)

The recorder computes it from the engine's own buffer, and it travels in the reference (`RouteRef.source_sum`). The
trainer compares it with the experts that reach its dispatchers. No step in between computes it again. It therefore
reveals a row with a wrong position, token, weight version, request or layer, and a missing or wrong expert, wherever
the error happened. Two errors cancel by chance about once in 2**63. Checksums of different layers, or different rows,
of a sequence add up.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import xxhash

from moe_rl.errors import TraceError
from moe_rl.types import RouteRef

_GOLDEN, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
_BITS = 64
_HEX = re.compile(r"[0-9a-f]{16}", re.ASCII)


@lru_cache(maxsize=1024)
def expert_salts(layer: int, experts: int) -> np.ndarray:
    """Return uint64 [E], one salt per expert by its global number in a layer. Independent of the number of experts."""
    salts = _mixed(np.arange(experts, dtype=np.uint64) + (np.uint64(layer + 1) << np.uint64(32)))
    salts.flags.writeable = False
    return salts


def place_salts(positions: np.ndarray, token_ids: np.ndarray, versions: np.ndarray | int = 0) -> np.ndarray:
    """Return an odd salt for each row, uint64 [T], from its position in the sequence, its token id, and the version of
    the weights that routed it: integers [T], or one version for all. Versions count modulo 2**32."""
    with np.errstate(over="ignore"):
        places = np.asarray(positions).astype(np.uint64) + (np.asarray(versions).astype(np.uint64) << np.uint64(32))
    return _mixed(_mixed(places) ^ np.asarray(token_ids).astype(np.uint64)) | _ODD


def request_salt(key: str) -> np.uint64:
    """Return the odd salt of a request."""
    return np.uint64(xxhash.xxh3_64_intdigest(key.encode()) | 1)


def row_salts(key: str, token_ids: np.ndarray, versions: np.ndarray | int = 0) -> np.ndarray:
    """Return odd uint64 [T], salt(request) * salt(position, token, version), for all rows of a sequence from row 0."""
    with np.errstate(over="ignore"):
        return request_salt(key) * place_salts(np.arange(len(token_ids)), token_ids, versions)


def placed_rows(
    sums: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, versions: np.ndarray | int
) -> np.ndarray:
    """Bind each row's sum to its position, token and weight version: uint64 [T], the input of `total`.

    sums [T] are 64-bit integers, the sum of the salts of each row's experts.
    """
    with np.errstate(over="ignore"):
        return sums.view(np.uint64) * place_salts(positions, token_ids, versions)


def rows_of(
    routes: np.ndarray,
    layers: Sequence[int],
    token_ids: np.ndarray,
    start: int = 0,
    *,
    versions: np.ndarray | int = 0,
) -> np.ndarray:
    """Return `placed_rows`, uint64 [T], for routes that another program recorded.

    The sum protects the routes only from here on. routes [T, L, K] are expert ids of `layers`; `start` is the position
    of the first row; `versions` are those of the weights that routed the rows, [T] or one for all.
    """
    experts = int(routes.max(initial=0)) + 1
    sums = np.zeros(len(routes), np.uint64)
    for column, layer in enumerate(layers):
        sums += expert_salts(layer, experts)[routes[:, column]].sum(-1, dtype=np.uint64)
    return placed_rows(sums, np.arange(start, start + len(routes)), token_ids, versions)


def total(key: str, rows: np.ndarray) -> str:
    """Return the checksum of a request's rows, uint64 [T], as 16 hex digits."""
    return f"{int(rows.sum(dtype=np.uint64)) * int(request_salt(key)) % (1 << _BITS):016x}"


def rows_total(ref: RouteRef) -> int:
    """Return the sum of a reference's rows without the request's salt. Raises as `sum_of` does."""
    return sum_of(ref) * pow(int(request_salt(ref.key)), -1, 1 << _BITS) % (1 << _BITS)


def added(sums: Iterable[str]) -> str:
    """Add the checksums of one sequence whose layers, or rows, were summed separately."""
    return f"{sum(int(checksum, 16) for checksum in sums) % (1 << _BITS):016x}"


def signed(
    ref: RouteRef,
    routes: np.ndarray,
    layers: Sequence[int],
    token_ids: np.ndarray,
    *,
    versions: np.ndarray | int = 0,
) -> RouteRef:
    """Return the reference with the checksum of the arrays that its record was just written from. See `rows_of`."""
    return replace(ref, source_sum=total(ref.key, rows_of(routes, layers, token_ids, ref.start, versions=versions)))


def sum_of(ref: RouteRef) -> int:
    """Return a reference's checksum as int64. Raises TraceError if it is missing or not a 16-digit hex number."""
    if not _HEX.fullmatch(ref.source_sum):
        raise TraceError(
            "a reference has no checksum from the sampler's engine",
            where={"record": ref.key},
            got=repr(ref.source_sum)[:40],
            expected="16 hex digits in source_sum",
            do="sample with this version of moe_rl, or make the reference with moe_rl.trace.signed",
        )
    value = int(ref.source_sum, 16)
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
