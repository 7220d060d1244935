"""Tests whether the record of each layer belongs to that layer and to its own tokens: the claims "layer" and "shift".

Legend: S sampled rows, L layers, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.objectives.device import to_device
from moe_rl.replay.claims import Bets, log_e, no_noise
from moe_rl.replay.regret import Regret, RowsSeen
from moe_rl.replay.row_places import RowPlaces

_SHIFTS = (0, -2, -1, 1, 2)
# A layer with this mean regret is refused without statistics: its record is little better than random experts. At
# lag 0 the largest mean regret seen in a healthy pass is 0.55.
_RANDOM = 0.75
_LEAST_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class LayerSample:
    """Holds the sampled rows in all layers. Neighbours in a sequence are neighbours here.

    Attributes:
        ids: int64 [L, S, K], the recorded experts.
        regret: [L, S, E], the regret of each expert.
        sequence, position, context: [S], in host memory; see `PassRows`.
    """

    ids: Tensor
    regret: Tensor
    sequence: np.ndarray
    position: np.ndarray
    context: np.ndarray

    @classmethod
    def of(cls, seen: RowsSeen) -> LayerSample:
        """Take the sampled rows of a pass."""
        rows, sample = seen.watched.rows, seen.watched.sample
        fine = seen.on_device(np.searchsorted(seen.watched.fine, sample))
        where = (rows.sequence[sample], rows.position[sample], rows.context[sample])
        return cls(seen.fine.ids[:, fine], seen.fine.regret.pick(fine).each(), *where)

    @classmethod
    def of_choice(cls, ids: np.ndarray, choice: np.ndarray, experts: int, places: RowPlaces) -> LayerSample:
        """Take all rows of `places`, with the routers' choice alone: all other experts score alike.

        Args:
            ids, choice: int64 [L, S, K].
        """
        layers, rows, _ = ids.shape
        scores = torch.zeros(layers, rows, experts).scatter_(2, torch.from_numpy(choice), 1.0)
        alone = Regret.of(torch.from_numpy(choice), scores).each()
        return cls(torch.from_numpy(ids), alone, places.sequence, places.position, places.context)


def layer_tests(sample: LayerSample, layers: Seq[int], *, fresh: bool) -> tuple[Bets, Bets]:
    """Make the tests of the claims "layer" and "shift".

    For each row, the regret of layer i's record on layer j, some tokens earlier or later, is compared with its regret
    at its own place. From each, the regret on an unrelated row of the same layer is subtracted, so that a layer's
    constant preference does not count.

    Args:
        layers: [L], global layer numbers.
        fresh: No row was routed by older weights.
    """
    count = len(layers)
    _, first = np.unique(sample.context, return_index=True)  # rows with the same context count once
    kept = np.sort(first)
    unrelated = np.roll(kept, len(kept) // 2 + 1)
    ids, regret = sample.ids.transpose(0, 1), sample.regret.transpose(0, 1)  # [S, L, ...]
    device = ids.device
    recorded = regret.new_zeros(len(kept), count, regret.shape[2])
    recorded.scatter_(2, ids[to_device(kept, device)], 1.0 / ids.shape[2])

    shifts = np.array(_SHIFTS)
    there = np.clip(kept[:, None] - shifts, 0, len(sample.position) - 1)  # [S, shifts]
    same = sample.sequence[there] == sample.sequence[kept][:, None]
    near = to_device(same & (sample.position[kept][:, None] - sample.position[there] == shifts), device)[
        :, None, :, None
    ]
    rows = to_device(np.column_stack((unrelated, there)), device)
    fit = torch.bmm(recorded, regret[rows].flatten(1, 2).transpose(1, 2)).clamp_(0, 1).view(len(kept), count, -1, count)
    away, other = fit[:, :, 0], fit[:, :, 1:]  # [S, L record, L witness], [S, L record, shifts, L witness]
    here = other[:, :, 0]
    own_gain = (away - here).diagonal(dim1=1, dim2=2)  # [S, L]
    x = no_noise(own_gain[:, :, None, None] - away[:, :, None] + other) * near
    # The record of (j, t - shift) on layer i mirrors that of (i, t) on layer j.
    e, planted = log_e(torch.stack((x, -x), 1)).transpose(1, 2)  # [shifts, L record, L witness]
    mean = ((other * near).sum(0) / near.sum(0).clamp(min=1)).transpose(0, 1)
    own_mean = here.mean(0)
    # Rows from another place fit it no worse than where they are. An almost constant record gains nothing on its own
    # rows, and by chance may gain on others, which it fits far worse.
    gap = mean - own_mean.diagonal()[:, None]
    e, planted = torch.where(gap > 0, e.clamp(max=0), e), torch.where(gap < 0, planted.clamp(max=0), planted)
    limit = fresh and len(kept) >= _LEAST_ROWS
    rest = ~torch.eye(count, dtype=torch.bool, device=device)

    # The record of layer j on layer i is refused without statistics where it is as bad as random experts.
    # With a single layer, unrelated rows stand for the records of other layers.
    foreign = own_mean.T if count > 1 else away.mean(0)
    blatant = torch.where((foreign >= _RANDOM) & limit, math.inf, -math.inf)
    places = rest if count > 1 else ~rest
    among = e.masked_fill(~rest, -math.inf).permute(1, 0, 2).reshape(count, -1)
    largest, choice = among.max(1)
    bad = torch.where((own_mean.diagonal() >= _RANDOM) & limit, math.inf, -math.inf)

    def other_layer(i: int) -> str:
        own_regret = f"{float(own_mean[i, i]):.2f} with its own"
        if not largest[i] > 0:
            return f"layer {layers[i]} has rows that match nothing that was tried: regret {own_regret}"
        shift, j = divmod(int(choice[i]), count)
        whose = f"the rows of layer {layers[j]}{_late(_SHIFTS[shift])}"
        return f"layer {layers[i]} has {whose}: regret {float(mean[shift, i, j]):.2f}, {own_regret}"

    by_layer = Bets(
        "layer",
        torch.maximum(largest, bad),
        torch.maximum(planted, blatant)[:, places].flatten(),
        other_layer,
        len(_SHIFTS) * count * count,
    )

    def other_token(i: int) -> str:
        shift, layer = divmod(i, count)
        regret = f"regret {float(mean[shift + 1, layer, layer]):.2f}, {float(own_mean[layer, layer]):.2f} with its own"
        return f"layer {layers[layer]} has rows{_late(_SHIFTS[shift + 1])}: {regret}"

    shifted, shifted_planted = (values[1:].diagonal(dim1=1, dim2=2).flatten() for values in (e, planted))
    return by_layer, Bets("shift", shifted, shifted_planted, other_token, (len(_SHIFTS) - 1) * count)


def _late(shift: int) -> str:
    if not shift:
        return ""
    return f" {abs(shift)} token{'s' if abs(shift) > 1 else ''} too {'late' if shift > 0 else 'early'}"
