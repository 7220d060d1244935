"""Computes the trainer's route checksums, as `trace.source_sum` defines them, in two ways that share no memory layout.

`expected` sums the routes as they were read, with the key and the tokens of their own sequence. `RowSalts.applied` sums
the rows that were fed to the model, with the routing map that reached the dispatcher. If the two differ, the trainer
lost a route. If they agree, but their total over layers and ranks differs from the sum in the route reference, the
route was lost before.

Legend: R rows that this rank's routers see, L layers, K top-k, E experts, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from moe_rl.errors import About, ReplayError, first_of
from moe_rl.objectives.device import to_device
from moe_rl.trace.source_sum import expert_salts


@lru_cache(maxsize=1024)
def _salts(layer: int, experts: int, device: torch.device) -> torch.Tensor:
    """Return one salt for each expert of this layer, int64 [E]."""
    return to_device(expert_salts(layer, experts).view(np.int64).copy(), device)


@lru_cache(maxsize=64)
def _salt_table(layers: tuple[int, ...], experts: int, device: torch.device) -> torch.Tensor:
    """Return the salts of several layers end to end, int64 [L * E]."""
    return torch.cat([_salts(layer, experts, device) for layer in layers])


def expected(
    routes: torch.Tensor, salts: torch.Tensor, owner: torch.Tensor, owners: int, *, layers: Seq[int], experts: int
) -> torch.Tensor:
    """Return the checksums int64 [S, L] of some rows of several sequences.

    The number of operations depends neither on the sequences nor on the layers.

    Args:
        routes: integers [R, L, K], the rows of one sequence after the other.
        salts: int64 [R].
        owner: int64 [R], the sequence that each row belongs to.
        owners: Number of sequences.
    """
    table, (layer_count, top_k) = _salt_table(tuple(layers), experts, routes.device), routes.shape[1:]
    # Use one type and sum all inner axes at once: on a CPU, mixed types or a narrow axis are several times slower.
    first = experts * torch.arange(layer_count, dtype=torch.int32, device=routes.device)
    indices = routes.int() + first[:, None].expand(layer_count, top_k).contiguous()
    sums = table.index_select(0, indices.flatten()).view(indices.shape).sum(-1)
    return sums.new_zeros(owners, layer_count).index_add_(0, owner, sums * salts[:, None])


def check_source(names: Seq[str], got: Seq[int], source: Seq[int], *, where: About, what: str, do: str) -> None:
    """Raise ReplayError if the sums of some sequences differ from those that left the sampler's engine.

    Args:
        names: [S], the sequences.
        got, source: int64 [S], the sums here and in the route references.
        what: State of the routes when they were summed, "read" or "dispatched".
    """
    wrong = [name for name, checksum, other in zip(names, got, source, strict=True) if checksum != other]
    if wrong:
        routes = "as they were read" if what == "read" else what
        raise ReplayError(
            f"the routes {routes} are not those that left the sampler's engine",
            where=where,
            got=f"other sums for {len(wrong)} of {len(names)} sequences: {first_of(wrong)}",
            expected="the source_sum of each reference",
            do=do,
            fault=what,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowSalts:
    """Salts of the rows of a microbatch, to compute checksums of dispatched routes.

    Attributes:
        tokens: int64 [R], token ids as fed to the model.
        salts: int64 [R].
        owner: int64 [R], the sequence that each row belongs to.
        owners: Number of sequences.
        experts: Number of experts in each layer.
    """

    tokens: torch.Tensor
    salts: torch.Tensor
    owner: torch.Tensor
    owners: int
    experts: int

    def applied(self, layer: int, routing_map: torch.Tensor, *, native: torch.Tensor | None = None) -> torch.Tensor:
        """Return the checksums int64 [S] of a routing map, on the device.

        Args:
            routing_map: bool [R, E].
            native: bool [R], rows to leave out.
        """
        experts = _salts(layer, self.experts, routing_map.device)
        return self._by_owner(torch.where(routing_map, experts, 0).sum(-1), native)

    def chosen(self, layer: int, routes: torch.Tensor) -> torch.Tensor:
        """Return the checksums int64 [S] of the chosen experts, integers [R, K], over all rows."""
        return self._by_owner(_salts(layer, self.experts, routes.device)[routes.long()].sum(-1), None)

    def _by_owner(self, sums: torch.Tensor, native: torch.Tensor | None) -> torch.Tensor:
        rows = sums * self.salts
        if native is not None:
            rows = rows.masked_fill(native, 0)
        return rows.new_zeros(self.owners).index_add_(0, self.owner, rows)
