"""Counts how often a pass took or dispatched the routes of each (microbatch, layer)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe_rl.errors import About, ReplayError, first_of


@dataclass(slots=True)
class Ledger:
    """Counts for one pass. `verb` is "taken" or "dispatched", for the error message."""

    verb: str
    counts: Counter = field(default_factory=Counter)

    def count(self, microbatch: int, layer: int) -> None:
        """Count one use. Uses with and without gradients enabled are counted separately."""
        self.counts[microbatch, layer, torch.is_grad_enabled()] += 1

    def check(
        self, microbatches: Sequence[int], layers: Sequence[int], recomputed_layers: frozenset[int], where: About
    ) -> tuple[int, int]:
        """Check that each (microbatch, layer) was used once in the forward, and once more if the layer is recomputed.

        Returns:
            (counted, expected), which are equal.

        Raises:
            ReplayError: A (microbatch, layer) was used another number of times, or is not part of the pass.
        """
        known = {(microbatch, layer) for microbatch in microbatches for layer in layers}
        problems = []
        for microbatch, layer in sorted(known):
            without_grad, with_grad = self.counts[microbatch, layer, False], self.counts[microbatch, layer, True]
            # A checkpointed forward runs first without gradients, then with gradients in its recomputation.
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
                f"routes were not {self.verb} exactly once",
                where=where,
                got=first_of(problems),
                expected=f"each of {expected} exactly once",
                fault=f"not {self.verb} once",
            )
        return sum(self.counts.values()), expected
