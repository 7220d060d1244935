"""Computes from known routes how many rows each rank's experts get, so that buffers can have a fixed, exact size.

Without known routes there are three choices: a buffer of dispatched rows for the worst case (every token goes to the
experts of one rank), a smaller buffer that drops rows, or a step that is run again. Known routes give the smallest size
that holds every row. A row is a (token, expert) pair. Padding has rows too.

Legend: S sources (ranks or data-parallel shares that dispatch to the same experts), M microbatches, L layers, E
experts, P expert-parallel ranks, n = E/P experts on each, K top-k. The module uses only NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from moe_rl.errors import describe
from moe_rl.planning.balance import Plan
from moe_rl.planning.token_layout import padded_lengths, padding_experts


@dataclass(frozen=True, slots=True)
class Budget:
    """Holds row counts, each the maximum over microbatches, layers and ranks.

    Attributes:
        rank: rows that the experts of a rank get in a layer of a microbatch.
        expert: rows that one expert gets in a layer of a microbatch.
        sent: rows that one expert gets from one source.
        microbatch: rows that the experts of a rank get in a microbatch, summed over layers.
        even: the value of `rank` if the rows of every layer were spread evenly.
        worst: the value of `rank` if every token chose as many experts of one rank as it can.
        source: rows that a source sends in a layer of a microbatch, K for each token.
    """

    rank: int = 0
    expert: int = 0
    sent: int = 0
    microbatch: int = 0
    even: int = 0
    worst: int = 0
    source: int = 0

    def expert_capacity_factor(self, experts: int) -> float:
        """Return the smallest `moe_expert_capacity_factor` for which Megatron drops no row of microbatches of `source`
        rows.

        Megatron keeps ceil(source / E * factor) rows from each source to each expert, and sends this number with
        `moe_pad_expert_input_to_capacity`. The factor is computed for half a row less, so that rounding up gives
        `sent`.
        """
        return (self.sent - 0.5) * experts / self.source if self.source else 0.0

    def rank_capacity_factor(self) -> float:
        """Return the smallest `moe_expert_rank_capacity_factor` for which Megatron drops no row of microbatches of
        `source` rows.

        Megatron holds int(source * factor) rows on each rank. The factor is computed for half a row more, so that
        rounding down gives `rank`.
        """
        return (self.rank + 0.5) / self.source if self.source else 0.0


def budget(counts_SMLE: np.ndarray, *, expert_parallel: int, top_k: int) -> Budget:
    """Compute the budget of ranks that dispatch to each other's experts from non-negative rows per expert [S, M, L, E].

    The ranks hold consecutive experts, the same number each.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """
    counts = np.asarray(counts_SMLE)
    if counts.ndim != 4 or expert_parallel < 1 or counts.shape[3] % expert_parallel:
        raise ValueError(
            describe(
                "the number of experts is not a multiple of the number of ranks",
                got=f"counts of shape {counts.shape} for {expert_parallel} ranks",
                expected="[S, M, L, E], E a multiple of the ranks",
                do="correct the caller",
                fault="division",
            )
        )
    if not counts.size:
        return Budget()
    local = counts.shape[3] // expert_parallel
    received = counts.sum(axis=0, dtype=np.int64)
    ranks = received.reshape(*received.shape[:2], expert_parallel, local).sum(axis=3)
    pairs = int(received.sum(axis=2).max())
    return Budget(
        rank=int(ranks.max()),
        expert=int(received.max()),
        sent=int(counts.max()),
        microbatch=int(ranks.sum(axis=1).max()),
        even=-(-pairs // expert_parallel),
        worst=pairs // top_k * min(top_k, local),
        source=int(counts.sum(axis=3, dtype=np.int64).max()),
    )


def most(budgets: Iterable[Budget]) -> Budget:
    """Return the element-wise maximum of several budgets."""
    budgets = list(budgets) or [Budget()]
    return Budget(*(max(getattr(one, field.name) for one in budgets) for field in fields(Budget)))


def microbatch_counts(
    plan: Plan, lengths: list[int], counts_SLE: np.ndarray, *, top_k: int, context: int, expert_parallel: int
) -> np.ndarray:
    """Return int64 [D, M, L, E]: rows for each expert from each of D data-parallel shares in each microbatch.

    Padding of microbatches is included.

    Args:
        plan: the result of `packing.pack` or `balance.pack_by_load`.
        lengths: the number of tokens of each sequence.
        counts_SLE: how often the tokens of each sequence chose each expert.
        context: the number of context-parallel ranks.
    """
    _, layers, experts = counts_SLE.shape
    result = np.zeros((len(plan), len(plan[0]), layers, experts), np.int64)
    for share, microbatches in enumerate(plan):
        for number, members in enumerate(microbatches):
            tokens = [lengths[index] for index in members]
            padding = sum(padded_lengths(tokens, context)) - sum(tokens)
            chosen = padding_experts(padding, experts, top_k, expert_parallel)
            result[share, number] = counts_SLE[members].sum(axis=0, dtype=np.int64)
            result[share, number] += np.bincount(chosen.ravel(), minlength=experts)
    return result
