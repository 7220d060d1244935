"""Describes the contents of a store: sequences, size, distance from the bound, read speed, and chosen experts.

Legend for shapes: T tokens, L MoE layers, E experts per layer, K top-k experts per token.
"""

from __future__ import annotations

import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.errors import About, TraceError
from moe_rl.trace.bounds import order0_bits, set_bits
from moe_rl.trace.codec import Codec, decode_chunk, encode_chunk
from moe_rl.trace.files import TMP
from moe_rl.trace.library import Found, Library, Reading
from moe_rl.trace.ranked import count_experts
from moe_rl.trace.record import TraceSpec, check_name
from moe_rl.trace.shard import SUFFIX, ShardHeader
from moe_rl.trace.store import TraceStore
from moe_rl.types import RoutePart, RouteRef

# Rows decoded at once.
_DECODED = 1 << 15
# Tokens for which pairs of experts are counted.
_PAIRED = 1 << 16
_REPEATS = 3
# Speed is measured on chunks of the writer's default size.
_LAYER_GROUP = 12
_TOKEN_BLOCK = 512


@dataclass(frozen=True)
class Selection:
    """Holds the shards that a command works on. `whole` says that they are all shards of the store."""

    root: str
    store: TraceStore
    shards: tuple[str, ...]
    whole: bool


def select(target: str) -> Selection:
    """Select the store at a folder or fsspec URL, or the single shard at the path or URL of a .safetensors file.

    Raises TraceError if the folder or file does not exist, or if the URL cannot be opened.
    """
    root, shard = str(target).rstrip("/"), None
    if root.endswith(SUFFIX):
        root, _, name = root.rpartition("/")
        shard = check_name(name.removesuffix(SUFFIX))
        root = root or "."
    library = Library(root)
    if not library.folder.exists():
        raise TraceError("there is no such store", where={"folder": root}, do="give the folder that holds the shards")
    store = TraceStore(library)
    shards = tuple(store.shards())
    if shard is not None and shard not in shards:
        raise TraceError("there is no such shard", where={"folder": root}, got=shard)
    return Selection(root, store, shards if shard is None else (shard,), whole=shard is None)


def references(selection: Selection, pattern: str = "*") -> Iterator[RouteRef]:
    """Yield every record whose key matches a shell pattern, part by part, in the order of writing."""
    for shard in selection.shards:
        yield from (ref for ref in selection.store.records(shard) if fnmatchcase(ref.key, pattern))


def unsealed(root: str) -> list[str]:
    """Return the files of writers that are running or have died; `repair` recovers the records of dead writers."""
    return [] if "://" in root else sorted(path.name for path in Path(root).glob(f".*{TMP}"))


@dataclass
class _Model:
    """Holds sums over the records of one model. `layers_of`: by key, the layers of each sequence with this key."""

    spec: TraceSpec
    counts_LE: np.ndarray
    shards: list[str] = field(default_factory=list)
    layers_of: dict[str, list[set[int]]] = field(default_factory=lambda: defaultdict(list))
    tokens: int = 0
    stored_tokens: int = 0
    sets: int = 0
    records: int = 0
    continued: int = 0
    aborted: int = 0
    bytes: int = 0
    chunk_bytes: int = 0
    codecs: Counter = field(default_factory=Counter)
    provenance: Counter = field(default_factory=Counter)
    versions: set[int] = field(default_factory=set)
    aux: set[str] = field(default_factory=set)


def inspect(selection: Selection) -> dict[str, Any]:
    """Return facts about the store as plain JSON values.

    `tokens` counts a prefix shared by several sequences once per sequence; `stored_tokens` counts it once.
    `bytes_per_token` divides by `tokens`, as a run's metric does. Chunks are decoded only for records too short to have
    stored expert counts, and for records that continue others. Raises TraceError on damage.
    """
    models, shards = _models(selection), len(selection.shards)
    facts: dict[str, Any] = {"store": selection.root, "shards": shards, "bytes": sum(model.bytes for model in models)}
    if selection.whole:
        facts["unsealed"] = unsealed(selection.root)
    facts["models"] = [_facts(model) for model in models]
    return facts


def expert_counts(selection: Selection) -> tuple[TraceSpec, np.ndarray]:
    """Return the model of the records, and how often each expert was chosen: int64 [L, E].

    Raises TraceError if the records are of several models or there are none.
    """
    models = _models(selection)
    if len(models) > 1:
        where: About = {"folder": selection.root, "shard": models[1].shards[0]}
        raise TraceError("shards are of different models", where=where)
    if not models:
        raise TraceError("there is no shard", where={"folder": selection.root})
    return models[0].spec, models[0].counts_LE


