"""Refuses routes that no router made: well-formed sets that a buffer holds when nothing, or the wrong thing, was
written to it.

The rules need no look at the model, so each is safe for any router, a collapsed one too. A router may send every token
of a sequence to the same experts: that a layer never varies is no fault by itself. Whether it should have varied is
told by the trainer's own choice (replay/alignment.py), and by the logits that the sampler's routers saw
(vllm/extras.py).

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moe_rl.errors import RouteValidationError, describe

# Rows from which on a record says something about its routers.
_ROWS = 8
# One in so many models, or less, would be refused wrongly for two equal layers.
_CHANCE = 1e-6
# A layer that is constant is refused for the sets of an unwritten buffer, where there are so many others.
_SETS = 1000
# Bits by which rows that are equal in all layers must be unlikely.
_BITS = 40
# Different rows beside them.
_OTHERS = 4
_LOOK = "look at the recorder: a buffer was handed over that was not written, or not for these tokens"


def check_variety(
    routes: np.ndarray, token_ids: np.ndarray, *, num_experts: int, layers: Sequence[int], where: str
) -> None:
    """Refuse routes [T, L, K] that do not vary as the routers of a model do. token_ids [T]: what they are routes of.

    layers [L]: global numbers. where: whose they are. Nothing is refused of fewer than 8 rows, of one token repeated,
    and of routers that take all experts. Raises RouteValidationError, naming layers and tokens, for

    - every token the same in all layers, or every layer the same for all tokens;
    - two layers that are equal in all rows. The experts of a layer have their numbers from the model's initialisation;
      with those of one of the two drawn anew, the chance that its sets become those of the other is the product of
      a! / E! over the classes of a experts that no set tells apart. Refused is what is less likely than one in a
      million over all pairs: at 4 of 32 experts that takes three different sets, so that two layers which both
      collapsed to one set are not refused;
    - a layer that sends 8 different tokens, and all others, to the K first or the K last experts: what a top-k of
      equal numbers gives. A router that has collapsed to one set collapses to one of these two in 2 of C(E, K) cases;
      with fewer than 1000 sets nothing is refused;
    - consecutive rows with d different tokens that are equal in all layers, and that are seen nowhere else among at
      least 4 different rows, with (d - 1) x layers that vary of at least 40 and d of at least 4. Where neighbours of
      different tokens share all K experts of a layer half of the time that is a chance of 2^-40 for each place; the
      demo's do in 1 to 5% of cases by layer, and never in all 8. Layers that collapsed to the same few classes of
      tokens are not as many witnesses: their rows come again elsewhere, or are fewer than 4.
    """
    rows, columns, top_k = routes.shape
    if rows < _ROWS or top_k == num_experts or not columns or (token_ids == token_ids[0]).all():
        return
    constant = (routes == routes[:1]).all((0, 2))
    if constant.all():
        raise _refusal("routes are the same for every token, which no router does", where, routes[0, 0].tolist(), 0)
    if columns > 1 and (routes == routes[:, :1]).all():
        raise _refusal("routes are the same for every layer, which no router does", where, routes[0, 0].tolist(), 0)
    _check_layers(routes, num_experts, layers, where)
    if constant.any():
        _check_unwritten(routes, token_ids, np.flatnonzero(constant), num_experts, layers, where)
    _check_stuck(routes, token_ids, columns - int(constant.sum()), where)


def _check_layers(routes: np.ndarray, num_experts: int, layers: Sequence[int], where: str) -> None:
    rows, columns, top_k = routes.shape
    # Layers that are equal are equal in their first rows: few bytes decide that there are none.
    first: dict[bytes, list[int]] = {}
    for column in range(columns):
        first.setdefault(routes[:_ROWS, column].tobytes(), []).append(column)
    for alike in first.values():
        for at, one in enumerate(alike):
            for other in alike[at + 1 :]:
                if not (routes[:, one] == routes[:, other]).all():
                    continue
                chosen = np.zeros((rows, num_experts), bool)
                np.put_along_axis(chosen, routes[:, one].astype(np.int64), True, 1)
                _, classes = np.unique(chosen, axis=1, return_counts=True)
                log = sum(math.lgamma(size + 1) for size in classes) - math.lgamma(num_experts + 1)
                if log + math.log(columns * (columns - 1) / 2) < math.log(_CHANCE):
                    sets = len(np.unique(chosen, axis=0))
                    raise RouteValidationError(
                        describe(
                            "two layers have the same routes for every token, which no model does",
                            where=f"{where}, layers {layers[one]} and {layers[other]}",
                            got=f"{rows} equal rows with {sets} different sets, {routes[0, one].tolist()} in token 0",
                            expected="each layer's own choice",
                            do="look at the recorder: the rows of one layer were written to both columns",
                        )
                    )


def _check_unwritten(
    routes: np.ndarray, token_ids: np.ndarray, constant: np.ndarray, num_experts: int, layers: Sequence[int], where: str
) -> None:
    top_k = routes.shape[2]
    if math.comb(num_experts, top_k) < _SETS or len(np.unique(token_ids)) < _ROWS:
        return
    for column in constant.tolist():
        chosen = np.sort(routes[0, column]).tolist()
        if chosen in (list(range(top_k)), list(range(num_experts - top_k, num_experts))):
            what = f"layer {layers[column]} has the same routes for every token, those of equal scores"
            raise _refusal(what, where, chosen, 0)


def _check_stuck(routes: np.ndarray, token_ids: np.ndarray, layers: int, where: str) -> None:
    flat = routes.reshape(len(routes), -1)
    same = (flat[1:] == flat[:-1]).all(1)
    needed = max(4, 1 + math.ceil(_BITS / layers))
    if int(same.sum()) + 1 < needed:
        return
    # Rows 0 .. T-1 in runs of equal ones: a new one begins where a row is not as the one before.
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    for start, end in zip(starts, [*starts[1:], len(routes)], strict=True):
        if end - start < needed:
            continue
        elsewhere = np.concatenate([flat[:start], flat[end:]])
        if (elsewhere == flat[start]).all(1).any() or len(np.unique(elsewhere, axis=0)) < _OTHERS:
            continue
        if (different := len(np.unique(token_ids[start:end]))) >= needed:
            raise _refusal(
                f"rows do not change in any layer though the tokens do: tokens {start} to {end - 1}, "
                f"{different} different ones",
                where,
                routes[start, 0].tolist(),
                start,
            )


def _refusal(what: str, where: str, ids: list[int], token: int) -> RouteValidationError:
    return RouteValidationError(describe(what, where=where, got=f"{ids} in token {token}", do=_LOOK))
