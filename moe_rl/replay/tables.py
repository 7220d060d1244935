"""What goes into a replay session and what comes out: the routes of a microbatch, the counts of a pass, and what
routers would have chosen themselves, compared with the record.

Legend: R rows of a microbatch that this rank's routers see, N those of them that have a record, K top-k, E experts,
L layers, S sequences of a microbatch with the padding as one more, layer: global decoder layer, 0-based.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_rl.replay.checksum import RowSalts
from moe_rl.replay.row_places import RowPlaces


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchRoutes:
    """Routes of one packed microbatch, cut to the rows that this rank's routers see.

    names [S]: requests, and "padding". fed: of the rows as they are fed to the model. places: where these lie. routes:
    {layer: integers [R, K]}; padding rows have made-up ones. checksums: {layer: int64 [S]} of the replayed rows, from
    the routes as read. unreplayed: int64 [S] of the rows that have a record and yet no route to replay, over the
    layers, as read. source: sums of the requests, int64, as their references have them: over all layers and all ranks
    that share the sequences, checksums and unreplayed add up to them. None: the routes are not a sampler's.
    recorded: int64 [N], the rows whose recorded routes a router's own choice is compared with. native: bool [R], the
    rows that have no route to replay, where the router chooses; None: there are none. replayed_tokens, native_tokens:
    rows of either kind without the padding. stale_tokens: rows whose recorded routes older weights chose.
    """

    names: tuple[str, ...]
    fed: RowSalts
    places: RowPlaces
    routes: dict[int, torch.Tensor]
    checksums: dict[int, torch.Tensor]
    unreplayed: torch.Tensor
    source: tuple[int, ...] | None
    recorded: torch.Tensor
    native: torch.Tensor | None
    replayed_tokens: int
    native_tokens: int
    stale_tokens: int

    @property
    def read(self) -> torch.Tensor:
        """int64, as `source`: the share of it that this rank read, in its rows and layers."""
        assert self.source is not None
        return torch.stack([self.unreplayed, *self.checksums.values()]).sum(0)[: len(self.source)]


@dataclass(slots=True)
class Tally:
    """What a finished session counted. Integers summed over this rank's microbatches.

    consumed, expected: takings of (microbatch, layer), recomputations included.
    dispatched: of (microbatch, layer) under replay, recomputations included; planned: those of them with a plan.
    applied_mismatch: (sequence, layer) pairs with a row dispatched to other experts than recorded, of applied_checked.
    native_mismatch: (token, layer) positions where the router's own top-k set differs from the recorded one, of
    native_positions; native_by_layer: the same for each layer. native_token_mismatch: tokens with at least one such
    layer, on any pipeline stage, of native_tokens. native_shared: experts that the two sets have in common, and
    native_margin: margins (see `Compared`), over the positions. The native counts leave padding out.
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


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """A router's own choice of K experts against the record, for L layers and the N rows that have a record; of one
    layer: without the first axis.

    differs: bool [L, N], whether the sets are not the same. shared: int64 [L, N], experts in both, 0 to K.
    margin: float32 [L, N], the K-th best score less the least score of a recorded expert, in what the router ranks by:
    nats for the logits of a softmax router, else scores with the expert bias. 0 where the sets agree, above 0 where
    they do not, by so much as the router prefers its own; a router limited to groups of experts may go below 0.
    """

    differs: torch.Tensor
    shared: torch.Tensor
    margin: torch.Tensor

    @classmethod
    def of(cls, recorded: torch.Tensor, native: torch.Tensor, scores: torch.Tensor) -> Compared:
        """Compare one layer: the record, the router's choice, int64 [N, K], and its scores [N, E]. On the device."""
        shared = (recorded[:, :, None] == native[:, None, :]).sum((1, 2))
        best = scores.gather(1, native)
        # The last term is 0, or NaN where a score is infinite, which amin would pass over.
        margin = best.amin(1) - scores.gather(1, recorded).amin(1) - (best - best).sum(1)
        return cls(shared < recorded.shape[1], shared, margin.float())

    @classmethod
    def of_layers(cls, layers: Seq[Compared]) -> Compared:
        """Put several layers of the same rows together."""
        return cls(*(torch.stack([getattr(one, name) for one in layers]) for name in ("differs", "shared", "margin")))


def totals(
    compared: Seq[Compared], layers: Seq[int], any_stage: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """What a session's `Tally` has of all its microbatches, in these layers. any_stage: as in `ReplaySession`."""
    wrong = torch.cat([one.differs for one in compared], 1)
    by_layer = wrong.sum(1).tolist()
    return {
        "native_by_layer": dict(zip(layers, by_layer, strict=True)),
        "native_mismatch": sum(by_layer),
        "native_positions": wrong.numel(),
        "native_token_mismatch": int(any_stage(wrong.any(0)).sum()),
        "native_tokens": wrong.shape[1],
        "native_shared": sum(int(one.shared.sum()) for one in compared),
        "native_margin": sum(float(one.margin.double().sum()) for one in compared),
    }
