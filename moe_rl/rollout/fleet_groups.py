"""Samples groups on several servers at once: the GroupSampler of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moe_rl.errors import EngineError, WeightSyncError, describe
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.group_sampler import EngineGroups, GroupSampler, ServerLost
from moe_rl.rollout.sampler import Sampler, nobody
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm.sampling import Growing
from moe_rl.weights.update import WeightUpdate


def groups_at(sampler: Sampler) -> GroupSampler:
    """Return the GroupSampler of a run's engine or fleet."""
    if isinstance(sampler, ServerFleet):
        return FleetGroups(sampler)
    assert isinstance(sampler, VllmEngine)  # the only other kind of sampler
    return EngineGroups(sampler)


class FleetGroups:
    """Serves as the GroupSampler of a fleet: a place is a server's number.

    A server that fails a call is no longer used, see `fleet`: the call raises ServerLost, or SamplerGone if more
    servers are lost than allowed. A lost server may keep sampling; nothing refers to what it publishes.
    """

    def __init__(self, fleet: ServerFleet):
        self._fleet = fleet

    @property
    def places(self) -> Sequence[int]:
        return tuple(self._fleet.servers)

    async def sample_group(
        self,
        place: int,
        requests: Sequence[GenerateRequest],
        *,
        shard: str,
        leave: asyncio.Event,
        ended: Callable[[int], None] = nobody,
    ) -> list[Completion]:
        server, held = self._fleet.servers.get(place), self._fleet.confirmed().get(place)
        if server is None or held is None:
            raise ServerLost(describe("A server is no longer in use", where={"server": place}))
        samples = [Growing() for _ in requests]
        try:
            return await server.sample_group(
                requests, f"{shard}-server{place}", leave, ended, started=held.start, samples=samples
            )
        except EngineError as error:
            self._fleet.lose(place, error)
            message = describe("A server is lost", where={"server": place, "url": server.url}, got=error)
            raise ServerLost(message, sum(len(sample.token_ids) for sample in samples)) from error

    async def pause(self) -> None:
        await self._fleet.each(lambda place: self._fleet.server(place).pause())

    async def take_weights(self, update: WeightUpdate) -> None:
        running = [server.url for server in self._fleet.servers.values() if not server.paused]
        if running:
            raise WeightSyncError("An update needs a pause of all servers", got=running, do="pause first")
        await self._fleet.load(update)

    async def resume(self) -> None:
        self._fleet.confirmed()
        await self._fleet.each(lambda place: self._fleet.server(place).resume())

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        return await self._fleet.scored(runs, shard)

    async def counts(self) -> dict[str, int]:
        return await self._fleet.counted()
