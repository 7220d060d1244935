"""How many rows each rank's experts get, exactly, before the step: static capacities and memory without a guess.

Without known routes a buffer for dispatched rows is as large as the worst case, every token to the experts of one rank,
or it is smaller and rows that do not fit are dropped, or the step is run again. Known routes give the size that every
row fits into, and no more. A row is a (token, expert) pair; padding has rows too.

Legend: S sources, ranks or data-parallel shares that dispatch to the same experts, M microbatches, L layers, E experts,
P expert-parallel ranks, n = E/P experts on each, K top-k. Numpy alone.
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
    """Numbers of rows, each the most over microbatches, layers and ranks.

    rank: that the experts of a rank get in a layer of a microbatch. expert: that one expert gets there. sent: that one
    expert gets there from one source. microbatch: that the experts of a rank get in a microbatch, over all layers.
    even: what `rank` would be if every layer's rows were spread evenly. worst: what it would be if every token chose as
    many experts of one rank as it can. source: what a source sends in a layer of a microbatch, K rows a token.
    """

    rank: int = 0
    expert: int = 0
    sent: int = 0
    microbatch: int = 0
    even: int = 0
    worst: int = 0
    source: int = 0

    def expert_capacity_factor(self, experts: int) -> float:
        """The least for which Megatron's `moe_expert_capacity_factor` drops nothing of microbatches of `source` rows.

        It keeps ceil(source / E * factor) rows from each source to each expert, and with
        `moe_pad_expert_input_to_capacity` sends so many. Half a row less: the rounding up comes to `sent` exactly.
        """
        return (self.sent - 0.5) * experts / self.source if self.source else 0.0

    def rank_capacity_factor(self) -> float:
        """The least for which Megatron's `moe_expert_rank_capacity_factor` drops nothing of microbatches of `source`
        rows: it holds int(source * factor) rows on each rank. Half a row more: the rounding down comes to `rank`."""
        return (self.rank + 0.5) / self.source if self.source else 0.0


def budget(counts_SMLE: np.ndarray, *, expert_parallel: int, top_k: int) -> Budget:
    """The budget of ranks that dispatch to each other's experts, from rows for each expert, integers of 0 or more.

    Experts lie on the ranks in order, the same number on each. Raises ValueError when that number is not whole.
    """
    counts = np.asarray(counts_SMLE)
    if counts.ndim != 4 or expert_parallel < 1 or counts.shape[3] % expert_parallel:
        raise ValueError(
            describe(
                "experts do not divide among ranks",
                got=f"counts of shape {counts.shape} for {expert_parallel} ranks",
                expected="[S, M, L, E], E a multiple of the ranks",
                do="mend the caller",
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
    """Take the largest of each number: what holds all of them."""
    budgets = list(budgets) or [Budget()]
    return Budget(*(max(getattr(one, field.name) for one in budgets) for field in fields(Budget)))


def microbatch_counts(
    plan: Plan, lengths: list[int], counts_SLE: np.ndarray, *, top_k: int, context: int, expert_parallel: int
) -> np.ndarray:
    """int64 [D, M, L, E]: rows for each expert from each of the D data-parallel shares, in each of its microbatches.

    plan: of `packing.pack` or `balance.pack_by_load`. lengths, counts_SLE: tokens of each sequence, and how often they
    chose each expert. context: context-parallel ranks. The padding that a microbatch gets is counted with it.
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
