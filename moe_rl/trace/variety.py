"""Refuses well-formed routes that no router produced: the content of a buffer not written, or written wrongly.

The rules do not look at the model, so each is safe for any router, even a collapsed one. A router may send all tokens
of a sequence to the same experts, so a layer that never varies is not a fault by itself. Two other checks tell whether
it should have varied: the trainer's own choice (replay/alignment.py), and the logits of the sampler's routers
(vllm/extras.py).

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moe_rl.errors import About, RouteValidationError

# Shorter records say too little about their routers.
_ROWS = 8
# Two equal layers are refused if at most one model in a million would have them by chance.
_CHANCE = 1e-6
# Constant layers are refused only if there are at least this many possible sets: routers with a strong bias and few
# experts do collapse.
_SETS = 1000
# A router that collapsed to one set has the first or the last K experts in 2 of C(E, K) cases.
_SETS_WITH_ENDS = 10_000
# This many layers do not all collapse at once.
_LAYERS = 4
# The equal routes of all tokens name at least this many ids: with fewer, biased routers do collapse.
_IDS = 16
_LOOK = "look at the recorder: a buffer was handed over that was not written, or not for these tokens"


def check_variety(
    routes: np.ndarray, token_ids: np.ndarray, *, num_experts: int, layers: Sequence[int], where: About
) -> None:
    """Refuse routes [T, L, K] that do not vary as a model's routers vary. token_ids [T] are their tokens.

    layers [L] are global numbers; `where` names the sequence. Nothing is refused for fewer than 8 rows, one repeated
    token, or routers that use all experts. Raises RouteValidationError, with layers and tokens, for

    - every token, at least 8 of them different, having the same routes in all layers, or every layer having the same
      routes for all tokens, with at least 4 layers, for equal tokens with at least 16 ids in a row and 1000 possible
      sets: routers of few layers or experts may collapse at once, and a few tokens in turn may all have the same
      routes;
    - two layers that are equal in all rows. A layer's experts are numbered by the model's random initialisation. If one
      of the two layers were renumbered at random, its sets would equal the other's with a probability that is the
      product of a! / E! over the classes of a experts that no set tells apart. The layers are refused if that
      probability, over all pairs, is below one in a million. For 4 of 32 experts this takes three different sets, so
      two layers that both collapsed to one set are not refused;
    - a layer that sends all tokens, at least 8 of them different, to the first or the last K experts, as a top-k of
      equal numbers does. A router that collapsed to one set has one of these two in 2 of C(E, K) cases. So nothing is
      refused with fewer than 10,000 possible sets, or if another layer sends all tokens to another set: then the
      model's routers do collapse.
    """
    rows, columns, top_k = routes.shape
    if rows < _ROWS or top_k == num_experts or not columns or (token_ids == token_ids[0]).all():
        return
    constant = (routes == routes[:1]).all((0, 2))
    varied = math.comb(num_experts, top_k) >= _SETS and len(np.unique(token_ids)) >= _ROWS
    if constant.all() and varied and columns >= _LAYERS and columns * top_k >= _IDS:
        raise _refusal("routes are the same for every token, which no router does", where, routes[0, 0], "equal tokens")
    if columns >= _LAYERS and (routes == routes[:, :1]).all():
        raise _refusal("routes are the same for every layer, which no router does", where, routes[0, 0], "equal layers")
    _check_layers(routes, num_experts, layers, where)
    ends, flat = (list(range(top_k)), list(range(num_experts - top_k, num_experts))), np.flatnonzero(constant)
    rare = varied and math.comb(num_experts, top_k) >= _SETS_WITH_ENDS
    if rare and len(flat) and all(ids in ends for ids in np.sort(routes[0, flat]).tolist()):
        what = "a layer has the same routes for every token, those of equal scores"
        raise _refusal(what, {**where, "layer": layers[flat[0]]}, np.sort(routes[0, flat[0]]), "equal scores")


def _check_layers(routes: np.ndarray, num_experts: int, layers: Sequence[int], where: About) -> None:
    rows, columns, top_k = routes.shape
    # Equal layers are equal in their first rows, so comparing a few bytes usually suffices.
    first: dict[bytes, list[int]] = {}
    for column in range(columns):
        first.setdefault(routes[:_ROWS, column].tobytes(), []).append(column)
    for alike in first.values():
        for index, column in enumerate(alike):
            for other in alike[index + 1 :]:
                if not (routes[:, column] == routes[:, other]).all():
                    continue
                chosen = np.zeros((rows, num_experts), bool)
                np.put_along_axis(chosen, routes[:, column].astype(np.int64), True, 1)
                _, classes = np.unique(chosen, axis=1, return_counts=True)
                log = sum(math.lgamma(size + 1) for size in classes) - math.lgamma(num_experts + 1)
                if log + math.log(columns * (columns - 1) / 2) < math.log(_CHANCE):
                    sets = len(np.unique(chosen, axis=0))
                    raise RouteValidationError(
                        "two layers have the same routes for every token, which no model does",
                        where={**where, "layers": f"{layers[column]} and {layers[other]}"},
                        got=f"{rows} equal rows with {sets} different sets, {routes[0, column].tolist()} in token 0",
                        expected="each layer's own choice",
                        do="look at the recorder: the rows of one layer were written to both columns",
                        fault="equal pair",
                    )


def _refusal(what: str, where: About, ids: np.ndarray, fault: str) -> RouteValidationError:
    return RouteValidationError(what, where=where, got=f"{ids.tolist()} in token 0", do=_LOOK, fault=fault)
