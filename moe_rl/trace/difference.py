"""Finds where two stores of the same sequences chose different experts.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.inspection import Selection, references
from moe_rl.trace.record import RouteRecord
from moe_rl.trace.store import TraceStore
from moe_rl.types import RouteRef

_BINS = 40


@dataclass(slots=True)
class Disagreement:
    """Holds sums over the tokens that both stores have.

    Attributes:
        layers: [L] the layers that both stores have.
        sets_L: number of sets that differ.
        experts_L: number of experts that only the first store chose.
        tokens: rows that differ in at least one layer.
        shorter: sequences compared only up to the first token that differs.
        bin_sets, bin_differ: [B] number of sets, and of sets that differ, for each `bin_rows` positions.
    """

    sequences: int
    only_here: int
    only_there: int
    bin_rows: int
    layers: tuple[int, ...] = ()
    top_k: int = 0
    shorter: int = 0
    rows: int = 0
    tokens: int = 0
    sets_L: np.ndarray = field(default_factory=partial(np.zeros, (), np.int64))
    experts_L: np.ndarray = field(default_factory=partial(np.zeros, (), np.int64))
    bin_sets: np.ndarray = field(default_factory=partial(np.zeros, _BINS, np.int64))
    bin_differ: np.ndarray = field(default_factory=partial(np.zeros, _BINS, np.int64))


def compare(here: Selection, there: Selection) -> Disagreement:
    """Compare records with equal keys, token by token until the tokens differ. Order within a set is ignored.

    Raises:
        TraceError: no sequence is in both stores, or two records with the same key have different numbers of experts
            or no layer in common.
    """
    refs, other_refs = _by_key(here), _by_key(there)
    common = [key for key in refs if key in other_refs]
    longest = max((refs[key].rows for key in common), default=0)
    if not longest:
        raise TraceError(
            "the stores have no sequence in common",
            where={"folder": here.root, "other": there.root},
            got=f"{len(refs)} and {len(other_refs)} keys",
            do="compare recordings of the same requests",
        )
    sums = Disagreement(len(common), len(refs) - len(common), len(other_refs) - len(common), -(-longest // _BINS))
    for key in common:
        first, other = _read(here, refs[key]), _read(there, other_refs[key])
        shared = tuple(layer for layer in first.layers if layer in other.layers)
        sums.layers = shared if key == common[0] else sums.layers
        models = {(record.spec.num_experts, record.spec.top_k) for record in (first, other)}
        if len(models) > 1 or shared != sums.layers:
            raise TraceError("records with one key have different models or layers", where={"record": key}, got=shared)
        sums.top_k, length = first.spec.top_k, _same_tokens(first, other)
        sums.shorter += length < min(len(first.routes), len(other.routes))
        a = np.sort(first.routes[:length, [first.layers.index(layer) for layer in shared]], axis=2)
        b = np.sort(other.routes[:length, [other.layers.index(layer) for layer in shared]], axis=2)
        differ_TL = (a != b).any(axis=2)
        missing_TL = (a[..., None] != b[..., None, :]).all(axis=3).sum(axis=2)
        sums.sets_L = sums.sets_L + differ_TL.sum(axis=0)
        sums.experts_L = sums.experts_L + missing_TL.sum(axis=0)
        sums.rows += length
        sums.tokens += int(differ_TL.any(axis=1).sum())
        bins = np.arange(length) // sums.bin_rows
        sums.bin_sets += np.bincount(bins, minlength=_BINS) * len(shared)
        sums.bin_differ += np.bincount(bins, weights=differ_TL.sum(axis=1), minlength=_BINS).astype(np.int64)
    if not sums.rows or not sums.layers:
        raise TraceError(
            "the stores have no token or no layer in common", where={"folder": here.root, "other": there.root}
        )
    return sums


def _by_key(selection: Selection) -> dict[str, RouteRef]:
    """Return references by key, with the parts of all pipeline stages (same key, other layers) in one reference.

    If a key was sampled several times, its last attempt counts that was not aborted, or the last if all were.
    """
    store, attempts, layers = selection.store, defaultdict[str, list[RouteRef]](list), dict[str, set[int]]()
    places = {shard: place for place, shard in enumerate(store.manifest().published)}  # oldest first
    for ref in sorted(references(selection), key=lambda ref: places.get(ref.parts[0].shard, -1)):
        shard, known = ref.parts[0].shard, attempts[ref.key]
        if shard not in layers:
            layers[shard] = set(store.info(ref).layers)
        for index, other in enumerate(known):
            if all(layers[part.shard].isdisjoint(layers[shard]) for part in other.parts):
                known[index] = RouteRef(ref.key, min(other.rows, ref.rows), other.parts + ref.parts)
                break
        else:
            known.append(ref)
    return {key: _last(store, known) for key, known in attempts.items()}


def _last(store: TraceStore, attempts: list[RouteRef]) -> RouteRef:
    whole = (ref for ref in reversed(attempts) if len(attempts) == 1 or not store.info(ref).aborted)
    return next(whole, attempts[-1])


def _read(selection: Selection, ref: RouteRef) -> RouteRecord:
    return selection.store.read(ref, layers=selection.store.info(ref).layers)


def _same_tokens(record: RouteRecord, other: RouteRecord) -> int:
    length = min(len(record.token_ids), len(other.token_ids))
    different = np.flatnonzero(record.token_ids[:length] != other.token_ids[:length])
    return int(different[0]) if len(different) else length
