"""The ledger of a pass: how often each (microbatch, layer) was taken or dispatched, which must be exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe_rl.errors import ReplayError, describe, first_of


@dataclass(slots=True)
class Ledger:
    """Counts of one kind in one pass. verb: "taken" or "dispatched", for the message."""

    verb: str
    counts: Counter = field(default_factory=Counter)

    def count(self, microbatch: int, layer: int) -> None:
        """Once more, with or without gradients as they are enabled now."""
        self.counts[microbatch, layer, torch.is_grad_enabled()] += 1

    def check(
        self, microbatches: Sequence[int], layers: Sequence[int], recomputed_layers: frozenset[int], where: str
    ) -> tuple[int, int]:
        """(counted, expected), which are equal: once forward, and once more where a layer is recomputed.

        Raises ReplayError when any (microbatch, layer) was counted otherwise, or one that is not of the pass.
        """
        known = {(microbatch, layer) for microbatch in microbatches for layer in layers}
        problems = []
        for microbatch, layer in sorted(known):
            without_grad, with_grad = self.counts[microbatch, layer, False], self.counts[microbatch, layer, True]
            # A checkpointed forward runs without gradients first and with them when it is recomputed.
            if layer in recomputed_layers:
                got = {"forward": without_grad, "recompute": with_grad}
            else:
                got = {"forward": without_grad + with_grad}
            key = f"microbatch {microbatch} layer {layer}"
            problems += [f"{key} {phase} {n} times" for phase, n in got.items() if n != 1]
        problems += [
            f"microbatch {m} layer {layer} not of this pass" for m, layer, _ in self.counts if (m, layer) not in known
        ]
        expected = len(known) + sum(layer in recomputed_layers for _, layer in known)
        if problems:
            raise ReplayError(
                describe(
                    f"routes were not {self.verb} exactly once",
                    where=where,
                    got=first_of(problems),
                    expected=f"each of {expected} once",
                )
            )
        return sum(self.counts.values()), expected
