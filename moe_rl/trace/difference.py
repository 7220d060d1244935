"""Finds where two stores of the same sequences chose different experts.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.inspection import Selection, references
from moe_rl.trace.record import RouteRecord
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
    ours, theirs = _by_key(here), _by_key(there)
    common = [key for key in ours if key in theirs]
    longest = max((ours[key].rows for key in common), default=0)
    if not longest:
        raise TraceError(
            "the stores have no sequence in common",
            where={"folder": here.root, "other": there.root},
            got=f"{len(ours)} and {len(theirs)} keys",
            do="compare recordings of the same requests",
        )
    found = Disagreement(len(common), len(ours) - len(common), len(theirs) - len(common), -(-longest // _BINS))
    for key in common:
        one, other = _read(here, ours[key]), _read(there, theirs[key])
        shared = tuple(layer for layer in one.layers if layer in other.layers)
        found.layers = shared if key == common[0] else found.layers
        models = {(record.spec.num_experts, record.spec.top_k) for record in (one, other)}
        if len(models) > 1 or shared != found.layers:
            raise TraceError("records with one key have different models or layers", where={"record": key}, got=shared)
        found.top_k, length = one.spec.top_k, _same_tokens(one, other)
        found.shorter += length < min(len(one.routes), len(other.routes))
        a = np.sort(one.routes[:length, [one.layers.index(layer) for layer in shared]], axis=2)
        b = np.sort(other.routes[:length, [other.layers.index(layer) for layer in shared]], axis=2)
        differ_TL = (a != b).any(axis=2)
        missing_TL = (a[..., None] != b[..., None, :]).all(axis=3).sum(axis=2)
        found.sets_L = found.sets_L + differ_TL.sum(axis=0)
        found.experts_L = found.experts_L + missing_TL.sum(axis=0)
        found.rows += length
        found.tokens += int(differ_TL.any(axis=1).sum())
        at = np.arange(length) // found.bin_rows
        found.bin_sets += np.bincount(at, minlength=_BINS) * len(shared)
        found.bin_differ += np.bincount(at, weights=differ_TL.sum(axis=1), minlength=_BINS).astype(np.int64)
    if not found.rows or not found.layers:
        raise TraceError(
            "the stores have no token or no layer in common", where={"folder": here.root, "other": there.root}
        )
    return found


def _by_key(selection: Selection) -> dict[str, RouteRef]:
    """Return references by key, with the parts of all pipeline stages (same key and rows) in one reference."""
    found: dict[str, RouteRef] = {}
    for ref in references(selection):
        known = found.get(ref.key)
        found[ref.key] = ref if known is None else RouteRef(ref.key, min(known.rows, ref.rows), known.parts + ref.parts)
    return found


def _read(selection: Selection, ref: RouteRef) -> RouteRecord:
    return selection.store.read(ref, layers=selection.store.info(ref).layers)


def _same_tokens(one: RouteRecord, other: RouteRecord) -> int:
    length = min(len(one.token_ids), len(other.token_ids))
    different = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    return int(different[0]) if len(different) else length
