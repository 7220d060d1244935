"""What goes into a replay session and what comes out: the routes of a microbatch, and the counts of a pass.

Legend: R rows of a microbatch that this rank's routers see, K top-k, S sequences of a microbatch with the padding as
one more, layer: global decoder layer, 0-based.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_rl.replay.checksum import RowSalts


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchRoutes:
    """Routes of one packed microbatch, cut to the rows that this rank's routers see.

    names [S]: requests, and "padding". fed: of the rows as they are fed to the model. routes: {layer: integers [R, K]};
    padding rows have made-up ones. checksums: {layer: int64 [S]} of the replayed rows, from the routes as read.
    recorded: int64 [N], the rows whose recorded routes a router's own choice is compared with. native: bool [R], the
    rows that have no route to replay, where the router chooses; None: there are none. replayed_tokens, native_tokens:
    rows of either kind without the padding. stale_tokens: rows whose recorded routes older weights chose.
    """

    names: tuple[str, ...]
    fed: RowSalts
    routes: dict[int, torch.Tensor]
    checksums: dict[int, torch.Tensor]
    recorded: torch.Tensor
    native: torch.Tensor | None
    replayed_tokens: int
    native_tokens: int
    stale_tokens: int


@dataclass(slots=True)
class Tally:
    """What a finished session counted. Integers summed over this rank's microbatches.

    consumed, expected: takings of (microbatch, layer), recomputations included.
    dispatched: of (microbatch, layer) under replay, recomputations included; planned: those of them with a plan.
    applied_mismatch: (sequence, layer) pairs with a row dispatched to other experts than recorded, of applied_checked.
    native_mismatch: (token, layer) positions where the router's own top-k set differs from the recorded one, of
    native_positions; native_by_layer: the same for each layer. native_token_mismatch: tokens with at least one such
    layer, on any pipeline stage, of native_tokens. native_shared: experts that the two sets have in common, and
    native_margin: margins (see `native.Compared`), over the positions. The native counts leave padding out.
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
