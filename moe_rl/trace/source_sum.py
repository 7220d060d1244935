"""One number for all the experts of a sequence: made where rows leave the sampler's engine, checked where they arrive.

The sum over the rows of a sequence and over the layers, modulo 2**64, of

    salt(request) * salt(position, token) * sum over the row's experts of  salt(layer, expert)

The recorder makes it from the engine's own buffer; it travels in the reference (`RouteRef.source_sum`); the trainer
holds what reaches its dispatchers against it. Nobody on the way makes it again, so a row of another position, token,
request or layer, a missing expert or a foreign one shows, whoever put it there. Two errors cancel by chance once in
about 2**63. Sums over different layers, or different rows, of one sequence add up.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import xxhash

from moe_rl.errors import TraceError, describe
from moe_rl.types import RouteRef

_GOLDEN, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
_BITS = 64
_HEX = re.compile(r"[0-9a-f]{16}", re.ASCII)


@lru_cache(maxsize=1024)
def expert_salts(layer: int, experts: int) -> np.ndarray:
    """uint64 [E], one for each expert of a layer, by its global number. They do not depend on how many there are."""
    salts = _mixed(np.arange(experts, dtype=np.uint64) + (np.uint64(layer + 1) << np.uint64(32)))
    salts.flags.writeable = False
    return salts


def place_salts(positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Odd uint64 [T], by position in the sequence and token id, integers [T]."""
    return _mixed(_mixed(np.asarray(positions).astype(np.uint64)) ^ np.asarray(token_ids).astype(np.uint64)) | _ODD


def request_salt(key: str) -> np.uint64:
    """Odd, one for each request."""
    return np.uint64(xxhash.xxh3_64_intdigest(key.encode()) | 1)


def row_salts(key: str, token_ids: np.ndarray) -> np.ndarray:
    """Odd uint64 [T]: salt(request) * salt(position, token) of all rows of a sequence, from its first on."""
    with np.errstate(over="ignore"):
        return request_salt(key) * place_salts(np.arange(len(token_ids)), token_ids)


def placed_rows(sums: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """uint64 [T]: rows bound to their position and token; `total` takes them. sums [T] 64-bit integers: of the salts of
    each row's experts."""
    with np.errstate(over="ignore"):
        return sums.view(np.uint64) * place_salts(positions, token_ids)


def rows_of(routes: np.ndarray, layers: Sequence[int], token_ids: np.ndarray, start: int = 0) -> np.ndarray:
    """uint64 [T]: `placed_rows` of an array that another program recorded, and whose first hand here this is.

    routes [T, L, K] expert ids of `layers`. start: position of the first row.
    """
    experts = int(routes.max(initial=0)) + 1
    sums = np.zeros(len(routes), np.uint64)
    for column, layer in enumerate(layers):
        sums += expert_salts(layer, experts)[routes[:, column]].sum(-1, dtype=np.uint64)
    return placed_rows(sums, np.arange(start, start + len(routes)), token_ids)


def total(key: str, rows: np.ndarray) -> str:
    """The sum of a request's rows, uint64 [T], as 16 hex digits."""
    return f"{int(rows.sum(dtype=np.uint64)) * int(request_salt(key)) % (1 << _BITS):016x}"


def rows_total(ref: RouteRef) -> int:
    """The sum of the rows of a reference before `total` bound it to the request. Raises as `sum_of`."""
    return sum_of(ref) * pow(int(request_salt(ref.key)), -1, 1 << _BITS) % (1 << _BITS)


def added(sums: Iterable[str]) -> str:
    """The sum of one sequence whose layers, or rows, were summed apart."""
    return f"{sum(int(one, 16) for one in sums) % (1 << _BITS):016x}"


def signed(ref: RouteRef, routes: np.ndarray, layers: Sequence[int], token_ids: np.ndarray) -> RouteRef:
    """The reference to a record that was just written from these arrays, with their sum. See `rows_of`."""
    return replace(ref, source_sum=total(ref.key, rows_of(routes, layers, token_ids, ref.start)))


def sum_of(ref: RouteRef) -> int:
    """The sum that a reference carries, as int64. Raises TraceError when it has none, or one that is no such number."""
    if not _HEX.fullmatch(ref.source_sum):
        raise TraceError(
            describe(
                "a reference does not say what left the sampler's engine",
                where=f"record {ref.key}",
                got=repr(ref.source_sum)[:40],
                expected="16 hex digits in source_sum",
                do="sample with this version of moe_rl, or make the reference with moe_rl.trace.signed",
            )
        )
    value = int(ref.source_sum, 16)
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of a uint64 spread over all of them (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