def coactivation(selection: Selection, layers: Sequence[int]) -> tuple[tuple[int, ...], np.ndarray]:
    """Return which of `layers` the records have, and how many tokens chose two experts together: int64 [L, E, E].

    The diagonal counts the tokens that chose one expert. Only the first tokens of the store are counted, some 65,000.
    """
    counts: dict[int, np.ndarray] = {}
    rows: Counter[int] = Counter()
    for ref in references(selection):
        info = selection.store.info(ref)
        wanted = [layer for layer in info.layers if layer in layers and rows[layer] < _PAIRED]
        if not wanted:
            continue
        record = selection.store.read(ref, layers=wanted, rows=(info.rows - info.own_rows, info.rows))
        experts = info.spec.num_experts
        for column, layer in enumerate(wanted):
            chosen = np.zeros((len(record.routes), experts), np.float32)
            np.put_along_axis(chosen, record.routes[:, column].astype(np.int64), 1, axis=1)
            counts[layer] = counts.get(layer, 0) + (chosen.T @ chosen).astype(np.int64)
            rows[layer] += len(chosen)
    recorded = tuple(sorted(counts))
    return recorded, np.stack([counts[layer] for layer in recorded])


def _models(selection: Selection) -> list[_Model]:
    """Return the sums over the selected shards, for each model."""
    models: dict[TraceSpec, _Model] = {}
    library = Library(selection.root)
    for shard in selection.shards:
        with Reading(library) as reading:
            index, records = reading.records(shard)
        header, spec = index.header, index.header.spec
        model = models.setdefault(spec, _Model(spec, np.zeros((len(spec.moe_layers), spec.num_experts), np.int64)))
        model.shards.append(shard)
        model.bytes += index.bytes
        for _, tip in records:
            _add(model, tip)
        columns = [spec.moe_layers.index(layer) for layer in header.layers]
        model.counts_LE[columns] += _counts(selection.store, header, records)
    return list(models.values())


def _add(model: _Model, tip: Found) -> None:
    frame, layers = tip.frame, tip.shard.header.layers
    # Every pipeline stage stores a sequence's tokens, which count once. If no sequence with this key lacks the layers,
    # the request was sampled again.
    sequences = model.layers_of[frame.key]
    held = next((held for held in sequences if held.isdisjoint(layers)), None)
    if held is None:
        sequences.append(held := set())
        model.tokens += frame.rows
        model.stored_tokens += frame.own_rows
        for span in frame.spans:
            model.provenance[span.provenance.name.lower()] += span.rows
            model.versions.add(span.weight_version)
    held.update(layers)
    model.records += 1
    model.continued += frame.parent is not None
    model.aborted += tip.aborted
    model.sets += frame.own_rows * len(layers)
    model.chunk_bytes += sum(chunk.size for chunk in frame.chunks)
    model.codecs.update(Codec(chunk.kind).name for chunk in frame.chunks)
    model.aux.update(array.name for array in frame.aux)


def _counts(store: TraceStore, header: ShardHeader, records: Sequence[tuple[RoutePart, Found]]) -> np.ndarray:
    """Count how often each expert was chosen in the own rows of a shard's records: int64 [L, E] for its layers."""
    counts = np.zeros((len(header.layers), header.spec.num_experts), np.int64)
    items, rows = [], 0
    for index, (part, tip) in enumerate(records):
        frame = tip.frame
        ref = RouteRef(frame.key, frame.rows, (part,))
        if frame.counts is not None and frame.parent is None:
            counts += store.expert_counts(ref)
        else:
            items.append((ref, (frame.rows - frame.own_rows, frame.rows)))
            rows += frame.own_rows
        if items and (rows >= _DECODED or index == len(records) - 1):
            out = np.empty((rows, len(header.layers), header.spec.top_k), header.spec.dtype)
            store.read_batch(items, out, layers=header.layers)
            counts += count_experts(out, header.spec.num_experts)
            items, rows = [], 0
    return counts


