"""What the loop knows of whoever samples: one engine in a child process, or vLLM servers. No vLLM, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.weights.update import WeightUpdate


class Sampler(Protocol):
    """Every call raises EngineError when the sampler is dead, hangs or refuses; it is then as it was before.

    A sampler whose weights are not whole refuses `generate` and `score` with WeightSyncError; one that sleeps refuses
    them with EngineError.
    """

    vllm_version: str

    @property
    def workers(self) -> int:
        """Processes that hold weights. Who drives several engines gives each, by `Broadcast.first_rank`, its own
        ranks."""
        ...

    @property
    def address(self) -> str:
        """The address of this host, as these processes reach it."""
        ...

    def generate(
        self, requests: Sequence[GenerateRequest], *, shard: str, enough: int | None = None
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; routes are published as trace shard `shard`.

        enough: completions that are waited for; the others are aborted and come back as far as they got.
        """
        ...

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """What each of the engines that sample makes of these runs of token ids, each of at least 2, computed anew:
        nothing comes from a prefix cache.

        shard: trace shard that gets the routes that they took; each engine of several publishes one of its own, named
        after it. None: none is recorded.
        """
        ...

    def counts(self) -> dict[str, int]:
        """What its recorders counted since they started, summed over the engines, see Recorder; {} without any."""
        ...

    def update_weights(self, update: WeightUpdate) -> None:
        """One part of an update, see `weights.update`; returns when it is loaded. May be called from another thread
        than the one that broadcasts the bytes.

        Raises WeightSyncError when any worker refuses it or workers come to hold different weights; the message says
        whether the sampler goes on with the weights it had. After the final part everything sampled carries its
        version.
        """
        ...

    def sleep(self, level: int) -> bool:
        """Give memory back: level 1, the KV cache, weights are kept on the host; level 2, both. Returns whether any
        could be given back: on a CPU none is. The sampler then refuses to sample until it is awake.

        The wake-up goes in two: `wake("weights")`, then, after level 2, a whole update, then `wake("kv_cache")`.
        """
        ...

    def wake(self, part: str) -> None:
        """Take the memory of "weights" or of "kv_cache" back. Nothing happens to what is awake."""
        ...

    def alive(self) -> bool:
        """Whether it runs and has failed no call for good."""
        ...

    def close(self) -> None:
        """End what was started for it. May be called at any time and again."""
        ...
