"""Several vLLM servers as one sampler. Each is a replica of the weights; what a step asks for is shared among them.

generate    every server proves that it holds the weights that were sent last, then samples its share and publishes
            it as a shard of its own, step000007-server0, step000007-server1, ...
update      sent to all; until each has confirmed it, nothing is sampled anywhere
score       every server scores the same tokens
loss        a server that fails a call is used no more; within the bound the others sample its share again, into
            shards of new names. Nothing refers to what it may have published, so nothing is doubled.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, SamplerGone, WeightSyncError, describe
from moe_rl.rollout.attach import folder_problem, servers_of
from moe_rl.rollout.server import VllmServer
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm.control import Served
from moe_rl.weights.broadcast import reached_by_all
from moe_rl.weights.update import Broadcast, Files, Received, Source, WeightUpdate, refusal


@dataclass(frozen=True, slots=True)
class _Held:
    """The weights of a server: which start of it holds them, after how many updates, and what they are."""

    start: str
    updates: int
    version: int
    digest: str

    def __str__(self) -> str:
        return f"version {self.version}, {f'digest {self.digest}' if self.digest else 'no digest'}"


class _UpdateRefused(WeightSyncError):
    """By a server that works: it is not lost, and what it refused was the trainer's."""


class ServerFleet:
    """A `Sampler`. Servers are called by their numbers, their places in rollout.servers.

    vllm_version, workers: of all. lost: servers that are used no more, each with why.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        root: Path,
        vllm_version: str,
        *,
        workers: Sequence[int],
        max_lost: int,
        load_seconds: float,
    ):
        """root: the folder that the servers have as their trace root. workers: of each server, the processes that hold
        its weights. load_seconds: for a part of an update."""
        self.vllm_version = vllm_version
        self.lost: dict[str, str] = {}
        self._servers = dict(enumerate(servers))
        self._workers = dict(enumerate(workers))
        self._root = root.resolve()
        self._max_lost = max_lost
        self._load_seconds = load_seconds
        # None before the first update, and after one that not all have confirmed.
        self._held: dict[int, _Held] | None = None

    @classmethod
    def attach(cls, config: Config, trace: Path) -> Self:
        """Take the config's servers for the run that keeps its traces in `trace`. Raises EngineError when one cannot be
        reached or does not see that folder. What they held before is forgotten: they want weights first."""
        root = trace.parent.parent
        folder = str(trace.relative_to(root))
        servers = servers_of(config, folder)

        async def take(server: VllmServer) -> Served:
            if problem := await folder_problem(server, root, folder):
                raise EngineError(problem)
            await server.adopt()
            return await server.served()

        async def take_all() -> list[Served]:
            return await asyncio.gather(*map(take, servers))

        served = asyncio.run(take_all())
        rollout = config.rollout
        return cls(
            servers,
            root,
            served[0].vllm,
            workers=[one.gpus for one in served],
            max_lost=rollout.max_lost_servers,
            load_seconds=rollout.startup_timeout_seconds,
        )

    @property
    def workers(self) -> int:
        """Processes that hold weights, of all servers that are not lost."""
        return sum(self._workers[number] for number in self._servers)

    @property
    def address(self) -> str:
        """The address of this host, as the servers reach it."""
        urls = (urlsplit(server.url) for server in self._servers.values())
        # The config's checks want both of a URL.
        return reached_by_all([(url.hostname, url.port) for url in urls if url.hostname and url.port])

    def generate(
        self, requests: Sequence[GenerateRequest], *, shard: str, enough: int | None = None
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; server n publishes `shard`-server<n>.

        Depends on the weights, the requests and which servers there are only. enough: completions that are waited for,
        of each server its share of them. Raises SamplerGone when more servers are lost than may be.
        """
        return asyncio.run(self._generate(requests, shard, enough, self._confirmed()))

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """See Sampler.score: one element a server, by its number; server n publishes `shard`-server<n>."""

        async def one(number: int) -> ScoredTokens:
            await self._check(number, held[number])
            own = None if shard is None else f"{shard}-server{number}"
            return await self._servers[number].score(runs, shard=own)

        held = self._confirmed()
        return list(asyncio.run(self._each(dict.fromkeys(self._servers, one))).values())

    def counts(self) -> dict[str, int]:
        """See Sampler.counts: of the servers that are not lost, with what they did for others."""

        async def one(number: int) -> Counter[str]:
            return sum(map(Counter, await self._servers[number].counts()), Counter())

        return dict(sum(asyncio.run(self._each(dict.fromkeys(self._servers, one))).values(), Counter()))

    def update_weights(self, update: WeightUpdate) -> None:
        """As Sampler.update_weights, for all servers. Raises WeightSyncError naming the first that refuses; nothing is
        sampled from then on until all have confirmed a whole update."""
        self._held = None
        sources = self._sources(update.source)

        async def one(number: int) -> _Held:
            server, sent = self._servers[number], msgspec.structs.replace(update, source=sources[number])
            holding = await server.update(sent, seconds=self._load_seconds)
            if holding.refused:
                raise _UpdateRefused(f"{server.url}: {refusal(holding)}")
            return _held(await server.served())

        # The broadcast waits for all of its workers: without one of them the others would get nothing.
        spares = not isinstance(update.source, Broadcast)
        held = asyncio.run(self._each(dict.fromkeys(self._servers, one), spares=spares))
        if update.final:
            self._agree(update.version, held)

    def sleep(self, level: int) -> bool:
        """Servers have GPUs of their own, which nobody waits for: nothing is given back."""
        return False

    def wake(self, part: str) -> None:
        """They do not sleep."""

    def alive(self) -> bool:
        async def all_answer() -> bool:
            answers = await asyncio.gather(*(s.served() for s in self._servers.values()), return_exceptions=True)
            return not any(isinstance(answer, Exception) for answer in answers)

        return asyncio.run(all_answer())

    def close(self) -> None:
        """Servers outlive the run; it only samples no more."""
        self._held = None

    async def _generate(
        self, requests: Sequence[GenerateRequest], shard: str, enough: int | None, held: Mapping[int, _Held]
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        attempt = 0
        while lacking := [at for at in range(len(requests)) if at not in completions]:
            attempt += 1
            again = f"-again{attempt - 1}" if attempt > 1 else ""
            shares = assign([requests[at] for at in lacking], list(self._servers))
            places = {number: [lacking[at] for at in share] for number, share in shares.items()}

            async def sample(number: int, places=places, again=again) -> list[Completion]:
                mine = [requests[at] for at in places[number]]
                wanted = None if enough is None else -(-enough * len(mine) // len(requests))
                await self._check(number, held[number])
                return await self._servers[number].sample(mine, f"{shard}-server{number}{again}", wanted)

            for number, sampled in (await self._each(dict.fromkeys(places, sample))).items():
                completions |= zip(places[number], sampled, strict=True)
        return [completions[at] for at in range(len(requests))]

    async def _check(self, number: int, expected: _Held) -> None:
        """Raises WeightSyncError when a server holds anything else than what it confirmed last."""
        served = await self._servers[number].served()
        now = _held(served)
        if now != expected or not served.weights_whole:
            restarted = "; it was started again" if now.start != expected.start else ""
            raise WeightSyncError(
                describe(
                    "A server does not hold the weights that it was sent",
                    where=self._servers[number].url,
                    got=f"{now}, {now.updates} updates{restarted}",
                    expected=f"{expected}, {expected.updates} updates",
                    do="see that no other run uses it",
                )
            )

    def _sources(self, source: Source) -> dict[int, Source]:
        """Where each server gets the bytes: files by paths below its trace root, a broadcast by ranks of its own."""
        if isinstance(source, Files):
            paths = [str(Path(path).resolve().relative_to(self._root)) for path in source.paths]
            return dict.fromkeys(self._servers, Files(paths))
        if isinstance(source, Broadcast):
            found: dict[int, Source] = {}
            rank = source.first_rank
            for number in self._servers:
                found[number] = msgspec.structs.replace(source, first_rank=rank)
                rank += self._workers[number]
            return found
        if isinstance(source, Received):
            return dict.fromkeys(self._servers, source)
        message = "Servers share no memory with the trainer"
        raise WeightSyncError(describe(message, got=type(source).__name__, do="sync by disk or broadcast"))

    def _confirmed(self) -> dict[int, _Held]:
        """What each server holds. Raises WeightSyncError unless all have confirmed a whole update."""
        if self._held is None:
            raise WeightSyncError(
                describe("The servers hold no weights that all have confirmed", do="send a whole update")
            )
        return self._held

    def _agree(self, version: int, held: dict[int, _Held]) -> None:
        kinds = {(one.version, one.digest) for one in held.values()}
        if len(kinds) > 1 or {one.version for one in held.values()} != {version}:
            got = "; ".join(f"{self._servers[number].url} {one}" for number, one in held.items())
            raise WeightSyncError(describe("The servers came to hold different weights", got=got, expected=version))
        self._held = held

    async def _each[T](
        self, calls: Mapping[int, Callable[[int], Awaitable[T]]], *, spares: bool = True
    ) -> dict[int, T]:
        """What every call gives, all at once, by number of the server. Without those that are lost on the way.

        The first refusal, or failure that is not within the bound, ends the others. spares: whether any may be lost.
        """
        tasks = {asyncio.ensure_future(call(number)): number for number, call in calls.items()}
        results: dict[int, T] = {}
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        results[tasks[task]] = task.result()
                    except _UpdateRefused:
                        raise
                    except EngineError as error:
                        self._lose(tasks[task], error, self._max_lost if spares else 0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return dict(sorted(results.items()))

    def _lose(self, number: int, error: EngineError, bound: int) -> None:
        """Do without a server from now on. Raises SamplerGone when that is one too many, any with a bound of 0."""
        server = self._servers.pop(number)
        self.lost[server.url] = str(error)
        if not bound or len(self.lost) > bound:
            raise SamplerGone(
                describe(
                    f"A server failed and the run cannot do without it: {error}",
                    where=f"server {number}, {server.url}",
                    got=f"{len(self.lost)} lost",
                    expected=f"at most rollout.max_lost_servers = {bound}"
                    if bound or not self._max_lost
                    else "none while weights are broadcast",
                    do="read its log, start it again, and continue the run with --resume",
                )
            ) from error
        print(f"moe_rl: server {number} is used no more: {error}", file=sys.stderr, flush=True)


def _held(served: Served) -> _Held:
    return _Held(served.start, served.updates, served.weight_version, served.weight_digest)


def assign(requests: Sequence[GenerateRequest], servers: Sequence[int]) -> dict[int, list[int]]:
    """Server -> positions of its requests, ascending; servers without any are left out.

    Requests with the same prompt stay together: it is computed and stored once. Groups go to the server with the least
    load so far, largest first; the load of a request is the tokens that it may come to. The same requests and servers
    always give the same shares.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.prompt_token_ids, []).append(at)
    load = {
        members[0]: sum(len(requests[at].prompt_token_ids) + requests[at].max_tokens for at in members)
        for members in groups.values()
    }
    shares: dict[int, list[int]] = {server: [] for server in servers}
    loads = dict.fromkeys(servers, 0)
    for members in sorted(groups.values(), key=lambda members: (-load[members[0]], members[0])):
        server = min(servers, key=lambda server: (loads[server], server))
        loads[server] += load[members[0]]
        shares[server] += members
    return {server: sorted(share) for server, share in shares.items() if share}
