"""One number for all the experts that a sequence's tokens went to in a layer, on two ways that share no layout.

The sum over a sequence's rows of  salt(request, position, token) * sum over the row's experts of  salt(layer, expert),
modulo 2**64. `expected` takes it from the routes as they were read, sequence by sequence. `RowSalts` and `applied` take
it from the rows that were fed to the model and the routing map that reached the dispatcher. A row of another position,
token, request or layer, a missing expert or a foreign one changes it; two errors cancel by chance once in about 2**63.

Legend: T tokens of one sequence, R rows that this rank's routers see, L layers, K top-k, E experts, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import xxhash

_ODD = np.uint64(0x9E3779B97F4A7C15)


def row_salts(key: str, token_ids: np.ndarray) -> np.ndarray:
    """Odd int64 [T], one for each forwarded token of the request, by position and token id."""
    request = np.uint64(xxhash.xxh3_64_intdigest(key.encode()))
    with np.errstate(over="ignore"):
        position = _mixed(np.arange(len(token_ids), dtype=np.uint64) + request)
        return (_mixed(position ^ np.asarray(token_ids).astype(np.uint64)) | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=1024)
def expert_salts(layer: int, experts: int, device: torch.device) -> torch.Tensor:
    """int64 [E], one for each expert of this layer."""
    with np.errstate(over="ignore"):
        salts = _mixed(np.arange(experts, dtype=np.uint64) + (np.uint64(layer + 1) << np.uint64(32)))
    return torch.from_numpy(salts.view(np.int64)).to(device)


def expected(routes: torch.Tensor, salts: torch.Tensor, *, layers: Seq[int], experts: int) -> torch.Tensor:
    """int64 [L] of some rows of one sequence: their routes, integers [T, L, K], and salts, int64 [T]."""
    sums = [
        (expert_salts(layer, experts, routes.device)[routes[:, column].long()].sum(-1) * salts).sum()
        for column, layer in enumerate(layers)
    ]
    return torch.stack(sums) if sums else salts.new_empty(0)


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
        experts = expert_salts(layer, self.experts, routing_map.device)
        return self._by_owner(torch.where(routing_map, experts, 0).sum(-1), native)

    def chosen(self, layer: int, routes: torch.Tensor) -> torch.Tensor:
        """int64 [S] of chosen experts, integers [R, K], for all rows."""
        return self._by_owner(expert_salts(layer, self.experts, routes.device)[routes.long()].sum(-1), None)

    def _by_owner(self, sums: torch.Tensor, native: torch.Tensor | None) -> torch.Tensor:
        rows = sums * self.salts
        if native is not None:
            rows = rows.masked_fill(native, 0)
        return rows.new_zeros(self.owners).index_add_(0, self.owner, rows)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of a uint64 spread over all of them (the finaliser of splitmix64, Steele et al. 2014)."""
    values = values + _ODD
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
