"""Measures what an asynchronous pool does between two steps, and how old what a step consumes is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from moe_rl.rollout.group_files import KeptGroup
from moe_rl.rollout.groups import Reason


def of_consumed(step: int, groups: Sequence[KeptGroup]) -> dict[str, float]:
    """Return the metrics of the groups that a step consumes. Ages are numbers of weight versions."""
    total = [step - 1 - one.oldest for one in groups]
    queued = [step - 1 - one.version for one in groups]
    pieces = [(at, piece) for one in groups for parts in one.pieces for at, piece in enumerate(parts)]
    spans = [
        (span.tokens, span.weight_version - piece.oldest_version) for _, piece in pieces for span in piece.versions
    ]
    forwarded = sum(len(one.prompt_token_ids) + len(one.token_ids) - 1 for _, one in pieces)
    versions = [
        len({span.weight_version for piece in parts for span in piece.versions})
        for one in groups
        for parts in one.pieces
    ]
    return {
        "pipeline/staleness": float(np.mean(total)),
        "pipeline/staleness_max": max(total),
        "pipeline/staleness_in_flight": float(np.mean(total) - np.mean(queued)),
        "pipeline/staleness_queued": float(np.mean(queued)),
        "pipeline/versions_mean": float(np.mean(versions)),
        "pipeline/versions_max": max(versions),
        "pipeline/kv_age": sum(tokens * age for tokens, age in spans) / max(1, sum(tokens for tokens, _ in spans)),
        "pipeline/prefilled_again": sum(len(one.prompt_token_ids) for at, one in pieces if at) / forwarded,
    }


class Usage:
    """Measures the time between two steps: how busy the servers are, what they sample, and what of it in vain.

    Attributes:
        sampled: tokens of requests that have ended since the last step.

    Args:
        clock: tells the seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._began = clock, clock()
        self._since, self._share, self._busy = self._began, 0.0, 0.0
        self.sampled, self._wasted = 0, Counter[str]()
        self._spans: list[tuple[float, float]] = []

    def busy(self, share: float) -> None:
        """Note which share of the slots has a request from now on."""
        now = self._clock()
        self._busy += (now - self._since) * self._share
        if self._share and now > self._since:
            if self._spans and self._spans[-1][1] == self._since:
                self._spans[-1] = self._spans[-1][0], now
            else:
                self._spans.append((self._since, now))
        self._since, self._share = now, share

    def waste(self, reason: str, tokens: int) -> None:
        """Note tokens that no step will train on."""
        self._wasted[reason] += tokens

    def worked(self) -> list[tuple[float, float]]:
        """Return when any slot had a request, since the last call: begins and ends, of the clock."""
        self.busy(self._share)
        spans, self._spans = self._spans, []
        return spans

    def next(self) -> dict[str, float]:
        """Return the metrics since the last step, and begin anew."""
        self.busy(self._share)
        seconds, busy, sampled, wasted = self._since - self._began, self._busy, self.sampled, self._wasted
        self._began, self._busy, self.sampled, self._wasted = self._since, 0.0, 0, Counter()
        return {
            "throughput/sampled_tokens_per_second": sampled / seconds if seconds else 0.0,
            "pipeline/sampler_idle_fraction": 1.0 - busy / seconds if seconds else 0.0,
            **{f"pipeline/wasted_tokens/{reason}": tokens for reason, tokens in wasted.items()},
        }


def of_dropped(dropped: Sequence[tuple[int, Reason]]) -> dict[str, float]:
    """Return how many groups ended without training, by reason."""
    return {f"pipeline/dropped/{reason}": count for reason, count in Counter(reason for _, reason in dropped).items()}
