"""Codes a set of K expert ids as its rank among all C(E, K) sets, in a fixed number of bits.

The combinadic rank of c_0 < c_1 < ... < c_(K-1) is the sum of C(c_i, i + 1). Every rank below C(E, K) is a set, and no
two sets have the same rank. Rank i takes the bits [i * width, (i + 1) * width) of a little-endian bit stream, with
width = ceil(log2 C(E, K)), so set i can be read alone. Unused bits of the last byte are zero.

Legend for shapes: N sets, K top-k.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

import numpy as np

from moe_rl.errors import TraceError

_WORD = np.dtype("<u8")


@lru_cache(maxsize=64)
def rank_bits(num_experts: int, top_k: int) -> int | None:
    """Return the bits of one rank, 0 to 64, or None if a rank does not fit in a 64-bit word."""
    # C(68, 34) is above 2**64, and C(65536, 32768) takes a while to compute.
    if min(top_k, num_experts - top_k) >= 34:
        return None
    sets = comb(num_experts, top_k)
    return (sets - 1).bit_length() if sets < 2**64 else None


def encode(ids_NK: np.ndarray, num_experts: int) -> bytes:
    """Pack the ranks of sets [N, K], which are sorted, distinct and in range, into ceil(N * rank_bits / 8) bytes."""
    sets, top_k = ids_NK.shape
    ranks = np.zeros(sets, _WORD)
    for i, binomials in enumerate(_binomials(num_experts, top_k)):
        ranks += binomials[ids_NK[:, i].astype(np.intp) - i]
    width = rank_bits(num_experts, top_k)
    assert width is not None, "sets without a rank are not coded by it"
    return _pack(ranks, width)


def decode(data: np.ndarray, sets: int, top_k: int, num_experts: int, dtype: np.dtype) -> np.ndarray:
    """Return sets [N, K] of `dtype`, each ascending, from a uint8 array of exactly ceil(N * rank_bits / 8) bytes.

    Raises:
        TraceError: a rank is too large for a set, or bits after the last rank are not zero.
    """
    width = rank_bits(num_experts, top_k)
    assert width is not None, "sets without a rank are not coded by it"
    ranks, rest = _unpack(data, sets, width)
    if rest:
        raise TraceError(
            "enumerative chunk has bits after its last rank", got=f"{rest:#x}", expected="zeros", fault="bits left"
        )
    total = comb(num_experts, top_k)
    if sets and int(ranks.max()) >= total:
        index = int(np.flatnonzero(ranks >= np.uint64(total))[0])
        raise TraceError(
            "the rank is too large for a set of experts",
            where={"set": index},
            got=int(ranks[index]),
            expected=f"below {total}",
            fault="no set",
        )
    ids_NK = np.empty((sets, top_k), dtype)
    binomials = _binomials(num_experts, top_k)
    for i in range(top_k - 1, 0, -1):
        # The largest id whose binomial is at most the remaining rank.
        offset = np.searchsorted(binomials[i], ranks, side="right") - 1
        ids_NK[:, i] = offset + i
        ranks -= binomials[i][offset]
    ids_NK[:, 0] = ranks
    return ids_NK


@lru_cache(maxsize=8)
def _binomials(num_experts: int, top_k: int) -> np.ndarray:
    """Return the table [K, E - K + 1] with C(d + i, i + 1) at [i, d]. Id c at position i of a sorted set has d = c - i.

    No entry exceeds C(E - 1, K), so the table overflows only if the ranks do.
    """
    table = np.empty((top_k, num_experts - top_k + 1), _WORD)
    table[0] = np.arange(num_experts - top_k + 1)
    for i in range(1, top_k):
        # Hockey stick: C(d + i, i + 1) is the sum of C(j + i - 1, i) over j = 1 to d.
        np.cumsum(table[i - 1], out=table[i])
    table.flags.writeable = False
    return table


def _pack(values: np.ndarray, width: int) -> bytes:
    """Write values [N] uint64, each below 2**width, as a bit stream of `width` bits each."""
    bits = len(values) * width
    if not bits:
        return b""
    first, used = _words(bits, width)
    most = 64 // width + 2
    padded = np.concatenate([values, np.zeros(most, _WORD)])
    words = padded[first] >> used
    for ahead in range(1, most):
        # A shift by 64 or more gives 0 in numpy.
        words |= padded[first + ahead] << (np.uint64(ahead * width) - used)
    return words.tobytes()[: -(-bits // 8)]


@lru_cache(maxsize=64)
def _words(bits: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each 64-bit word of a stream, the index of the value that holds the word's first bit, and how many
    bits of that value the previous word holds."""
    start = np.arange(-(-bits // 64), dtype=np.int64) * 64
    first = start // width
    used = (start - first * width).astype(_WORD)
    first.flags.writeable = used.flags.writeable = False
    return first, used


def _unpack(data: np.ndarray, count: int, width: int) -> tuple[np.ndarray, int]:
    """Return values [count] uint64 and the unused bits of the last byte; the inverse of _pack."""
    bits = count * width
    if not bits:
        return np.zeros(count, _WORD), 0
    # One extra word, which the last value may reach into.
    stream = np.zeros((-(-bits // 64) + 1) * 8, np.uint8)
    stream[: len(data)] = data
    words = stream.view(_WORD)
    start = np.arange(count, dtype=np.int64) * width
    first, used = start >> 6, (start & 63).astype(_WORD)
    values = words[first] >> used
    values |= words[first + 1] << (np.uint64(64) - used)
    values &= np.uint64(2**width - 1)
    return values, int(data[-1]) >> (bits % 8) if bits % 8 else 0
