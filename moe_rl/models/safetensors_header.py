"""Reads names, dtypes and shapes from the header of a safetensors file. The file is untrusted input.

Some published checkpoints store tensors with fewer bits and separate scales:
fp8    X in float8 e4m3, X_scale_inv one float32 for each 128 x 128 block (DeepSeek-V3)
mxfp4  X_blocks [..., rows, groups, 16] two 4-bit floats a byte, X_scales [..., rows, groups] one 8-bit exponent for
       each 32 of them (gpt-oss); X itself is [..., columns, rows]
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.errors import ConfigError, describe

Tensor = tuple[str, tuple[int, ...], str]
"""Describes a tensor: safetensors dtype such as "BF16", shape, file name."""

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
FP8_BLOCK = 128
FP4_GROUP = 32
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library


def read_header(file: Path) -> dict[str, Tensor]:
    """Read names, dtypes and shapes of a safetensors file. The header must account for every byte of the file."""

    def damaged(reason: str) -> ConfigError:
        return ConfigError(
            describe(
                "damaged safetensors file",
                where={"key": "model.path", "file": file},
                got=reason,
                do="copy the checkpoint again",
                fault="damaged",
            )
        )

    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < 8:
                raise damaged(f"{size} bytes")
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            describe("cannot read a file", where={"key": "model.path", "file": file}, got=error.strerror)
        ) from None
    except (ValueError, RecursionError) as error:
        raise damaged(f"a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise damaged("a header that is not an object")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            right = whole and end - begin == math.prod(shape) * ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError):
            right = False
        if not right:
            raise damaged(f"an inconsistent entry for {name!r}")
        tensors[name] = (dtype, shape, file.name)
        spans.append((begin, end))
    expected = 0
    for begin, end in sorted(spans):
        if begin != expected:
            raise damaged(f"a gap or an overlap at byte {expected} of the data")
        expected = end
    if 8 + length + expected != size:
        raise damaged(f"{size} bytes, while the header needs {8 + length + expected}")
    return tensors


def stored_bytes(file: Path, name: str) -> np.ndarray:
    """Map the bytes of a tensor of a file that `read_header` accepts: uint8 [bytes]."""
    with open(file, "rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        begin, end = json.loads(stream.read(length))[name]["data_offsets"]
    return np.memmap(file, np.uint8, "r", 8 + length + begin, (end - begin,))


def unpacked(found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors as they are after unpacking, and {name of a packed tensor: "fp8" or "mxfp4"}.

    Unpacked tensors have the dtype "BF16". A packed tensor without fitting scales is returned unchanged.
    """
    tensors, packing = dict(found), {}
    for name, (dtype, shape, file) in found.items():
        if dtype == "F8_E4M3" and len(shape) == 2:
            scales = tuple(-(-size // FP8_BLOCK) for size in shape)
            if found.get(f"{name}_scale_inv", ("", (), ""))[:2] == ("F32", scales):
                del tensors[f"{name}_scale_inv"]
                tensors[name], packing[name] = ("BF16", shape, file), "fp8"
        elif name.endswith("_blocks") and dtype == "U8" and len(shape) >= 3 and 2 * shape[-1] == FP4_GROUP:
            whole = name.removesuffix("_blocks")
            if found.get(f"{whole}_scales", ("", (), ""))[:2] == ("U8", shape[:-1]):
                del tensors[name], tensors[f"{whole}_scales"]
                *outer, rows, groups, _ = shape
                tensors[whole], packing[whole] = ("BF16", (*outer, groups * FP4_GROUP, rows), file), "mxfp4"
    return tensors, packing


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate keys")
    return found
