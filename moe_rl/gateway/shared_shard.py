"""Publishes the records of the turns of a gateway, which share one trace shard at each place.

A record is in the shard's file before the reply is sent. So it survives the death of the gateway, of its engine and of
a server: `trace.recovery` publishes what they leave. What is published is on the disk, and survives a power cut too.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from moe_rl.errors import MoeRLError, SamplerGone
from moe_rl.rollout.sampler import Sampler
from moe_rl.trace.recovery import recover_shard

# How often the records of new turns are published, besides those of finished sessions.
_PUBLISH_SECONDS = 60.0
# How long a lost server may take to die, so that its files can be recovered.
DYING_SECONDS = 10.0


class SharedShard:
    """Is the shard of all turns that a gateway samples.

    Attributes:
        name: the shard's name, new in the store.
        fresh: whether turns may have been recorded since the last publication that succeeded. The caller sets it.
        unrecovered: the shards of lost places whose files are not recovered yet, for example because their process
            lives. Each publication tries again.

    Args:
        trace: the store, which has no other shards being filled.
    """

    def __init__(self, sampler: Sampler, trace: Path):
        self._sampler, self._trace = sampler, trace
        self._publishing = asyncio.Lock()
        self.name = f"gateway-{secrets.token_hex(4)}"
        self.fresh = self._open = False
        self.unrecovered: set[str] = set()

    async def publish(self, *, last: bool = False) -> None:
        """Publish the records of all turns that have ended. Those of a place that is lost are recovered.

        Args:
            last: no turn is being sampled, and none follows.

        Raises:
            EngineError: the sampler could not. Records may be lost; the check of a finished session finds that.
        """
        async with self._publishing:
            self._open |= self.fresh
            waits = dict.fromkeys(self.unrecovered, 0.0)
            if self._open if last else self.fresh:
                waits |= dict.fromkeys(await self._lost(last=last), DYING_SECONDS)
            for name, seconds in waits.items():
                done = await asyncio.to_thread(recover_shard, self._trace, name, seconds)
                (self.unrecovered.discard if done else self.unrecovered.add)(name)

    async def _lost(self, *, last: bool) -> list[str]:
        """Publish what the places hold. Returns the shards of places that are lost."""
        self.fresh = False
        shards = [self._sampler.shard_at(place, self.name) for place in self._sampler.places]
        try:
            return await self._sampler.publish(self.name, keep_open=not last)
        except BaseException as error:
            self.fresh = True
            if not (last and isinstance(error, SamplerGone)):
                raise
            return shards

    async def tend(self, failed: Callable[[MoeRLError], None]) -> None:
        """Publish again and again, until cancelled. failed: called with each error."""
        while True:
            await asyncio.sleep(_PUBLISH_SECONDS)
            try:
                await self.publish()
            except MoeRLError as error:
                print(f"moe_rl: {error}", file=sys.stderr, flush=True)
                failed(error)
