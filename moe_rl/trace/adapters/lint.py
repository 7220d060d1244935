"""Reports everything wrong with an array of routed experts.

The validator stops at the first fault. Someone who debugs a sampler wants to see all faults and their pattern. A
finding is certain if no router could have produced the array, and a suspicion if a router could but hardly would.

Legend for shapes: T tokens, C layers as sent, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from moe_rl.errors import RouteValidationError
from moe_rl.trace.adapters.envelopes import moe_columns
from moe_rl.trace.record import TraceSpec, as_token_ids

# Shorter sequences may repeat routes by chance.
_FEW_ROWS = 8
# So many different routes of a token that none of them comes by chance.
_MANY_ROUTES = 10**6
# Fewest pairs of equal tokens for which an agreement is computed.
_FEW_PAIRS = 24
# A shift or reversal is suspected if it raises the agreement of equal tokens by more than this share of a set.
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes one fault. `rule` is a short name for tools, `where` the first place and a count."""

    rule: str
    where: str
    text: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{'' if self.certain else 'suspect: '}{self.rule} ({self.where}): {self.text}"


def lint(routes: np.ndarray, spec: TraceSpec, token_ids: Sequence[int] | np.ndarray | None = None) -> list[Finding]:
    """Return all findings, ordered by shape, ids, rows, layers, tokens. Never raises.

    Args:
        routes: as a sampler sent them, any dtype; [T, C, K] with C all decoder layers or the spec's MoE layers, in the
            order of the layer map.
        spec: the model.
        token_ids: [T] the forwarded tokens, for checks that compare rows with tokens.
    """
    routes = np.asarray(routes)
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        return [Finding("shape", "array", f"{routes.dtype} of shape {routes.shape}, not integers [tokens, layers, k]")]
    findings = _shape(routes, spec, token_ids)
    columns = moe_columns(routes.shape[1], spec)
    if columns is not None and len(columns) < routes.shape[1]:
        findings += _dense_layers(routes, columns)
    layers = spec.moe_layers if columns is not None else tuple(range(routes.shape[1]))
    moe = routes[:, columns] if columns is not None else routes
    if not moe.size:
        return findings
    empty = _empty_rows(moe, spec)
    findings += _ids(moe, spec, layers, empty)
    tokens = None
    if token_ids is not None:
        with suppress(RouteValidationError):
            tokens = as_token_ids(token_ids, where={})
    findings += _rows(moe, spec, tokens, empty)
    findings += _layers(moe[~empty], spec, layers)
    if tokens is not None:
        findings += _tokens(moe, spec, tokens, empty)
    return findings


def _shape(routes: np.ndarray, spec: TraceSpec, token_ids: Sequence[int] | np.ndarray | None) -> list[Finding]:
    findings = []
    rows, columns, top_k = routes.shape
    if token_ids is not None and rows != len(token_ids):
        tokens = len(token_ids)
        kinds = {
            tokens - 1: ("missing last row", "the last forwarded token has none"),
            tokens + 1: ("one row too many", "the last sampled token is never forwarded"),
        }
        rule, why = kinds.get(rows, ("rows", "there is one row per forwarded token: prompt + completion - 1"))
        findings.append(Finding(rule, f"{rows} rows, {tokens} forwarded tokens", why))
    if moe_columns(columns, spec) is None:
        text = f"the layer map has {len(spec.moe_layers)} MoE layers of {len(spec.layer_map)}"
        findings.append(Finding("layers", f"{columns} layers", text))
    if top_k != spec.top_k:
        why = "columns of shared experts, or another model" if top_k > spec.top_k else "another model"
        findings.append(Finding("top-k", f"{top_k} ids per set", f"the model chooses {spec.top_k}: {why}"))
    limits = np.iinfo(routes.dtype)
    if limits.max < spec.num_experts - 1:
        text = f"it holds ids to {limits.max} and the model has {spec.num_experts} experts: higher ids have wrapped"
        findings.append(Finding("dtype", str(routes.dtype), text))
    return findings


