"""Encodes chunks of routes as bytes, and decodes only valid sets of experts. Small, and fast in plain numpy.

A chunk is routes [T, L, K], coded token by token, layer by layer. Ids are uint8 when num_experts <= 256, else
little-endian uint16. The codec id is stored outside the chunk:

0 RAW      the ids.
1 ENUM     the rank of every set in a fixed number of bits (enumerative.py). The smallest for routes without structure
           and for a few tokens; set i can be read alone. Decodes some 40 times slower than GAP.
2 GAP      skips: for a set c_0 < c_1 < ... the bytes c_0, c_1 - c_0 - 1, c_2 - c_1 - 1, ..., compressed with zstd. A
           skip counts the experts between two chosen ones, so no skip can encode an expert chosen twice. Decoding is
           zstd and a cumulative sum, which is one multiplication for K = 2, 4, 8.
3 ORDERED  the ids compressed with zstd, in the router's order. Sorted skips plus a stream of permutations would need
           log2 K! incompressible bits more per set: 58 bits a set against 56 here for 8 of 128 on uniform routes.
4 RANKED   skips between experts numbered by popularity in the chunk (ranked.py). The smallest when some experts of a
           layer are chosen much more often than others and sets do not repeat. Decodes some 5 times slower than GAP.

16-bit values are passed to zstd as the plane of low bytes, then the plane of high bytes. Only the blocks of the zstd
frame are stored. A reader prepends the magic bytes and a header with the expected size, so a chunk cannot make the
reader allocate more than its shape requires.

Legend for shapes: T tokens, L layers, K top-k, N = T * L sets.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from moe_rl.errors import TraceError
from moe_rl.trace import enumerative, ranked
from moe_rl.trace.primitives import ZSTD
from moe_rl.trace.ranked import MAX_COLUMNS, count_experts, sort_sets

if TYPE_CHECKING:
    from collections.abc import Buffer  # Python 3.12


class Codec(IntEnum):
    """Names the codecs. The numbers are part of the file format."""

    RAW = 0
    ENUM = 1
    GAP = 2
    ORDERED = 3
    RANKED = 4


# A codec that decodes slowly must save at least this share of the size. With GAP, uniform routes are 3% larger than
# with ENUM but decode some 40 times as fast. Short chunks use ENUM whenever it is smaller, and never RANKED.
_SHORT = 4096
_GAIN = 1 / 16

# Magic, then a descriptor: one segment, 8 bytes of content size, no checksum, no dictionary.
_ZSTD_HEAD = b"\x28\xb5\x2f\xfd\xe0"
# Bytes that ZstdCompressor writes first when the content size is off: magic, descriptor, window.
_ZSTD_HEAD_WRITTEN = 6

# Words of K bytes. Multiplying by ones gives prefix sums of the bytes; the steps add the i chosen experts before byte
# i.
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_ONES = {k: word.type(int.from_bytes(bytes([1] * k), "little")) for k, word in _WORDS.items()}
_STEPS = {k: word.type(int.from_bytes(bytes(range(k)), "little")) for k, word in _WORDS.items()}


def encode_chunk(
    routes: np.ndarray, num_experts: int, *, keep_order: bool = False, counts: np.ndarray | None = None
) -> tuple[Codec, bytes]:
    """Encode a chunk with the codec that makes it smallest (_GAIN limits the slow codecs).

    Args:
        routes: [T, L, K] ids below num_experts, distinct within a set, in any order; uint8 when num_experts <= 256,
            else uint16.
        num_experts: E.
        keep_order: decode each set in the order given; otherwise ascending.
        counts: int64 [L, E], to which the number of times that each expert is chosen is added.

    Raises:
        TraceError: the dtype, the shape or an id is wrong.
    """
    dtype = _id_dtype(routes.shape, num_experts)
    if routes.dtype != dtype:
        raise TraceError("routes have the wrong dtype", got=routes.dtype, expected=dtype, fault="dtype")
    layers, top_k = routes.shape[1:]
    if not routes.size:
        return Codec.RAW, b""
    routes = np.ascontiguousarray(routes)
    given_NK = routes.reshape(-1, top_k)
    ids_NK = sort_sets(given_NK)
    skips_NK = _skips(ids_NK)
    # An expert chosen twice leaves a skip of -1, the largest value of the dtype.
    if int(ids_NK.max()) >= num_experts or int(skips_NK.max()) > num_experts - top_k:
        raise _bad_set(ids_NK, num_experts, layers, ascending=True)
    counted = None
    if counts is not None:
        counted = count_experts(routes, num_experts)
        counts += counted

    if keep_order:
        candidates = {Codec.ORDERED: _compress(given_NK), Codec.RAW: given_NK.tobytes()}
        return min(candidates.items(), key=lambda item: len(item[1]))
    best, data = Codec.GAP, _compress(skips_NK)
    if len(data) > ids_NK.nbytes:
        best, data = Codec.RAW, ids_NK.tobytes()
    size, short = len(data), ids_NK.nbytes <= _SHORT
    width = enumerative.rank_bits(num_experts, top_k)
    if width is not None:
        enum_size = -(-len(ids_NK) * width // 8)
        if enum_size < (size if short else size * (1 - _GAIN)):
            best, size = Codec.ENUM, enum_size
    if not short and ranked.applies(num_experts, top_k):
        limit = size * (1 - _GAIN)
        tally = count_experts(routes[:: ranked.SAMPLE], num_experts) if counted is None else counted
        if ranked.expected_bits(tally, len(routes), top_k) * len(ids_NK) / 8 < limit:
            counted = count_experts(routes, num_experts) if counted is None else counted
            blocks = _compress_blocks(ranked.encode(routes, counted))
            if len(blocks) < limit:
                return Codec.RANKED, blocks
    return best, enumerative.encode(ids_NK, num_experts) if best is Codec.ENUM else data


def decode_chunk(
    codec: int,
    data: Buffer,
    shape: tuple[int, int, int],
    num_experts: int,
    *,
    keep_order: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the routes that encode_chunk was given: a new array, or `out` filled.

    Args:
        codec: the id that encode_chunk returned.
        data: the encoded bytes.
        shape: (T, L, K) of the chunk. It bounds the memory used, so it must not come from the chunk itself.
        num_experts: E.
        keep_order: as encoded.
        out: [T, L, K] uint8 when num_experts <= 256, else uint16, any strides; its content is undefined after an error.

    Raises:
        TraceError: unknown codec, wrong size, damaged data, or an id that is out of range, repeated, or out of order
            where sets are ascending. The caller adds which chunk it is.
    """
    dtype = _id_dtype(shape, num_experts)
    if out is not None and (out.dtype != dtype or out.shape != tuple(shape)):
        raise TraceError(
            "array to decode into does not fit the chunk",
            got=f"{out.dtype} of shape {out.shape}",
            expected=f"{dtype} of shape {tuple(shape)}",
            fault="array",
        )
    allowed = (Codec.RAW, Codec.ORDERED) if keep_order else (Codec.RAW, Codec.ENUM, Codec.GAP, Codec.RANKED)
    if codec not in allowed:
        raise TraceError(
            "codec of a chunk is unknown",
            got=f"{codec}, order {'kept' if keep_order else 'not kept'}",
            expected=" or ".join(f"{known:d} ({known.name})" for known in allowed),
            fault="codec",
        )
    tokens, layers, top_k = shape
    sets = tokens * layers
    size = sets * top_k * dtype.itemsize
    if not size:
        _check_size(data, 0)
        ids_NK = np.empty((sets, top_k), dtype)
    elif codec == Codec.ENUM:
        width = enumerative.rank_bits(num_experts, top_k)
        if width is None:
            raise TraceError(
                "the enumerative codec cannot encode sets of this size",
                got=f"{top_k} of {num_experts} experts",
                fault="no code",
            )
        _check_size(data, -(-sets * width // 8))
        ids_NK = enumerative.decode(np.frombuffer(data, np.uint8), sets, top_k, num_experts, dtype)
    elif codec == Codec.GAP:
        skips_NK = _decompress(data, size, dtype).reshape(sets, top_k)
        ids_NK = _sum_skips(skips_NK)
        # No sum before the first id out of range exceeds `reach`. If the dtype can hold `reach`, no sum wrapped
        # unnoticed.
        reach = int(skips_NK.max()) + num_experts
        if int(ids_NK.max()) >= num_experts or (reach >= 256**dtype.itemsize and not _ascending(ids_NK)):
            raise _bad_set(ids_NK, num_experts, layers, ascending=True)
    elif codec == Codec.RANKED:
        if not ranked.applies(num_experts, top_k):
            raise TraceError(
                "the ranked codec cannot encode sets of this size",
                got=f"{top_k} of {num_experts} experts",
                fault="no code",
            )
        plain = _decompress(data, layers * num_experts + size, dtype)
        ids_NK = ranked.decode(plain, (tokens, layers, top_k), num_experts)
    else:
        if codec == Codec.RAW:
            _check_size(data, size)
        values = np.frombuffer(data, dtype) if codec == Codec.RAW else _decompress(data, size, dtype)
        ids_NK = values.reshape(sets, top_k).copy()
        sorted_NK = sort_sets(ids_NK) if keep_order else ids_NK
        if int(ids_NK.max()) >= num_experts or not _ascending(sorted_NK):
            raise _bad_set(ids_NK, num_experts, layers, ascending=not keep_order)
    if out is None:
        return ids_NK.reshape(shape)
    out[...] = ids_NK.reshape(shape)
    return out


def _id_dtype(shape: tuple[int, ...], num_experts: int) -> np.dtype:
    """Return the dtype of ids, after checking that the shape is possible for a chunk."""
    if len(shape) != 3 or min(shape) < 0 or not 1 <= num_experts <= 65536 or not 1 <= shape[2] <= num_experts:
        raise TraceError(
            "chunk has an impossible shape",
            got=f"{tuple(shape)} with {num_experts} experts",
            expected="[T, L, K] with 1 <= K <= experts <= 65536",
            fault="shape",
        )
    return np.dtype(np.uint8 if num_experts <= 256 else "<u2")


def _check_size(data: Buffer, size: int) -> None:
    got = memoryview(data).nbytes
    if got != size:
        raise TraceError("chunk has the wrong size", got=f"{got} bytes", expected=f"{size} bytes", fault="size")


def _bad_set(ids_NK: np.ndarray, num_experts: int, layers: int, *, ascending: bool) -> TraceError:
    """Return the error for the first invalid set. `ascending` says whether sets should be ascending."""
    high = (ids_NK >= num_experts).any(axis=1)
    ordered_NK = ids_NK if ascending else np.sort(ids_NK, axis=1)
    repeated = (ordered_NK[:, 1:] <= ordered_NK[:, :-1]).any(axis=1)
    row = int(np.flatnonzero(high | repeated)[0])
    what = "chosen twice or out of order" if ascending else "chosen twice"
    return TraceError(
        "an expert of a chunk is out of range"
        if (ids_NK[row] >= num_experts).any()
        else f"an expert of a chunk is {what}",
        where={"token": row // layers, "layer": row % layers},
        got=" ".join(map(str, ids_NK[row, :MAX_COLUMNS])),
        expected=f"different ids below {num_experts}" + (", ascending" if ascending else ""),
        fault="no expert" if (ids_NK[row] >= num_experts).any() else "expert order",
    )


def _skips(ids_NK: np.ndarray) -> np.ndarray:
    """Turn ascending sets into the first id, then the number of experts between each id and the one before it."""
    skips_NK = np.empty_like(ids_NK)
    ids, skips = ids_NK.reshape(-1), skips_NK.reshape(-1)
    # Computed across set boundaries too; the wrong values land in the first column, which is overwritten below.
    np.subtract(ids[1:], ids[:-1], out=skips[1:])
    skips -= ids.dtype.type(1)
    skips_NK[:, 0] = ids_NK[:, 0]
    return skips_NK


def _sum_skips(skips_NK: np.ndarray) -> np.ndarray:
    """Sum skips back into ids, modulo 2**8 or 2**16; the inverse of _skips."""
    top_k = skips_NK.shape[1]
    if skips_NK.itemsize == 1 and top_k in _WORDS:
        words = skips_NK.reshape(-1).view(_WORDS[top_k]) * _ONES[top_k]
        words += _STEPS[top_k]
        return words.view(np.uint8).reshape(skips_NK.shape)
    ids_NK = skips_NK + skips_NK.dtype.type(1)
    ids_NK[:, 0] -= skips_NK.dtype.type(1)
    if top_k > MAX_COLUMNS:
        return np.cumsum(ids_NK, axis=1, dtype=ids_NK.dtype, out=ids_NK)
    for i in range(1, top_k):
        ids_NK[:, i] += ids_NK[:, i - 1]
    return ids_NK


def _ascending(ids_NK: np.ndarray) -> bool:
    """Return whether every set is strictly ascending."""
    rises_NK = np.empty(ids_NK.shape, np.bool_)
    ids, rises = ids_NK.reshape(-1), rises_NK.reshape(-1)
    np.less(ids[:-1], ids[1:], out=rises[:-1])
    # Ids may fall from the end of one set to the start of the next.
    rises_NK[:, -1] = True
    return bool(rises.all())


def _compress(values_NK: np.ndarray) -> bytes:
    if values_NK.itemsize == 2:
        values_NK = np.ascontiguousarray(values_NK.reshape(-1).view(np.uint8).reshape(-1, 2).T)
    return ZSTD.unsized.compress(values_NK.data)[_ZSTD_HEAD_WRITTEN:]


def _compress_blocks(parts: list[np.ndarray]) -> bytes:
    """Compress each part in its own zstd block, with its own Huffman code."""
    stream = ZSTD.blocks.compressobj()
    written = []
    for part in parts[:-1]:
        written += [stream.compress(part.data), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    written += [stream.compress(parts[-1].data), stream.flush()]
    return b"".join(written)[_ZSTD_HEAD_WRITTEN:]


def _decompress(data: Buffer, size: int, dtype: np.dtype) -> np.ndarray:
    """Decompress to `size` bytes as a flat array of `dtype`. Raises TraceError unless zstd gives exactly that many."""
    head = _ZSTD_HEAD + size.to_bytes(8, "little")
    try:
        plain = ZSTD.decompressor.decompress(b"".join((head, data)), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise TraceError(
            "chunk does not decompress",
            got=f"{memoryview(data).nbytes} bytes, {error}",
            expected=f"{size} bytes",
            fault="compression",
        ) from None
    values = np.frombuffer(plain, np.uint8)
    if dtype.itemsize == 1:
        return values
    low, high = values.reshape(2, -1)
    return high.astype(dtype) << 8 | low
