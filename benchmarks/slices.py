"""Measures reading one pipeline stage of one sequence from different containers, each in its own process.

    python benchmarks/slices.py KIND write|read FOLDER

write puts the sequences of FOLDER/routes.npy, uint8 [N, T, L, K], into FOLDER/KIND. read takes 12 layers of single
sequences from it. Both print one JSON object. trace.py runs this script.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

STAGE = range(12, 24)
_SPEC = ("benchmark", 128, 8, "m" * 48)


def store_write(folder: Path, routes: np.ndarray) -> None:
    from moe_rl.trace import ShardWriter, TraceSpec
    from moe_rl.types import Provenance, Span

    tokens = np.random.default_rng(0).integers(0, 150_000, routes.shape[:2], dtype=np.int32)
    with ShardWriter(folder, "shard", TraceSpec(*_SPEC)) as writer:
        for number, one in enumerate(routes):
            writer.add(f"s{number}", one, tokens[number], [Span(len(one), 0, Provenance.DECODE)])


def store_read(folder: Path) -> Callable[[int], np.ndarray]:
    from moe_rl.trace import TraceStore

    store = TraceStore(folder)
    refs: list = []

    def read(number: int) -> np.ndarray:
        if not refs:
            refs.extend(store.records("shard"))
        return store.read(refs[number], layers=STAGE).routes

    return read


def safetensors_write(folder: Path, routes: np.ndarray) -> None:
    from safetensors.numpy import save_file

    save_file({f"s{number}": one for number, one in enumerate(routes)}, folder / "all.safetensors")


def safetensors_read(folder: Path) -> Callable[[int], np.ndarray]:
    from safetensors import safe_open

    file = safe_open(folder / "all.safetensors", "np")
    return lambda number: file.get_slice(f"s{number}")[:, STAGE.start : STAGE.stop]


def parquet_write(folder: Path, routes: np.ndarray) -> None:
    """Uses a column per layer and a row group per sequence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"layer_{layer}" for layer in range(routes.shape[2])]
    sets = pa.list_(pa.uint8(), routes.shape[3])
    with pq.ParquetWriter(
        folder / "all.parquet", pa.schema([(name, sets) for name in names]), compression="zstd"
    ) as writer:
        for one in routes:
            columns = [
                pa.FixedSizeListArray.from_arrays(pa.array(one[:, layer].reshape(-1)), routes.shape[3])
                for layer in range(routes.shape[2])
            ]
            writer.write_table(pa.table(columns, names=names), row_group_size=len(one))


def parquet_read(folder: Path) -> Callable[[int], np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(1)
    file = pq.ParquetFile(folder / "all.parquet")
    names = [f"layer_{layer}" for layer in STAGE]

    def read(number: int) -> np.ndarray:
        table = file.read_row_group(number, columns=names, use_threads=False)
        flat = [column.combine_chunks().flatten().to_numpy().reshape(-1, 8) for column in table.columns]
        return np.stack(flat, axis=1)

    return read


def zarr_write(folder: Path, routes: np.ndarray) -> None:
    """Uses zstd chunks of one sequence and one stage."""
    import zarr

    array = zarr.create_array(
        folder / "all.zarr",
        shape=routes.shape,
        chunks=(1, routes.shape[1], len(STAGE), routes.shape[3]),
        dtype=routes.dtype,
        compressors=zarr.codecs.ZstdCodec(level=3),
    )
    array[:] = routes


def zarr_read(folder: Path) -> Callable[[int], np.ndarray]:
    import zarr

    array = zarr.open_array(folder / "all.zarr", mode="r")
    return lambda number: array[number, :, STAGE.start : STAGE.stop]


KINDS = {
    "store": (store_write, store_read, "moe_rl.trace"),
    "safetensors": (safetensors_write, safetensors_read, "safetensors.numpy"),
    "parquet": (parquet_write, parquet_read, "pyarrow.parquet"),
    "zarr": (zarr_write, zarr_read, "zarr"),
}


def run_write(kind: str, folder: Path) -> dict[str, object]:
    routes = np.load(folder / "routes.npy", mmap_mode="r")
    write, _, module = KINDS[kind]
    importlib.import_module(module)
    target = folder / kind
    target.mkdir()
    start = time.perf_counter()
    write(target, routes)
    seconds = time.perf_counter() - start
    files = [path for path in target.rglob("*") if path.is_file()]
    return {
        "bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "write_seconds": seconds,
        "max_rss_mib": _max_rss(),
    }


def run_read(kind: str, folder: Path) -> dict[str, object]:
    routes = np.load(folder / "routes.npy", mmap_mode="r")
    expected = [np.sort(routes[number][:, STAGE.start : STAGE.stop]) for number in range(len(routes))]
    for path in (folder / kind).rglob("*"):
        if path.is_file():
            _evict(path)
    _, open_it, module = KINDS[kind]
    importlib.import_module(module)
    # The order is random, as in a trainer's batches, so reading ahead gains little.
    first_one, *others = np.random.default_rng(5).permutation(len(routes)).tolist()
    start, before = time.perf_counter(), _io()
    read = open_it(folder / kind)
    read(first_one)
    first, opened = time.perf_counter() - start, _io()
    seconds, asked, fetched = [], [], []
    for number in others:
        start, io = time.perf_counter(), _io()
        got = read(number)
        seconds.append(time.perf_counter() - start)
        now = _io()
        asked.append(now["rchar"] - io["rchar"])
        fetched.append(now["read_bytes"] - io["read_bytes"])
        if not np.array_equal(np.sort(got), expected[number]):
            raise SystemExit(f"{kind}: sequence {number} was not read as it was written")
    return {
        "first_ms": 1e3 * first,
        "first_bytes": opened["rchar"] - before["rchar"],
        "slice_ms": 1e3 * statistics.median(seconds),
        # Bytes requested by the process, and bytes read from disk. A memory map requests nothing.
        "slice_bytes": statistics.median(asked),
        "slice_disk_bytes": statistics.fmean(fetched),
        "max_rss_mib": _max_rss(),
    }


def _io() -> dict[str, int]:
    # Reading this file counts too: some hundred bytes.
    with open("/proc/self/io", encoding="ascii") as file:
        return {name: int(value) for name, value in (line.split(": ") for line in file)}


def _evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _max_rss() -> float:
    """Return the high-water mark of this process in MiB. getrusage would include the process that started it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


if __name__ == "__main__":
    kind, action, folder = sys.argv[1:]
    print(json.dumps((run_write if action == "write" else run_read)(kind, Path(folder))))