def _dense_layers(routes: np.ndarray, columns: Sequence[int]) -> list[Finding]:
    """Check arrays with all decoder layers: engines leave zeros for layers without a router."""
    total = routes.shape[1]
    dense = [layer for layer in range(total) if layer not in set(columns)]
    findings = [
        Finding(
            "dense layers included",
            f"layers {_some(dense)}",
            f"{total} layers were sent, of which {len(columns)} have routes; take those of the layer map",
            certain=False,
        )
    ]
    written = {layer for layer in range(total) if routes[:, layer].any()}
    if written & set(dense):
        mirrored = written == {total - 1 - column for column in columns}
        rule = "layers in reverse" if mirrored and written != set(columns) else "layer map"
        text = (
            "the layers without routes are where they would be if the array were in reverse"
            if rule == "layers in reverse"
            else "layers that have no router have routes: the layer map is of another model"
        )
        findings.append(Finding(rule, f"layers {_some(sorted(written & set(dense)))}", text))
    return findings


def _empty_rows(moe: np.ndarray, spec: TraceSpec) -> np.ndarray:
    """Return for each row [T] whether no router wrote it: every set is zeros, -1, or 0, 1, ..., K - 1."""
    top_k = moe.shape[2]
    filler = (moe == np.arange(top_k, dtype=np.int64)).all(axis=(1, 2))
    # With few layers and experts, 0, 1, ..., K - 1 in all of them is an ordinary choice.
    filler &= math.comb(spec.num_experts, top_k) ** moe.shape[1] > _MANY_ROUTES
    return (moe == 0).all(axis=(1, 2)) & (top_k > 1) | (moe == -1).all(axis=(1, 2)) | filler


def _ids(moe: np.ndarray, spec: TraceSpec, layers: Sequence[int], empty: np.ndarray) -> list[Finding]:
    findings = []
    sets = moe[~empty]
    rows = np.flatnonzero(~empty)

    def report(bad: np.ndarray, rule: str, text: str) -> None:
        if bad.any():
            token, layer = (int(i) for i in np.argwhere(bad)[0])
            where = f"token {rows[token]}, layer {layers[layer]}: {sets[token, layer].tolist()[:12]}; {bad.sum()} sets"
            findings.append(Finding(rule, where, text))

    if not sets.size:
        return findings
    blank = (sets == 0).all(axis=2) & (moe.shape[2] > 1)
    blank &= ~blank.all(axis=0)  # whole layers are reported below
    report(blank, "all-zero sets", "the layer was not captured for these tokens")
    low = (sets < 0).any(axis=2)
    wrapped = np.iinfo(moe.dtype).max < spec.num_experts - 1
    report(low, "negative ids", "ids above the type's range have wrapped" if wrapped else "no route was captured there")
    high = (sets >= spec.num_experts).any(axis=2)
    top = int(sets.max())
    text = f"the model has {spec.num_experts} experts; the largest id is {top}"
    if spec.num_experts <= top < 2 * spec.num_experts:
        text += ". Physical ids, recorded after load balancing gave experts replicas, look like this"
    report(high, "out of range", text)
    ordered = np.sort(sets, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) & ~(sets == 0).all(axis=2) & ~low
    report(twice, "duplicate ids", "a router chooses distinct experts")
    if spec.num_experts > 256 and np.iinfo(moe.dtype).max > 255 and top < 256 and not low.any():
        # Log of the probability that no set has an id above 255 if experts are equally loaded; below -30, skew cannot
        # explain it.
        logarithm = sets.shape[0] * sets.shape[1] * spec.top_k * np.log(256 / spec.num_experts)
        if logarithm < -30:
            text = f"no id of {sets[:, :, 0].size} sets is above 255: they were stored as a byte and have wrapped"
            findings.append(Finding("dtype wrap", "all sets", text, certain=False))
    return findings


def _rows(moe: np.ndarray, spec: TraceSpec, token_ids: np.ndarray | None, empty: np.ndarray) -> list[Finding]:
    findings = []
    if empty.any():
        first = moe[int(np.flatnonzero(empty)[0]), 0].tolist()[:8]
        text = f"every layer has {first}: no route was captured, or it was filled up"
        findings.append(Finding("empty rows", f"rows {_some(np.flatnonzero(empty).tolist())}", text))
    if len(moe) >= _FEW_ROWS and moe.shape[1] > 1 and moe.shape[2] < spec.num_experts:
        same = (moe[1:] == moe[:-1]).all(axis=(1, 2)) & ~empty[1:]
        if token_ids is not None:  # equal neighbouring tokens may take the same route
            pairs = min(len(same), max(0, len(token_ids) - 1))
            same[:pairs] &= token_ids[1 : pairs + 1] != token_ids[:pairs]
        if same.any() and not same.all():
            text = "a row equals the one before it in all layers: a step recorded twice, or a buffer read too early"
            rows = (np.flatnonzero(same) + 1).tolist()
            findings.append(Finding("repeated rows", f"rows {_some(rows)}", text, certain=False))
    return findings


