"""Finds where two stores of the same sequences chose different experts.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.inspection import Selection, references
from moe_rl.trace.record import RouteRecord
from moe_rl.types import RouteRef

_BINS = 40


@dataclass(frozen=True, slots=True)
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

    layers: tuple[int, ...]
    top_k: int
    sequences: int
    only_here: int
    only_there: int
    shorter: int
    rows: int
    tokens: int
    sets_L: np.ndarray
    experts_L: np.ndarray
    bin_rows: int
    bin_sets: np.ndarray
    bin_differ: np.ndarray


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
    bin_rows = -(-longest // _BINS)
    bin_sets, bin_differ = np.zeros(_BINS, np.int64), np.zeros(_BINS, np.int64)
    layers, rows, tokens, shorter = None, 0, 0, 0
    sets_L = experts_L = np.zeros((), np.int64)
    for key in common:
        one, other = _read(here, ours[key]), _read(there, theirs[key])
        shared = tuple(layer for layer in one.layers if layer in other.layers)
        layers = shared if layers is None else layers
        if one.spec.num_experts != other.spec.num_experts or one.spec.top_k != other.spec.top_k or shared != layers:
            raise TraceError("records with one key have different models or layers", where={"record": key}, got=shared)
        length = _same_tokens(one, other)
        shorter += length < min(len(one.routes), len(other.routes))
        a = np.sort(one.routes[:length, [one.layers.index(layer) for layer in shared]], axis=2)
        b = np.sort(other.routes[:length, [other.layers.index(layer) for layer in shared]], axis=2)
        differ_TL = (a != b).any(axis=2)
        missing_TL = (a[..., None] != b[..., None, :]).all(axis=3).sum(axis=2)
        sets_L, experts_L = sets_L + differ_TL.sum(axis=0), experts_L + missing_TL.sum(axis=0)
        rows, tokens = rows + length, tokens + int(differ_TL.any(axis=1).sum())
        at = np.arange(length) // bin_rows
        bin_sets += np.bincount(at, minlength=_BINS) * len(shared)
        bin_differ += np.bincount(at, weights=differ_TL.sum(axis=1), minlength=_BINS).astype(np.int64)
    if not rows or not layers:
        raise TraceError(
            "the stores have no token or no layer in common", where={"folder": here.root, "other": there.root}
        )
    return Disagreement(
        layers=layers,
        top_k=one.spec.top_k,
        sequences=len(common),
        only_here=len(ours) - len(common),
        only_there=len(theirs) - len(common),
        shorter=shorter,
        rows=rows,
        tokens=tokens,
        sets_L=sets_L,
        experts_L=experts_L,
        bin_rows=bin_rows,
        bin_sets=bin_sets,
        bin_differ=bin_differ,
    )


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
