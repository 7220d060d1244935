"""Measures an asynchronous pool's work between two steps, and the age of the groups that a step consumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from moe_rl.rollout.groups import Group, Reason


def of_consumed(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of the groups that a step consumes. Ages are in weight versions."""
    total = [step - 1 - group.oldest for group in groups]
    queued = [step - 1 - group.version for group in groups]
    pieces = [piece for group in groups for parts in group.pieces for piece in parts]
    spans = [(span.tokens, span.weight_version - piece.oldest_version) for piece in pieces for span in piece.versions]
    forwarded = sum(piece.forwarded for piece in pieces)
    again = [piece for group in groups if not group.trajectories for parts in group.pieces for piece in parts[1:]]
    versions = [
        len({span.weight_version for piece in parts for span in piece.versions})
        for group in groups
        for parts in group.pieces
    ]
    return {
        "pipeline/staleness": float(np.mean(total)),
        "pipeline/staleness_max": max(total),
        "pipeline/staleness_in_flight": float(np.mean(total) - np.mean(queued)),
        "pipeline/staleness_queued": float(np.mean(queued)),
        "pipeline/versions_mean": float(np.mean(versions)),
        "pipeline/versions_max": max(versions),
        "pipeline/kv_age": sum(tokens * age for tokens, age in spans) / max(1, sum(tokens for tokens, _ in spans)),
        "pipeline/prefilled_again": sum(len(piece.prompt_token_ids) for piece in again) / forwarded,
    }


class WorkingTime:
    """Measures when and how much something works.

    Attributes:
        working: the amount working now.
        busy: the integral of `working` over time, in seconds.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._since = clock, clock()
        self.working = self.busy = 0.0
        self._spans: list[tuple[float, float]] = []

    def set(self, working: float) -> None:
        """Set the amount working from now on. 0: nothing."""
        now = self._clock()
        self.busy += (now - self._since) * self.working
        if self.working and now > self._since:
            if self._spans and self._spans[-1][1] == self._since:
                self._spans[-1] = self._spans[-1][0], now
            else:
                self._spans.append((self._since, now))
        self._since, self.working = now, working

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Add one to `working` while the context is open."""
        self.set(self.working + 1)
        try:
            yield
        finally:
            self.set(self.working - 1)

    def spans(self) -> list[tuple[float, float]]:
        """Return the spans since the last call in which anything worked: begin and end on the clock."""
        self.set(self.working)
        spans, self._spans = self._spans, []
        return spans


class Usage:
    """Measures the time between two steps: how busy servers and verifiers are, and the tokens sampled and wasted.

    Attributes:
        slots: the share of the servers' slots in use.
        judging: the number of groups being judged.
        sampled: tokens of requests that have ended since the last step.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._began = clock, clock()
        self.slots, self.judging = WorkingTime(clock), WorkingTime(clock)
        self.sampled, self._wasted = 0, Counter[str]()

    def waste(self, reason: str, tokens: int) -> None:
        """Note tokens that no step will train on."""
        self._wasted[reason] += tokens

    def worked(self) -> list[tuple[str, float, float]]:
        """Return the parts of a step that ran since the last call, with begin and end on the clock."""
        parts = {"sample": self.slots, "reward": self.judging}
        return [(name, begin, end) for name, work in parts.items() for begin, end in work.spans()]

    def next(self) -> dict[str, float]:
        """Return the metrics since the last step, and reset them."""
        self.slots.set(self.slots.working)
        now, busy, sampled, wasted = self._clock(), self.slots.busy, self.sampled, self._wasted
        seconds = now - self._began
        self._began, self.slots.busy, self.sampled, self._wasted = now, 0.0, 0, Counter()
        return {
            "throughput/sampled_tokens_per_second": sampled / seconds if seconds else 0.0,
            "pipeline/sampler_idle_fraction": 1.0 - busy / seconds if seconds else 0.0,
            **{f"pipeline/wasted_tokens/{reason}": tokens for reason, tokens in wasted.items()},
        }


def of_dropped(dropped: Sequence[tuple[int, Reason]]) -> dict[str, float]:
    """Return how many groups ended without training, by reason."""
    return {f"pipeline/dropped/{reason}": count for reason, count in Counter(reason for _, reason in dropped).items()}
