"""Plants faults into the record of a pass of the zoo, for benchmarks/alarms.py. Legend: see zoo.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.alarm_parts.zoo import Pass

Planted = np.ndarray | None
"""The changed record [L, N, K]; None where the fault cannot be planted."""


def is_fault(record: np.ndarray, changed: np.ndarray) -> bool:
    """Return whether at least a quarter of the ids changed, of records [L, N, K]. Otherwise rows of other places may
    differ by near ties alone, and no check has to see that."""
    kept = (record[..., None] == changed[..., None, :]).any(3)
    return bool(kept.mean() <= 0.75)


def _mostly(one: Pass, record: np.ndarray, rows: np.ndarray) -> Planted:
    """Return the record if at least 80% of these rows have other experts now: a quarter of their ids in the layers that
    changed. Rows of other places may be equal but for near ties, and are no fault then. rows: indices."""
    before, after = (np.sort(of[:, rows], 2) for of in (one.record, record))
    changed = (before != after).any((1, 2))
    if not changed.any():
        return None
    kept = (before[changed][..., None] == after[changed][..., None, :]).any(3).mean((0, 2))
    return record if (kept <= 0.75).mean() >= 0.8 else None


def _layer(one: Pass, rng: np.random.Generator, change: Callable[[np.ndarray], Planted]) -> Planted:
    """Change the record [N, K] of one layer."""
    record = one.record.copy()
    layer = int(rng.integers(len(record)))
    changed = change(record[layer])
    if changed is None:
        return None
    record[layer] = changed
    return record


def _two_layers(one: Pass, rng: np.random.Generator) -> Planted:
    if len(one.record) < 2:
        return None
    record = one.record.copy()
    first, second = rng.choice(len(record), 2, replace=False)
    record[[first, second]] = record[[second, first]]
    return _mostly(one, record, np.arange(record.shape[1]))


def _next_layer(one: Pass, rng: np.random.Generator) -> Planted:
    return None if len(one.record) < 3 else _mostly(one, np.roll(one.record, 1, 0), np.arange(one.record.shape[1]))


def _late(one: Pass, rng: np.random.Generator, rows: int = 1) -> Planted:
    return _mostly(one, np.roll(one.record, rows, 1), np.arange(one.record.shape[1]))


def _layer_late(one: Pass, rng: np.random.Generator) -> Planted:
    if _late(one, rng) is None:
        return None
    return _layer(one, rng, lambda rows: np.roll(rows, 1, 0))


def _completions(one: Pass, rng: np.random.Generator) -> Planted:
    """Give each completion the rows of the next one of its prompt."""
    record, siblings, changed = one.record.copy(), _families(one), [np.arange(0)]
    for family in siblings:
        for here, other in zip(family, [*family[1:], family[0]], strict=True):
            prompt = one.prompts[here]
            rows = min(len(one.tokens[here]), len(one.tokens[other])) - prompt
            a, b = one.starts[here] + prompt, one.starts[other] + prompt
            record[:, a : a + rows] = one.record[:, b : b + rows]
            changed.append(np.arange(a, a + rows))
    return _mostly(one, record, np.concatenate(changed)) if max(map(len, siblings)) > 1 else None


def _prompts(one: Pass, rng: np.random.Generator) -> Planted:
    """Give each prompt the rows of the next prompt."""
    record, families, changed = one.record.copy(), _families(one), [np.arange(0)]
    for family, others in zip(families, [*families[1:], families[0]], strict=True):
        for here in family:
            rows = min(one.prompts[here], one.prompts[others[0]])
            a, b = one.starts[here], one.starts[others[0]]
            record[:, a : a + rows] = one.record[:, b : b + rows]
            changed.append(np.arange(a, a + rows))
    return _mostly(one, record, np.concatenate(changed)) if len(families) > 1 else None


def _families(one: Pass) -> list[list[int]]:
    found: dict[bytes, list[int]] = {}
    for number, (ids, prompt) in enumerate(zip(one.tokens, one.prompts, strict=True)):
        found.setdefault(ids[:prompt].tobytes(), []).append(number)
    return [*found.values()]


def _piece(one: Pass, rng: np.random.Generator) -> Planted:
    """Give 64 rows of one completion those of another sequence's completion."""
    long = [at for at, ids in enumerate(one.tokens) if len(ids) - one.prompts[at] >= 64]
    if len(long) < 2:
        return None
    record = one.record.copy()
    here, other = rng.choice(long, 2, replace=False)
    a, b = (one.starts[at] + one.prompts[at] for at in (here, other))
    record[:, a : a + 64] = one.record[:, b : b + 64]
    return _mostly(one, record, np.arange(a, a + 64))


def _stuck(one: Pass, rng: np.random.Generator) -> Planted:
    """In every long sequence, 32 rows are those of the first of them."""
    record, changed = one.record.copy(), [np.arange(0)]
    long = [at for at, ids in enumerate(one.tokens) if len(ids) >= 40]
    for at in long:
        start = one.starts[at] + int(rng.integers(0, len(one.tokens[at]) - 32))
        record[:, start : start + 32] = record[:, start : start + 1]
        changed.append(np.arange(start + 1, start + 32))
    return _mostly(one, record, np.concatenate(changed))