def _layers(moe: np.ndarray, spec: TraceSpec, layers: Sequence[int]) -> list[Finding]:
    findings = []
    zero = [layers[column] for column in range(moe.shape[1]) if not moe[:, column].any() and moe.shape[2] > 1]
    if zero and len(zero) < moe.shape[1]:
        text = "not captured: a router without a hook, or a fused kernel that does not report"
        findings.append(Finding("all-zero layers", f"layers {_some(zero)}", text))
    if len(moe) < _FEW_ROWS or moe.shape[2] >= spec.num_experts:
        return findings
    # Whether two layers cannot have the same routes by chance.
    certain = math.comb(spec.num_experts, moe.shape[2]) ** min(len(moe), 20) > _MANY_ROUTES
    constant = [
        layers[column]
        for column in range(moe.shape[1])
        if moe[:, column].any() and (moe[:, column] == moe[:1, column]).all()
    ]
    if constant:
        text = "every token has the same set: a buffer that was filled once"
        findings.append(
            Finding("constant layers", f"layers {_some(constant)}", text, certain=certain and len(constant) > 1)
        )
    equal = [
        layers[column]
        for column in range(1, moe.shape[1])
        if moe[:, column].any() and (moe[:, column] == moe[:, column - 1]).all()
    ]
    if equal:
        text = "same routes as the layer before: two layers share one buffer"
        findings.append(Finding("repeated layers", f"layers {_some(equal)}", text, certain=certain))
    return findings


def _tokens(moe: np.ndarray, spec: TraceSpec, token_ids: np.ndarray, empty: np.ndarray) -> list[Finding]:
    """Compare the routes of equal tokens, which agree most in the first MoE layer.

    If shifted rows or the last layer agree better, the array is probably shifted, or its layers are reversed.
    """
    if moe.shape[2] >= spec.num_experts:
        return []
    findings = []
    best = None
    here = _agreement(moe[:, 0], token_ids, empty, 0)
    if here is None:
        return []
    for shift in (-2, -1, 1, 2):
        there = _agreement(moe[:, 0], token_ids, empty, shift)
        if there and there[0] > here[0] + max(_MARGIN, 4 * np.hypot(here[1], there[1])):
            best = max(best, (there[0], shift)) if best else (there[0], shift)
    if best:
        text = (
            f"in the first layer equal tokens share {here[0]:.0%} of their experts, and {best[0]:.0%} if row i + "
            f"{best[1]} were of token i"
        )
        findings.append(Finding("rows shifted", f"by {best[1]}", text, certain=False))
    elif moe.shape[1] > 1:
        last = _agreement(moe[:, -1], token_ids, empty, 0)
        if last and last[0] > here[0] + max(_MARGIN, 4 * np.hypot(here[1], last[1])):
            text = f"equal tokens share {last[0]:.0%} of their experts in the last layer, {here[0]:.0%} in the first"
            findings.append(Finding("layers in reverse", "order of layers", text, certain=False))
    return findings


def _agreement(sets: np.ndarray, token_ids: np.ndarray, empty: np.ndarray, shift: int) -> tuple[float, float] | None:
    """Return the mean share of experts that equal tokens have in common, and its standard error.

    Assumes that row i + shift belongs to token i. sets is [T, K] of one layer. Each token is compared only with its
    next occurrence, so that frequent tokens do not dominate.
    """
    rows = np.arange(max(0, -shift), min(len(token_ids), len(sets) - max(0, shift)))
    if not len(rows):
        return None
    rows = rows[~empty[rows + shift]]
    order = rows[np.argsort(token_ids[rows], kind="stable")]
    equal = token_ids[order[1:]] == token_ids[order[:-1]]
    earlier, other = sets[order[:-1][equal] + shift], sets[order[1:][equal] + shift]
    if len(earlier) < _FEW_PAIRS:
        return None
    share = (earlier[:, :, None] == other[:, None, :]).sum(axis=(1, 2)) / sets.shape[1]
    return float(share.mean()), float(share.std() / np.sqrt(len(share)))


def _some(numbers: Sequence[int]) -> str:
    """Format the first few numbers as ranges, with the total count."""
    runs = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ranges = [[number for _, number in run] for _, run in runs]
    text = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ranges[:4])
    return text if len(ranges) <= 4 else f"{text}, ...; {len(numbers)} in all"
