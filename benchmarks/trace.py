"""Measures size and speed of the trace store: `python benchmarks/trace.py [--json FILE]`. Takes under two minutes.

For uniform, Zipf and recorded routes it measures bits per set (compared with the bound and with the entropy of
popularity alone), bytes per token (compared with plain arrays and with zstd), and the speed of the codec on one core.
Then it reads one pipeline stage (12 of 48 layers) of one sequence of 2,048 tokens from the store and from raw
safetensors, Parquet and Zarr (if installed), each in its own process, and reports the bytes read and the memory
high-water mark.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np  # noqa: E402
import zstandard  # noqa: E402
from output import write  # noqa: E402
from routes import random_routes, recorded_routes  # noqa: E402
from slices import STAGE  # noqa: E402

from moe_rl.trace import ShardWriter, TraceSpec, TraceStore  # noqa: E402
from moe_rl.trace.bounds import order0_bits, set_bits  # noqa: E402
from moe_rl.trace.codec import decode_chunk, encode_chunk  # noqa: E402
from moe_rl.trace.ranked import count_experts  # noqa: E402
from moe_rl.types import Provenance, Span  # noqa: E402

_BLOCK, _GROUP = 512, 12
_REPEATS = 7
_NEEDS = {"parquet": "pyarrow", "zarr": "zarr"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of random routes (multiples of 2048)")
    parser.add_argument("--sequences", type=int, default=24, help="sequences from which the slice is taken")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, object] = {"machine": machine()}
    print(*(f"{name}: {value}" for name, value in result["machine"].items()), sep="; ")
    with tempfile.TemporaryDirectory() as folder:
        uniform = random_routes(options.tokens, 48, 128, 8)
        result["uniform"] = measure(Path(folder) / "uniform", 128, cut(uniform))
        zipf = random_routes(options.tokens, 48, 128, 8, exponent=0.6, seed=1)
        result["zipf"] = measure(Path(folder) / "zipf", 128, cut(zipf))
        recorded, token_ids = recorded_routes()
        result["recorded"] = measure(Path(folder) / "recorded", 32, recorded, token_ids)
        joined = ([np.concatenate(recorded)], [np.concatenate(token_ids)])
        result["joined"] = measure(Path(folder) / "joined", 32, *joined)
        print_measures({name: result[name] for name in ("uniform", "zipf", "recorded", "joined")})
        result["slices"] = slices(Path(folder), uniform, options.sequences)
        print_slices(result["slices"])
    result["seconds"] = time.perf_counter() - start
    print(f"\n{result['seconds']:.0f} seconds in total")
    write(result, options.json)
    return 0


def machine() -> dict[str, object]:
    names = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zstandard": zstandard.__version__,
    }


def cut(routes: np.ndarray) -> list[np.ndarray]:
    return [routes[at : at + 2048] for at in range(0, len(routes), 2048)]


def measure(
    root: Path, num_experts: int, sequences: list[np.ndarray], token_ids: list[np.ndarray] | None = None
) -> dict[str, object]:
    """Measure one kind of routes, each sequence uint8 [T, L, K].

    Speeds are GB/s of these arrays in processor time of one core, best of several; reading a store takes wall time.
    """
    _, layers, top_k = sequences[0].shape
    rows = sum(map(len, sequences))
    raw, sets = rows * layers * top_k, rows * layers
    if token_ids is None:
        rng = np.random.default_rng(2)
        token_ids = [rng.integers(0, 150_000, len(one), dtype=np.int32) for one in sequences]
    chunks = [
        np.ascontiguousarray(one[at : at + _BLOCK, layer : layer + _GROUP])
        for one in sequences
        for layer in range(0, layers, _GROUP)
        for at in range(0, len(one), _BLOCK)
    ]
    coded = [encode_chunk(chunk, num_experts) for chunk in chunks]
    zstd = zstandard.ZstdCompressor(level=3)
    packed = [zstd.compress(chunk) for chunk in chunks]
    unzstd = zstandard.ZstdDecompressor()

    def decode() -> None:
        for chunk, (codec, data) in zip(chunks, coded, strict=True):
            decode_chunk(codec, data, chunk.shape, num_experts)

    spec = TraceSpec("benchmark", num_experts, top_k, "m" * layers)
    names = (f"shard{number}" for number in range(_REPEATS))

    def store_all() -> None:
        with ShardWriter(root, next(names), spec) as writer:
            for number, (one, ids) in enumerate(zip(sequences, token_ids, strict=True)):
                writer.add(f"s{number}", one, ids, [Span(len(one), 0, Provenance.DECODE)])

    written = best(store_all)
    store = TraceStore(root)
    refs = store.records("shard0")
    for ref, one in zip(refs, sequences, strict=True):
        if not np.array_equal(store.read(ref).routes, np.sort(one)):
            raise SystemExit("a sequence was not read as it was written")
    counts = count_experts(np.concatenate(sequences), num_experts)
    return {
        "sequences": len(sequences),
        "tokens": rows,
        "shape": f"{top_k} of {num_experts} experts, {layers} layers",
        "bits_bound": set_bits(num_experts, top_k),
        "bits_order0": float(order0_bits(counts, top_k).mean()),
        "bits_chunks": 8 * sum(len(data) for _, data in coded) / sets,
        "bits_zstd3": 8 * sum(map(len, packed)) / sets,
        "codecs": sorted({codec.name for codec, _ in coded}),
        "token_bytes_store": (root / "shard0.safetensors").stat().st_size / rows,
        "token_bytes_zstd3": sum(map(len, packed)) / rows,
        "token_bytes_uint8": layers * top_k,
        "token_bytes_int16": 2 * layers * top_k,
        "token_bytes_int32": 4 * layers * top_k,
        "encode_gb_s": raw / best(lambda: [encode_chunk(chunk, num_experts) for chunk in chunks]) / 1e9,
        "decode_gb_s": raw / best(decode) / 1e9,
        "zstd3_encode_gb_s": raw / best(lambda: [zstd.compress(chunk) for chunk in chunks]) / 1e9,
        "zstd3_decode_gb_s": raw / best(lambda: [unzstd.decompress(data) for data in packed]) / 1e9,
        "store_write_gb_s": raw / written / 1e9,
        "store_read_gb_s": raw / best(lambda: [store.read(ref) for ref in refs], time.perf_counter) / 1e9,
    }


def best(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        run()
        seconds.append(clock() - start)
    return max(min(seconds), 1e-9)


def slices(folder: Path, uniform: np.ndarray, sequences: int) -> dict[str, object]:
    """Return the measurements of slices.py per container, the raw size of the slice, and the store's own bytes for
    it.
    """
    rng = np.random.default_rng(3)
    pieces = cut(uniform)
    # Renaming experts keeps the routes uniform and is faster than drawing new ones.
    many = [rng.permutation(128).astype(np.uint8)[pieces[n % len(pieces)]] for n in range(sequences)]
    np.save(folder / "routes.npy", np.stack(many))
    coded = [
        sum(
            len(encode_chunk(np.ascontiguousarray(one[at : at + _BLOCK, STAGE.start : STAGE.stop]), 128)[1])
            for at in range(0, len(one), _BLOCK)
        )
        for one in many
    ]
    result: dict[str, object] = {
        "sequences": sequences,
        "raw_slice_bytes": 2048 * len(STAGE) * 8,
        "store_slice_bytes": float(np.mean(coded)),
    }
    for kind in ("store", "safetensors", "parquet", "zarr"):
        if kind in _NEEDS and importlib.util.find_spec(_NEEDS[kind]) is None:
            result[kind] = None
            continue
        found = {}
        for action in ("write", "read"):
            run = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("slices.py")), kind, action, str(folder)],
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            if run.returncode:
                raise SystemExit(f"{kind}, {action}: {run.stderr.strip() or run.stdout.strip()}")
            values = json.loads(run.stdout.splitlines()[-1])
            found |= {f"{action}_max_rss_mib" if name == "max_rss_mib" else name: v for name, v in values.items()}
        result[kind] = found
    return result


def print_measures(measures: dict[str, dict]) -> None:
    print(f"\n{'':34}" + "".join(f"{name:>14}" for name in measures))
    lines = (
        ("sequences", "sequences", "{:,}"),
        ("tokens", "tokens", "{:,}"),
        ("bits per set: bound, log2 C(E, k)", "bits_bound", "{:.2f}"),
        ("  by popularity alone (order 0)", "bits_order0", "{:.2f}"),
        ("  chunks of the store", "bits_chunks", "{:.2f}"),
        ("  zstd-3 on raw uint8", "bits_zstd3", "{:.2f}"),
        ("bytes per token: store, everything", "token_bytes_store", "{:.1f}"),
        ("  zstd-3 on raw uint8", "token_bytes_zstd3", "{:.1f}"),
        ("  uint8", "token_bytes_uint8", "{:.0f}"),
        ("  int16", "token_bytes_int16", "{:.0f}"),
        ("  int32", "token_bytes_int32", "{:.0f}"),
        ("GB/s per core: encode", "encode_gb_s", "{:.3g}"),
        ("  decode", "decode_gb_s", "{:.3g}"),
        ("  zstd-3 encode", "zstd3_encode_gb_s", "{:.2f}"),
        ("  zstd-3 decode", "zstd3_decode_gb_s", "{:.2f}"),
        ("GB/s of a store: write and publish", "store_write_gb_s", "{:.3g}"),
        ("  read whole, all checks", "store_read_gb_s", "{:.3g}"),
    )
    for title, key, shown in lines:
        print(f"{title:34}" + "".join(f"{shown.format(one[key]):>14}" for one in measures.values()))
    for name, one in measures.items():
        print(f"{name}: {one['shape']}; codecs {', '.join(one['codecs'])}")
    print("recorded: a record per sequence, as the main job stores them; joined: the same, end to end as one sequence")


def print_slices(result: dict) -> None:
    own, raw = result["store_slice_bytes"], result["raw_slice_bytes"]
    print(
        f"\nstage slice: 12 of 48 layers of one of {result['sequences']} sequences of 2,048 tokens; {raw:,} bytes raw"
    )
    titles = ("file MB", "files", "slice KB", "x raw", "disk KB", "ms", "first KB", "first ms", "read MiB", "write MiB")
    print(f"{'':14}" + "".join(f"{title:>11}" for title in titles))
    for kind in ("store", "safetensors", "parquet", "zarr"):
        one = result[kind]
        if one is None:
            print(f"{kind:14} not installed")
            continue
        cells = (
            f"{one['bytes'] / 1e6:.2f}",
            f"{one['files']}",
            f"{one['slice_bytes'] / 1e3:.1f}",
            f"{one['slice_bytes'] / raw:.2f}",
            f"{one['slice_disk_bytes'] / 1e3:.0f}",
            f"{one['slice_ms']:.2f}",
            f"{one['first_bytes'] / 1e3:.0f}",
            f"{one['first_ms']:.1f}",
            f"{one['read_max_rss_mib']:.0f}",
            f"{one['write_max_rss_mib']:.0f}",
        )
        print(f"{kind:14}" + "".join(f"{cell:>11}" for cell in cells))
    ratio = result["store"]["slice_bytes"] / own
    print(f"the store reads {ratio:.3f} times the {own:,.0f} bytes that its chunks of the slice have")
    print("slice, disk: requested by the process, read from disk with a cold cache (a memory map requests nothing)")
    print("read, write MiB: high-water mark of the process, Python and its libraries included")


if __name__ == "__main__":
    sys.exit(main())
