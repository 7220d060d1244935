"""Reads names, dtypes and shapes from the header of a safetensors file. The file is untrusted input."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from moe_rl.disk import is_pointer
from moe_rl.errors import ConfigError

Tensor = tuple[str, tuple[int, ...], str]
"""Describes a tensor: safetensors dtype such as "BF16", shape, file name."""


def read_header(file: Path) -> dict[str, Tensor]:
    """Read names, dtypes and shapes of a safetensors file. The library checks that the header accounts for every byte.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape()), file.name) for name, tensor in slices.items()}
    except SafetensorError as error:
        if "unknown variant" in str(error):
            raise ConfigError(
                "a tensor has a dtype that safetensors does not know",
                where={"key": "model.path", "file": file},
                got=str(error).rpartition("unknown variant ")[2].partition(",")[0],
                do="take the checkpoint in bfloat16",
            ) from None
        raise ConfigError(
            "damaged safetensors file",
            where={"key": "model.path", "file": file},
            got="a pointer of Git LFS" if is_pointer(file) else error,
            do="fetch the files themselves: git lfs pull" if is_pointer(file) else "copy the checkpoint again",
            fault="damaged",
        ) from None
    except OSError as error:
        raise ConfigError(
            "cannot read a file", where={"key": "model.path", "file": file}, got=error.strerror or error
        ) from None


def stored_bytes(file: Path, name: str) -> np.ndarray:
    """Map the bytes of a tensor of a file that `read_header` accepts: uint8 [bytes]."""
    with open(file, "rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        begin, end = json.loads(stream.read(length))[name]["data_offsets"]
    return np.memmap(file, np.uint8, "r", 8 + length + begin, (end - begin,))