def _random(one: Pass, rng: np.random.Generator, share: float = 1.0) -> Planted:
    """Give one layer random experts, in this share of its rows."""

    def change(rows: np.ndarray) -> np.ndarray:
        anything = np.argsort(rng.random((len(rows), one.scores.shape[2])), 1)[:, : rows.shape[1]]
        return np.where(rng.random((len(rows), 1)) < share, anything, rows)

    return _layer(one, rng, change)


def _shuffled(one: Pass, rng: np.random.Generator) -> Planted:
    return _mostly(one, one.record[:, rng.permutation(one.record.shape[1])], np.arange(one.record.shape[1]))


def _wrong_ids(one: Pass, rng: np.random.Generator, ids: int = 1, everywhere: bool = False) -> Planted:
    """Replace ids of each row by others, in one layer or in all."""
    experts, top_k = one.scores.shape[2], one.record.shape[2]
    if top_k <= ids or top_k + ids > experts:
        return None

    def change(rows: np.ndarray) -> np.ndarray:
        rank = rng.random((len(rows), experts))
        np.put_along_axis(rank, rows, 2.0, 1)  # experts that the row has come last
        new, slots = np.argsort(rank, 1)[:, :ids], np.argsort(rng.random(rows.shape), 1)[:, :ids]
        changed = rows.copy()
        np.put_along_axis(changed, slots, new, 1)
        return changed

    if everywhere:
        return np.stack([change(rows) for rows in one.record])
    return _layer(one, rng, change)


def _expert_everywhere(one: Pass, rng: np.random.Generator) -> Planted:
    """Write the same expert, which the router leaves out of most rows, into every row of a layer."""
    layers, count, top_k = one.record.shape
    layer = int(rng.integers(layers))
    load = np.bincount(one.witness[layer].ravel(), minlength=one.scores.shape[2])
    seldom = np.flatnonzero(load < 0.5 * count)
    if top_k < 2 or not len(seldom):
        return None
    expert, record = int(rng.choice(seldom)), one.record.copy()
    missing = np.flatnonzero((record[layer] != expert).all(1))
    record[layer, missing, rng.integers(0, top_k, len(missing))] = expert
    return record


def _labels(one: Pass, rng: np.random.Generator) -> Planted:
    """Write two busy experts of a layer for each other."""

    def change(rows: np.ndarray) -> np.ndarray:
        order = np.argsort(-np.bincount(rows.ravel(), minlength=one.scores.shape[2]))
        first, second = order[[1, min(4, len(order) - 1)]]
        return np.where(rows == first, second, np.where(rows == second, first, rows))

    return _layer(one, rng, change)


def _others(one: Pass, rng: np.random.Generator) -> Planted:
    """Give a tenth of a layer's rows those of other tokens."""

    def change(rows: np.ndarray) -> np.ndarray:
        return np.where(rng.random((len(rows), 1)) < 0.1, rows[rng.integers(0, len(rows), len(rows))], rows)

    return _layer(one, rng, change)


def _before(one: Pass, rng: np.random.Generator, after: int = -1) -> Planted:
    """Copy the row before into the last row of each prompt, or into another one at `after` rows from its end."""
    ends = [start + prompt for start, prompt in zip(one.starts, one.prompts, strict=False) if prompt + after > 0]
    at = np.array(ends, np.int64) + after
    record = one.record.copy()
    record[:, at] = one.record[:, at - 1]
    return _mostly(one, record, at)


FAULTS: dict[str, tuple[str, Callable[[Pass, np.random.Generator], Planted]]] = {
    "two layers exchanged": ("layer", _two_layers),
    "each layer has the one before": ("layer", _next_layer),
    "one token late": ("shift", _late),
    "two tokens early": ("shift", partial(_late, rows=-2)),
    "one layer a token late": ("shift", _layer_late),
    "completions exchanged": ("completions", _completions),
    "prompts exchanged": ("prompts", _prompts),
    "a layer of random experts": ("no rows", _random),
    "rows shuffled": ("no rows", _shuffled),
    "last prompt row copied": ("last prompt row", _before),
    "first completion row copied": ("first completion row", partial(_before, after=0)),
    "rows stuck": ("stuck rows", _stuck),
    "a piece of another sequence": ("pieces", _piece),
    "one id wrong in a layer": ("single ids", _wrong_ids),
    "one id wrong everywhere": ("single ids", partial(_wrong_ids, everywhere=True)),
    "two ids wrong everywhere": ("single ids", partial(_wrong_ids, ids=2, everywhere=True)),
    "an expert in every row": ("single ids", _expert_everywhere),
    "a tenth of a layer random": ("some rows", partial(_random, share=0.1)),
    "a tenth of a layer of other tokens": ("some rows", _others),
    "two experts exchanged": ("labels", _labels),
}
"""For each fault the claim that is about it, and what plants it."""
