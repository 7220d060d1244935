"""The trainer's side of `trace.source_sum`: the sum of a sequence in each layer, on two ways that share no layout.

`expected` takes it from the routes as they were read, sequence by sequence. `RowSalts` and `applied` take it from the
rows that were fed to the model and the routing map that reached the dispatcher. Where the two differ the trainer lost a
route; where they agree, and their sum over layers and ranks is not that of the reference, it was lost before.

Legend: T tokens of one sequence, R rows that this rank's routers see, L layers, K top-k, E experts, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from moe_rl.errors import ReplayError, describe, first_of
from moe_rl.trace.source_sum import expert_salts


@lru_cache(maxsize=1024)
def _salts(layer: int, experts: int, device: torch.device) -> torch.Tensor:
    """int64 [E], one for each expert of this layer."""
    return torch.from_numpy(expert_salts(layer, experts).view(np.int64).copy()).to(device)


def expected(routes: torch.Tensor, salts: torch.Tensor, *, layers: Seq[int], experts: int) -> torch.Tensor:
    """int64 [L] of some rows of one sequence: their routes, integers [T, L, K], and salts, int64 [T]."""
    sums = [
        (_salts(layer, experts, routes.device)[routes[:, column].long()].sum(-1) * salts).sum()
        for column, layer in enumerate(layers)
    ]
    return torch.stack(sums) if sums else salts.new_empty(0)


def check_source(names: Seq[str], got: Seq[int], source: Seq[int], *, where: str, what: str, do: str) -> None:
    """Raise ReplayError when the sums of some sequences are not those that left the sampler's engine, int64 [S] both.

    names [S]: of the sequences. what: happened to the routes when they were summed up.
    """
    wrong = [name for name, one, other in zip(names, got, source, strict=True) if one != other]
    if wrong:
        raise ReplayError(
            describe(
                f"the routes {what} are not those that left the sampler's engine",
                where=where,
                got=f"other sums for {len(wrong)} of {len(names)} sequences: {first_of(wrong)}",
                expected="the source_sum of each reference",
                do=do,
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowSalts:
    """tokens int64 [R]: ids in the rows as they are fed. salts int64 [R]: of these rows. owner int64 [R]: which of the
    `owners` sequences each row belongs to. experts: in each layer."""

    tokens: torch.Tensor
    salts: torch.Tensor
    owner: torch.Tensor
    owners: int
    experts: int

    def applied(self, layer: int, routing_map: torch.Tensor, *, native: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [S] of a routing map [R, E] bool, without the rows marked in `native`, bool [R]. On the device."""
        experts = _salts(layer, self.experts, routing_map.device)
        return self._by_owner(torch.where(routing_map, experts, 0).sum(-1), native)

    def chosen(self, layer: int, routes: torch.Tensor) -> torch.Tensor:
        """int64 [S] of chosen experts, integers [R, K], for all rows."""
        return self._by_owner(_salts(layer, self.experts, routes.device)[routes.long()].sum(-1), None)

    def _by_owner(self, sums: torch.Tensor, native: torch.Tensor | None) -> torch.Tensor:
        rows = sums * self.salts
        if native is not None:
            rows = rows.masked_fill(native, 0)
        return rows.new_zeros(self.owners).index_add_(0, self.owner, rows)