def _facts(model: _Model) -> dict[str, object]:
    spec = model.spec
    complete, sequences = set(spec.moe_layers), list(chain.from_iterable(model.layers_of.values()))
    bits = order0_bits(model.counts_LE, spec.top_k)
    return {
        "fingerprint": spec.model_fingerprint,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "layer_map": spec.layer_map,
        "shards": len(model.shards),
        "sequences": len(sequences),
        "incomplete_sequences": sum(layers != complete for layers in sequences),
        "records": model.records,
        "continued_records": model.continued,
        "aborted_records": model.aborted,
        "tokens": model.tokens,
        "stored_tokens": model.stored_tokens,
        "weight_versions": [min(model.versions), max(model.versions)] if model.versions else None,
        "provenance": dict(sorted(model.provenance.items())),
        "aux": sorted(model.aux),
        "bytes": model.bytes,
        "bytes_per_token": model.bytes / model.tokens if model.tokens else None,
        "bytes_per_stored_token": model.bytes / model.stored_tokens if model.stored_tokens else None,
        "raw_bytes_per_token": spec.row_bytes,
        "codecs": dict(sorted(model.codecs.items())),
        "bits_per_set": 8 * model.chunk_bytes / model.sets if model.sets else None,
        "bits_per_set_with_all": 8 * model.bytes / model.sets if model.sets else None,
        "bits_per_set_bound": set_bits(spec.num_experts, spec.top_k),
        "bits_per_set_order0": float(bits[model.counts_LE.any(axis=1)].mean()) if model.sets else None,
        "popularity": popularity(model.counts_LE, spec.moe_layers, spec.top_k),
    }


def popularity(counts_LE: np.ndarray, layers: Sequence[int], top_k: int) -> list[dict[str, float]]:
    """Summarize the load of each layer.

    Returns:
        Per layer: the busiest expert, its load relative to the mean, the number of experts never chosen, and the
        evenness of the load (entropy of the choices over its largest value; 1 when all experts are chosen equally
        often).
    """
    facts = []
    for layer, counts in zip(layers, counts_LE, strict=True):
        total = counts.sum()
        if not total:
            continue
        share = counts / total
        picked = share[share > 0]
        even = 1.0 if len(counts) == 1 else float(-(picked * np.log(picked)).sum() / np.log(len(counts)))
        facts.append(
            {
                "layer": int(layer),
                "sets": int(total // top_k),
                "busiest_expert": int(counts.argmax()),
                "busiest_load": float(share.max() * len(counts)),
                "idle_experts": int((counts == 0).sum()),
                "evenness": even,
            }
        )
    return facts


def measure(selection: Selection, *, max_bytes: int = 64 << 20) -> dict[str, object]:
    """Measure rates in GB/s of raw routes (one or two bytes an id) over the first records, up to `max_bytes` of routes.

    encode and decode use chunks of 512 tokens x 12 layers and processor time of one core; best of 3. read is
    TraceStore.read of whole records in wall time with every checksum, first cold (as far as the page cache is), then
    best of 3. Raises TraceError when there is nothing to read.
    """
    store, refs, size = selection.store, [], 0
    records = []
    started = time.perf_counter()
    for ref in references(selection):
        record = store.read(ref, layers=store.info(ref).layers)
        refs.append((ref, record.layers))
        records.append(record)
        size += record.routes.nbytes
        if size >= max_bytes:
            break
    first = time.perf_counter() - started
    if not size:
        raise TraceError("the store has no routes to measure", where={"folder": selection.root})

    chunks = [
        (
            record.spec.num_experts,
            np.ascontiguousarray(record.routes[token : token + _TOKEN_BLOCK, layer : layer + _LAYER_GROUP]),
        )
        for record in records
        for layer in range(0, len(record.layers), _LAYER_GROUP)
        for token in range(0, len(record.routes), _TOKEN_BLOCK)
    ]
    coded = [(experts, chunk.shape, *encode_chunk(chunk, experts)) for experts, chunk in chunks]

    def encode() -> None:
        for experts, chunk in chunks:
            encode_chunk(chunk, experts)

    def decode() -> None:
        for experts, shape, codec, data in coded:
            decode_chunk(codec, data, shape, experts)

    def read() -> None:
        for ref, layers in refs:
            store.read(ref, layers=layers)

    return {
        "records": len(refs),
        "raw_bytes": size,
        "encoded_bytes": sum(len(data) for *_, data in coded),
        "encode_gb_per_core_second": size / _best(encode, time.process_time) / 1e9,
        "decode_gb_per_core_second": size / _best(decode, time.process_time) / 1e9,
        "first_read_gb_per_second": size / first / 1e9,
        "read_gb_per_second": size / _best(read, time.perf_counter) / 1e9,
    }


def _best(run: Callable[[], None], clock: Callable[[], float]) -> float:
    return max(min(timeit.repeat(run, timer=clock, repeat=_REPEATS, number=1)), 1e-9)
