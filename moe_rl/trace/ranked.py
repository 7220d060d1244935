"""Ranked coding: numbers each layer's experts by falling popularity in the chunk, then codes sets as skips.

Popular experts get neighbouring numbers, so the first skips of a set are nearly always small and the last ones are not.
Each position has its own distribution and is therefore coded separately. The bytes of a chunk before compression are

    levels [L, E]       how unpopular an expert is in its layer; experts are numbered by rising level, and by id within
                        a level. So any bytes define an order, and no table can be invalid.
    planes [K, L, T]    for a set of numbers n_0 < n_1 < ...: n_0, then n_1 - n_0 - 1, ...; position by position.

Decoding maps numbers to ids and sorts again. Sorting works on whole columns of many sets at once, ten times as fast as
np.sort on rows of 8 bytes. Only for E <= 256 and K <= MAX_COLUMNS.

Legend for shapes: T tokens, L layers, K top-k, E experts, N = T * L sets.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import log2

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.bounds import set_bits

# Wider sets use numpy's row sort; a sorting network would need too many calls.
MAX_COLUMNS = 32
# Two levels per octave of popularity: finer levels cost as much as they save.
_LEVELS_PER_OCTAVE = 2
_MAX_LEVEL = 15
# Where all choices need not be counted, those of every 13th token are: a prime, as text may have a short period.
SAMPLE = 13
# Tokens counted at a time, so that their ids as 64-bit numbers stay in the cache.
_COUNTED = 512


def applies(num_experts: int, top_k: int) -> bool:
    """Return whether sets of this kind can be ranked: ids and numbers fit in single bytes, and sets are sorted by
    columns."""
    return num_experts <= 256 and top_k <= MAX_COLUMNS


def count_experts(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Count how often each expert was chosen: int64 [L, E] from routes [T, L, K]."""
    _, layers, top_k = routes.shape
    size = layers * num_experts
    # The first number of each layer's experts, in the smallest type: long rows of narrow integers are added fast.
    first = np.repeat(np.arange(0, size, num_experts, dtype=np.min_scalar_type(size)), top_k)
    counts = np.zeros(size, np.int64)
    for start in range(0, len(routes), _COUNTED):
        tokens = routes[start : start + _COUNTED]
        counts += np.bincount((tokens.reshape(len(tokens), -1) + first).reshape(-1), minlength=size)
    return counts.reshape(layers, num_experts)


def expected_bits(counts_LE: np.ndarray, tokens: int, top_k: int) -> float:
    """Estimate the bits of a set in a chunk of `tokens` tokens, levels included. counts_LE may be those of a sample.

    The rate at which two choices in a layer are the same expert gives the collision entropy of its popularity.
    Measured: for each of a set's K choices, ranked chunks save half of the gap between log2 E and that entropy on Zipf
    popularity, and 0.7 of it on log-normal. On even routes, skips and Huffman codes cost 4%; levels and zstd's tables
    cost about 3 bits an expert.
    """
    layers, num_experts = counts_LE.shape
    counts, picks = counts_LE.reshape(-1), int(counts_LE[0].sum())
    pairs = layers * picks * (picks - 1)
    # A layer more even than chance counts as even; a single choice says nothing.
    skew = max(1.0, num_experts * (int(counts @ counts) - layers * picks) / pairs) if pairs else 1.0
    return 1.04 * set_bits(num_experts, top_k) + 3 * num_experts / tokens - 0.7 * top_k * log2(skew)


def encode(routes: np.ndarray, counts_LE: np.ndarray) -> list[np.ndarray]:
    """Return the parts to compress, each with its own Huffman code: levels [L, E], then K planes [L * T], all uint8.

    routes is uint8 [T, L, K] of valid sets, in any order, counts_LE what `count_experts` says of them.
    """
    (tokens, layers, top_k), num_experts = routes.shape, counts_LE.shape[1]
    octaves = np.log2((counts_LE.max(axis=1, keepdims=True) + 1) / (counts_LE + 1))
    levels_LE = np.minimum(np.rint(octaves * _LEVELS_PER_OCTAVE), _MAX_LEVEL).astype(np.uint8)
    number_LE = np.empty_like(levels_LE)
    np.put_along_axis(number_LE, _order(levels_LE), np.arange(num_experts, dtype=np.uint8)[None], axis=1)
    ids_LKT = np.ascontiguousarray(routes.transpose(1, 2, 0))
    planes = sort_columns(_relabel(ids_LKT, number_LE).reshape(top_k, layers * tokens))
    return [levels_LE, planes[0], *(high - low - np.uint8(1) for low, high in pairwise(planes))]


