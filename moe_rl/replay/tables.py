"""Defines the inputs and results of a replay pass: the routes of a microbatch, the counts of a pass, and the
comparison of the routers' own choice with the record.

Legend: R rows of a microbatch that this rank's routers see, N of these rows that have a record, K top-k, E experts, L
layers, S sequences of a microbatch with the padding as one more, layer: global decoder layer, 0-based.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import batched
from typing import Any

import torch

from moe_rl.objectives.lags import LAGS, sums_by_lag
from moe_rl.replay.checksum import RowSalts
from moe_rl.replay.row_places import RowPlaces


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchRoutes:
    """Holds the routes of one packed microbatch, cut to the rows that this rank's routers see.

    Attributes:
        names: [S], keys of the requests, and "padding".
        fed: Tokens and salts of the rows as they are fed to the model.
        places: Places of these rows in their sequences.
        routes: {layer: integers [R, K]}; padding rows have placeholder routes.
        checksums: {layer: int64 [S]}, of the rows to replay, computed from the routes as read.
        unreplayed: int64 [S], the same over all layers for the rows that have a record but are not replayed.
        source: int64 [S - padding], checksums in the route references of the requests. Over all layers, and all ranks
            that share the sequences, checksums and unreplayed add up to these. None if the routes do not come from a
            sampler.
        recorded: int64 [N], indices of the rows whose record is compared with a router's own choice.
        lags: int64 [N], how many versions the weights that routed these rows lag the trainer's.
        native: bool [R], rows without a route to replay, for which the router chooses; None if there are none.
        replayed_tokens, native_tokens: Number of replayed and of native rows, without padding.
        stale_tokens: Number of rows whose recorded routes were chosen by older weights.
    """

    names: tuple[str, ...]
    fed: RowSalts
    places: RowPlaces
    routes: dict[int, torch.Tensor]
    checksums: dict[int, torch.Tensor]
    unreplayed: torch.Tensor
    source: tuple[int, ...] | None
    recorded: torch.Tensor
    lags: torch.Tensor
    native: torch.Tensor | None
    replayed_tokens: int
    native_tokens: int
    stale_tokens: int

    @property
    def read(self) -> torch.Tensor:
        """Return the part of `source` that this rank read, in its rows and layers, int64."""
        assert self.source is not None
        return torch.stack([self.unreplayed, *self.checksums.values()]).sum(0)[: len(self.source)]


@dataclass(slots=True)
class Tally:
    """Holds what a finished pass counted: integers summed over this rank's microbatches. The native counts leave
    padding out.

    Attributes:
        consumed, expected: How often routes of a (microbatch, layer) were taken, and should be; recomputations count.
        dispatched: (microbatch, layer) dispatches under replay; recomputations count.
        planned: Those dispatches that followed a plan.
        applied_mismatch: (sequence, layer) pairs with a row that was dispatched to other experts than recorded.
        applied_checked: All (sequence, layer) pairs that were checked.
        native_mismatch: (token, layer) positions where the router's own top-k set differs from the recorded one.
        native_positions: All (token, layer) positions that were compared.
        native_by_layer: native_mismatch of each layer.
        native_by_lag: native_mismatch and native_positions of the rows of each lag, in the order of LAGS.
        native_token_mismatch: Tokens with a mismatch in at least one layer, on any pipeline stage.
        native_tokens: All tokens that were compared.
        native_shared: Experts that are in both sets, summed over the positions.
        native_margin: Margins (see `Compared`), summed over the positions.
    """

    consumed: int = 0
    expected: int = 0
    dispatched: int = 0
    planned: int = 0
    applied_mismatch: int = 0
    applied_checked: int = 0
    native_mismatch: int = 0
    native_positions: int = 0
    native_token_mismatch: int = 0
    native_tokens: int = 0
    native_shared: int = 0
    native_margin: float = 0.0
    native_by_layer: dict[int, int] = field(default_factory=dict)
    native_by_lag: tuple[tuple[float, float], ...] = ((0.0, 0.0),) * len(LAGS)

    def without_native(self) -> Tally:
        """Return the counts without those of the routers' own choice."""
        names = ("consumed", "expected", "dispatched", "planned", "applied_mismatch", "applied_checked")
        return Tally(*(getattr(self, name) for name in names))


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Compares a router's own choice of K experts with the record, for L layers and the N rows that have a
    record. For a single layer the first axis is missing.

    Attributes:
        differs: bool [L, N], whether the two sets differ.
        shared: int64 [L, N], experts in both sets, 0 to K.
        margin: float32 [L, N], the K-th best score minus the lowest score of a recorded expert. The scores are what the
            router ranks by: logits (in nats) for a softmax router, otherwise scores with the expert bias. The margin is
            0 where the sets agree, and positive where the router prefers its own choice by that much. A router that is
            limited to groups of experts may have a negative margin.
    """

    differs: torch.Tensor
    shared: torch.Tensor
    margin: torch.Tensor

    @classmethod
    def in_layer(cls, recorded: torch.Tensor, native: torch.Tensor, scores: torch.Tensor) -> Compared:
        """On the device, compare one layer's record with the router's choice, int64 [N, K], given its scores [N, E]."""
        shared = (recorded[:, :, None] == native[:, None, :]).sum((1, 2))
        best = scores.gather(1, native)
        # The last term is 0, but NaN if a score is infinite, which amin alone could hide.
        margin = best.amin(1) - scores.gather(1, recorded).amin(1) - (best - best).sum(1)
        return cls(shared < recorded.shape[1], shared, margin.float())

    @classmethod
    def over_layers(cls, layers: Seq[Compared]) -> Compared:
        """Stack several layers of the same rows."""
        return cls(
            *(torch.stack([getattr(layer, name) for layer in layers]) for name in ("differs", "shared", "margin"))
        )


def totals(compared: Seq[Compared], lags: Seq[torch.Tensor], layers: Seq[int]) -> dict[str, Any]:
    """Compute the native counts of a pass's `Tally` over all its microbatches, except native_token_mismatch.

    Args:
        lags: For each microbatch, int64 [N].
    """
    wrong, lag = torch.cat([comparison.differs for comparison in compared], 1), torch.cat([*lags])
    by_lag = torch.stack([sums_by_lag(wrong.sum(0), lag), len(layers) * sums_by_lag(torch.ones_like(lag), lag)], 1)
    shared, margin = (
        torch.cat([getattr(comparison, name) for comparison in compared], 1) for name in ("shared", "margin")
    )
    sums = (wrong.sum(1), by_lag.flatten(), shared.sum()[None], margin.double().sum()[None])
    # Read from the device at once. Counts stay exact in float64.
    *counts, summed_shared, summed_margin = torch.cat([values.double() for values in sums]).tolist()
    by_layer = list(map(int, counts[: len(layers)]))
    return {
        "native_by_layer": dict(zip(layers, by_layer, strict=True)),
        "native_by_lag": tuple(batched(counts[len(layers) :], 2)),
        "native_mismatch": sum(by_layer),
        "native_positions": wrong.numel(),
        "native_tokens": wrong.shape[1],
        "native_shared": int(summed_shared),
        "native_margin": summed_margin,
    }
