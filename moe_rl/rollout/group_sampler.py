"""Samples groups of completions concurrently, and takes new weights while they run.

    places          servers, or the one engine; each samples several groups at once
    sample_group    one group at one place, as its own trace shard
    pause           every place confirms that it runs no forward pass; requests keep their place and KV cache
    take_weights    sends the weights only after that; at the end compares digests and versions
    resume          every place continues all its requests

A request that had sampled tokens before the update continues with the keys and values of the older weights, and its
completion records which weights sampled which tokens. Cached prefixes are shared only within one version.
Alternatively, set `leave` before the pause: the group returns with its tokens so far, and its completions continue as
new requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from moe_rl.errors import EngineError
from moe_rl.messages import Message
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import nobody
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm import wire
from moe_rl.weights.update import WeightUpdate


class ServerLost(EngineError):
    """A place is lost, and the others continue. `tokens`: how many the call had sampled there; their rows are lost
    too."""

    def __init__(self, problem: str, tokens: int = 0):
        super().__init__(problem)
        self.tokens = tokens


class GroupSampler(Protocol):
    """Samples groups at several places. Calls raise SamplerGone when the run cannot continue after a loss."""

    @property
    def places(self) -> Sequence[int]:
        """Return the numbers of the places that are not lost."""
        ...

    async def sample_group(
        self,
        place: int,
        requests: Sequence[GenerateRequest],
        *,
        shard: str,
        leave: asyncio.Event,
        ended: Callable[[int], None] = nobody,
    ) -> list[Completion]:
        """Sample one completion per request, in request order, and publish the routes as trace shard `shard`.

        Args:
            place: where.
            requests: what to sample.
            shard: name of the new trace shard, used by this call only.
            leave: set it to abort unfinished requests. They return the tokens so far, perhaps none, with finish_reason
                "abort"; the rows of these tokens are published. It may be set during a pause too.
            ended: called in the event loop with the number of requests that have ended since the last time.

        Raises:
            ServerLost: the place is lost, with all that this call sampled.
            EngineError: the place refuses the requests, or has no right record of one.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling. After it returns, no place forwards a token before `resume`. Groups may still be submitted."""
        ...

    async def take_weights(self, update: WeightUpdate) -> None:
        """Load one part of an update during a pause; returns once it is loaded everywhere.

        Raises:
            WeightSyncError: a place refuses the part, or places hold different weights after the final one.
        """
        ...

    async def resume(self) -> None:
        """Continue sampling. Raises WeightSyncError unless all places hold the same complete weights."""
        ...

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Score token sequences, see WeightHolder.score."""
        ...

    async def counts(self) -> dict[str, int]:
        """Return the recorders' counts, see WeightHolder.counts."""
        ...


class EngineGroups:
    """Serves as the GroupSampler of one engine, which is place 0."""

    def __init__(self, engine: VllmEngine):
        self._engine = engine

    @property
    def places(self) -> Sequence[int]:
        return (0,)

    async def sample_group(
        self,
        place: int,
        requests: Sequence[GenerateRequest],
        *,
        shard: str,
        leave: asyncio.Event,
        ended: Callable[[int], None] = nobody,
    ) -> list[Completion]:
        calls, loop = self._engine.calls, asyncio.get_running_loop()

        def hear(completions: list[tuple[int, Completion]]) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(ended, len(completions))

        number, answer = calls.submit(wire.Generate(list(requests), shard), hear)
        sampled = asyncio.wrap_future(answer)
        left = asyncio.ensure_future(leave.wait())
        waits: set[asyncio.Future[Any]] = {sampled, left}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not sampled.done():
                calls.leave(number)
            return self._engine.checked(await sampled, wire.Generated).completions
        finally:
            left.cancel()
            if not sampled.done():  # no caller waits any more
                calls.leave(number)

    async def pause(self) -> None:
        await self._ask(wire.Pause(), wire.Paused)

    async def take_weights(self, update: WeightUpdate) -> None:
        await self._ask(wire.Update(update), wire.Updated)

    async def resume(self) -> None:
        await self._ask(wire.Resume(), wire.Resumed)

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        scored = await self._ask(wire.Score(list(map(list, runs)), shard), wire.Scored)
        return [ScoredTokens(scored.logprobs, scored.routes, self._engine.name())]

    async def counts(self) -> dict[str, int]:
        return (await self._ask(wire.AskCounts(), wire.Counted)).counts

    async def _ask[R: Message](self, call: wire.Call, expected: type[R]) -> R:
        _, answer = self._engine.calls.submit(call)
        return self._engine.checked(await asyncio.wrap_future(answer), expected)
