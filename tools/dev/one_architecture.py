"""Empties a CUDA library of the code for other GPUs than one: `python -m tools.dev.one_architecture FILE [--sm 90]`.

The file keeps its size and every address. What is emptied is zeros, which compress to nothing: vLLM's libraries come to
a seventh. In each fat binary (one for each compiled file) the machine code for the GPU stays; where there is none, the
newest PTX stays that its driver can compile. The format is not documented; `cuobjdump --dump-elf` reads what is left.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FAT_BINARY, _PTX, _MACHINE_CODE = 0xBA55ED50, 1, 2


class Image(NamedTuple):
    """Tells where a fat binary has the code for one architecture, such as 90, and where its header ends."""

    start: int
    code: int
    end: int
    kind: int
    architecture: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="it is replaced")
    parser.add_argument("--sm", type=int, default=90, help="the architecture that is kept")
    options = parser.parse_args()
    options.file.write_bytes(emptied(options.file.read_bytes(), options.sm))


def emptied(library: bytes, architecture: int) -> bytes:
    """Return the library without the code of other architectures. Raises ValueError for an unknown format."""
    made = bytearray(library)
    for start, size in _sections(library):
        at = start
        while at < start + size:
            magic, _, header, length = struct.unpack_from("<IHHQ", library, at)
            if magic != _FAT_BINARY:
                if any(library[at : at + 8]):
                    raise ValueError(f"neither a fat binary nor padding at {at:#x}")
                at += 8
                continue
            first, at = at + header, at + header + length
            images = list(_images(library, first, at))
            kept = [one for one in images if one.kind == _MACHINE_CODE and one.architecture == architecture]
            ptx = [one for one in images if one.kind == _PTX and one.architecture <= architecture]
            kept = kept or sorted(ptx, key=lambda one: one.architecture)[-1:]
            if kept:  # they move to the front of their fat binary, which ends behind them
                body = b"".join(library[one.start : one.end] for one in kept)
                struct.pack_into("<Q", made, first - 8, len(body))
                made[first:at] = body.ljust(length, b"\0")
            for one in () if kept else images:
                made[one.code : one.end] = bytes(one.end - one.code)
    return bytes(made)


def _sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the sections of an ELF file that hold fat binaries."""
    (table,) = struct.unpack_from("<Q", library, 40)
    count, names = struct.unpack_from("<HH", library, 60)
    rows = [struct.unpack_from("<IIQQQQ", library, table + 64 * number) for number in range(count)]
    for row in rows:
        name = library[rows[names][4] + row[0] :][:64].partition(b"\0")[0]
        if name.startswith(b".nv_fatbin") or name == b"__nv_relfatbin":
            yield row[4], row[5]


def _images(library: bytes, at: int, end: int) -> Iterator[Image]:
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        (architecture,) = struct.unpack_from("<I", library, at + 28)
        if kind not in (_PTX, _MACHINE_CODE) or header < 32 or at + header + size > end:
            raise ValueError(f"an unknown image at {at:#x}: kind {kind}, header {header}, {size} bytes")
        yield Image(at, at + header, at + header + size, kind, architecture)
        at += header + size


if __name__ == "__main__":
    main()
