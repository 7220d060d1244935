"""What routers would have chosen themselves, compared with the record.

Legend: N rows that have a record, K top-k, E experts, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


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
        """Of one layer: the record and the router's own choice, int64 [N, K], and its scores [N, E]. On the device."""
        shared = (recorded[:, :, None] == native[:, None, :]).sum((1, 2))
        margin = scores.gather(1, native).amin(1) - scores.gather(1, recorded).amin(1)
        return cls(shared < recorded.shape[1], shared, margin.float())

    @classmethod
    def of_layers(cls, layers: Seq[Compared]) -> Compared:
        """Of the same rows in several layers."""
        return cls(*(torch.stack([getattr(one, name) for one in layers]) for name in ("differs", "shared", "margin")))


def totals(
    compared: Seq[Compared], layers: Seq[int], any_stage: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, object]:
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