def decode(plain: np.ndarray, shape: tuple[int, int, int], num_experts: int) -> np.ndarray:
    """Return routes uint8 [T, L, K], sets ascending, from the L * E + K * L * T concatenated bytes of encode.

    Raises TraceError if a number is not below num_experts.
    """
    tokens, layers, top_k = shape
    levels, skips = np.split(plain, [layers * num_experts])
    numbers_KN = skips.reshape(top_k, tokens * layers).copy()
    rising = True
    for low, high in pairwise(numbers_KN):
        high += low
        high += np.uint8(1)
        # A sum above 255 wraps and is then lower than its predecessor.
        rising = rising and bool((high > low).all())
    if not rising or int(numbers_KN[-1].max()) >= num_experts:
        raise _bad_set(numbers_KN, tokens, num_experts)
    numbers_LKT = np.ascontiguousarray(numbers_KN.reshape(top_k, layers, tokens).transpose(1, 0, 2))
    order_LE = _order(levels.reshape(layers, num_experts)).astype(np.uint8)
    ids_KLT = _relabel(numbers_LKT, order_LE)
    routes = np.empty(shape, np.uint8)
    for i, column in enumerate(sort_columns(ids_KLT.reshape(top_k, layers * tokens))):
        routes[:, :, i] = column.reshape(layers, tokens).T
    return routes


def _order(levels_LE: np.ndarray) -> np.ndarray:
    """Return the expert for each number: [L, E]."""
    return np.argsort(levels_LE, axis=1, kind="stable")


def _relabel(values_LKT: np.ndarray, table_LE: np.ndarray) -> np.ndarray:
    """Return table[l, value] as [K, L, T]. bytes.translate is several times as fast as numpy indexing, which widens
    first."""
    tables = np.zeros((len(table_LE), 256), np.uint8)
    tables[:, : table_LE.shape[1]] = table_LE
    mapped = b"".join(
        values.tobytes().translate(table.tobytes()) for values, table in zip(values_LKT, tables, strict=True)
    )
    return np.frombuffer(mapped, np.uint8).reshape(values_LKT.shape).transpose(1, 0, 2).copy()


def _bad_set(numbers_KN: np.ndarray, tokens: int, num_experts: int) -> TraceError:
    numbers_NK = numbers_KN.T
    wrong = (numbers_NK >= num_experts).any(axis=1) | (numbers_NK[:, 1:] <= numbers_NK[:, :-1]).any(axis=1)
    row = int(np.flatnonzero(wrong)[0])
    return TraceError(
        "the numbers are not a set of experts",
        where={"token": row % tokens, "layer": row // tokens},
        got=" ".join(map(str, numbers_NK[row])),
        expected=f"different numbers below {num_experts}, ascending",
        fault="no set",
    )


def sort_sets(ids_NK: np.ndarray) -> np.ndarray:
    """Return a new array with each row of [N, K] ascending."""
    if ids_NK.shape[1] > MAX_COLUMNS:
        return np.sort(ids_NK, axis=1)
    sorted_NK = np.empty_like(ids_NK)
    for i, column in enumerate(sort_columns(ids_NK.T.copy())):
        sorted_NK[:, i] = column
    return sorted_NK


def sort_columns(ids_KN: np.ndarray) -> list[np.ndarray]:
    """Return K arrays [N]; the i-th holds the i-th smallest of each column of ids_KN, K <= MAX_COLUMNS. Overwrites
    ids_KN.
    """
    columns = list(ids_KN)
    spare = np.empty_like(columns[0])
    for low, high in _sorting_network(len(columns)):
        np.minimum(columns[low], columns[high], out=spare)
        np.maximum(columns[low], columns[high], out=columns[high])
        columns[low], spare = spare, columns[low]
    return columns


@lru_cache(maxsize=MAX_COLUMNS)
def _sorting_network(width: int) -> tuple[tuple[int, int], ...]:
    """Return the comparators of Batcher's merge exchange (Knuth, TAOCP 3, 5.2.2, algorithm M): 19 for 8 inputs."""
    comparators = []
    top = 1 << (width - 1).bit_length() - 1 if width > 1 else 0
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            comparators += [(i, i + d) for i in range(width - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(comparators)
