"""Defines the training loop's interface to a sampler, an engine in a child process or vLLM servers. Imports neither
vLLM nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.weights.update import WeightUpdate

Hears = Callable[[int, Completion], None]
"""Called when a completion has ended, with the index of its request in the call and the completion without routes."""


def nobody(*news: object) -> None:
    """Do nothing: the default callback."""


class WeightHolder(Protocol):
    """Holds weights and scores tokens with them.

    A call raises EngineError, and changes nothing, if the sampler is dead, hangs or refuses. A sampler with incomplete
    weights refuses to sample and to score with WeightSyncError; a sleeping one with EngineError.
    """

    vllm_version: str

    @property
    def workers(self) -> int:
        """Return the number of processes that hold weights.

        With several engines, each gets its own ranks in a broadcast, starting at `Broadcast.first_rank`.
        """
        ...

    @property
    def address(self) -> str:
        """Return the address by which these processes reach this host."""
        ...

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Compute the log-probabilities of token sequences on each engine, without its prefix cache.

        Args:
            runs: token ids of each sequence, at least 2 each.
            shard: trace shard for the routes of these forward passes; with several engines, each publishes its own,
                named after this one. None: no routes are recorded.

        Returns:
            One element per engine that samples.
        """
        ...

    def counts(self) -> dict[str, int]:
        """Return the recorders' counts since they started, summed over the engines, see Recorder; {} without a
        recorder."""
        ...

    def update_weights(self, update: WeightUpdate) -> None:
        """Load one part of an update, see `weights.update`; returns when it is loaded.

        May be called from a different thread than the one that broadcasts the bytes. After the final part everything
        sampled carries its version.

        Raises:
            WeightSyncError: a worker refuses the part, or workers then hold different weights; the message says whether
                the sampler keeps its old weights.
        """
        ...

    def sleep(self, level: int) -> bool:
        """Release memory: level 1 the KV cache (weights move to the host), level 2 the KV cache and the weights.

        The sampler refuses to sample until it is awake again. Waking takes two calls: `wake("weights")`, then, after
        level 2, a whole update, then `wake("kv_cache")`.

        Returns:
            Whether memory was released; on a CPU it never is.
        """
        ...

    def wake(self, part: str) -> None:
        """Take back the memory of "weights" or "kv_cache". Does nothing if that part is awake."""
        ...

    def alive(self) -> bool:
        """Return whether the sampler runs and no call has failed for good."""
        ...

    def close(self) -> None:
        """End what was started for this sampler. May be called at any time, and repeatedly."""
        ...


class Sampler(WeightHolder, Protocol):
    """Samples completions with the weights that it holds."""

    def generate(
        self, requests: Sequence[GenerateRequest], *, shard: str, enough: int | None = None, ended: Hears = nobody
    ) -> list[Completion]:
        """Sample one completion per request, in request order, and publish the routes as trace shard `shard`.

        Args:
            requests: what to sample.
            shard: name of the new trace shard.
            enough: number of finished completions to wait for; the other requests are aborted and return the tokens so
                far.
            ended: called in this thread with each completion as soon as it ends, while others continue, but not with
                aborted ones. Called again for completions that are resampled after a lost server.
        """
        ...
