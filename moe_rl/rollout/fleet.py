"""Uses several vLLM servers as one `Sampler`, whose places they are. Each is a replica of the weights.

sample      a server that samples for one call alone first proves that it holds the latest weights. It publishes what it
            samples as its own shard: step000007-server0, step000007-server1, ...
update      is sent to all servers; nothing is sampled anywhere until each has confirmed it
score       every server scores the same tokens
loss        a server that fails a call is no longer used, up to a configured number of losses. Its calls raise
            ServerLost; other servers sample their requests again, into shards with new names. Nothing refers to shards
            that the lost server may have published, so nothing is counted twice.
return      before an update, lost servers are asked. One that answers, as after a new start, gets this update and is
            used again.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, Unpack
from urllib.parse import urlsplit

import msgspec

from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, RequestRefused, SamplerGone, WeightSyncError, describe
from moe_rl.rollout.attach import folder_problem, servers_of
from moe_rl.rollout.sampler import CallOptions, ServerLost, all_of, check_agreement
from moe_rl.rollout.server import VllmServer
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm.control import Served
from moe_rl.vllm.sampling import Growing
from moe_rl.weights.update import Broadcast, Files, Received, Source, WeightUpdate, reached_by_all, refusal

# How long a lost server has to answer before an update.
_ASK_SECONDS = 10.0


def _same(served: Served) -> Served:
    """Return what a server serves, without what it tells about itself."""
    return msgspec.structs.replace(
        served, start="", updates=0, weight_version=0, weight_digest="", weights_whole=False, gpus=0
    )


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Identifies the weights of a server: which server start holds them, after how many updates, and their digest."""

    start: str
    updates: int
    version: int
    digest: str

    @classmethod
    def of(cls, served: Served) -> Self:
        """Return the weights that a server reports."""
        return cls(served.start, served.updates, served.weight_version, served.weight_digest)

    def __str__(self) -> str:
        return f"version {self.version}, {f'digest {self.digest}' if self.digest else 'no digest'}"


class _UpdateRefused(WeightSyncError):
    """Raised when a working server refuses an update: the trainer sent something wrong, and the server is not lost."""


class ServerFleet:
    """Combines servers into one `Sampler`. A server's number is its index in rollout.servers.

    Attributes:
        vllm_version: the servers' common version of vLLM.
        workers: names of all worker processes.
        servers: those that are not lost, by their numbers.
        lost: servers not used now, each with the reason.
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
        folder: str = "",
    ):
        """Wrap attached servers.

        Args:
            servers: clients of the servers.
            root: the servers' trace root.
            vllm_version: the servers' version of vLLM.
            workers: for each server, the number of processes that hold its weights.
            max_lost: how many servers may be lost.
            load_seconds: time limit for loading one part of an update.
            folder: the run's trace store, below the root. A server that returns must see it.
        """
        self.vllm_version = vllm_version
        self.lost: dict[str, str] = {}
        self.servers = dict(enumerate(servers))
        self._workers = dict(enumerate(workers))
        self._all = dict(self.servers)
        self._returning: set[int] = set()  # get the next update, and are lost until then
        self._from_nothing = frozenset[int]()  # the servers that the update under way has taken back
        self._root, self._folder = root.resolve(), folder
        self._max_lost = max_lost
        self._load_seconds = load_seconds
        # None before the first update, and after one that some server has not confirmed.
        self._held: dict[int, HeldWeights] | None = None
        self._calls = 0  # that sample
        self._returns: Counter[int] = Counter()  # how often each server was used again
        self._left_open: dict[str, dict[str, int]] = {}  # shard -> the servers' names of it, with the server

    @classmethod
    def attach(cls, config: Config, trace: Path, *, adopt: bool = True) -> Self:
        """Claim the config's servers for the run that keeps its traces in `trace`.

        Args:
            config: the run's config.
            trace: folder of its trace store.
            adopt: discard the servers' old weights: they must receive an update first. Otherwise they sample with their
                current weights, which must be the same on all.

        Raises:
            SamplerGone: a server cannot be reached, or fails.
            EngineError: a server does not see the trace folder.
            WeightSyncError: servers that are not adopted hold different or incomplete weights.
        """
        root = trace.parent.parent
        folder = str(trace.relative_to(root))
        servers = servers_of(config, folder)

        async def take(server: VllmServer) -> Served:
            try:
                answer = await server.served()  # to the check below, a server that is gone sees another folder
                problem = await folder_problem(server, root, folder)
                if adopt and not problem:
                    await server.adopt()
                    answer = await server.served()
            except RequestRefused:
                raise
            except EngineError as error:
                raise SamplerGone(
                    "A server does not answer" if error.message.fault == "silent" else "A server cannot be taken",
                    where={"key": "rollout.servers", "url": server.url},
                    got=error,
                    do="read its log, start it again, and begin or resume the run again",
                ) from error
            if problem:
                raise EngineError(problem)
            return answer

        served = asyncio.run(all_of(map(take, servers)))
        rollout = config.rollout
        fleet = cls(
            servers,
            root,
            served[0].vllm,
            workers=[answer.gpus for answer in served],
            max_lost=rollout.max_lost_servers,
            load_seconds=rollout.startup_timeout_seconds,
            folder=folder,
        )
        if not adopt:
            torn = [server.url for server, answer in zip(servers, served, strict=True) if not answer.weights_whole]
            if torn:
                raise WeightSyncError("Servers hold incomplete weights", got=", ".join(torn))
            fleet._agree(
                served[0].weight_version, {number: HeldWeights.of(answer) for number, answer in enumerate(served)}
            )
        return fleet

    @property
    def workers(self) -> list[str]:
        """Return the names of the processes that hold weights, of all servers that are not lost or are returning."""
        again = self._returns + Counter(self._returning)
        return [
            f"server{number}-again{again[number]}-worker{worker}"
            for number in sorted({*self.servers, *self._returning})
            for worker in range(self._workers[number])
        ]

    @property
    def address(self) -> str:
        """Return the address by which the servers reach this host."""
        urls = (urlsplit(self._all[number].url) for number in (*self.servers, *self._returning))
        # The config's checks require a host and a port in each URL.
        return reached_by_all([(url.hostname, url.port) for url in urls if url.hostname and url.port])

    @property
    def places(self) -> Sequence[int]:
        return tuple(self.servers)

    async def sample(
        self, place: int, requests: Sequence[GenerateRequest], *, shard: str, **options: Unpack[CallOptions]
    ) -> list[Completion]:
        server, held = self.servers.get(place), self.confirmed().get(place)
        if server is None or held is None:
            raise ServerLost(describe("A server is no longer in use", where={"server": place}))
        samples, name = [Growing() for _ in requests], self.shard_at(place, shard)
        if options.get("keep_open"):
            self._left_open.setdefault(shard, {})[name] = place
        returns = self._returns[place]
        self._calls += 1
        try:
            if options.get("leave") is None:
                await self._check(place, held)
            return await server.sample(requests, name, started=held.start, samples=samples, **options)
        except RequestRefused:
            raise
        except EngineError as error:
            if returns == self._returns[place]:  # else it was lost meanwhile, and is used again
                self.lose(place, error)
            message = describe("A server is lost", where={"server": place, "url": server.url}, got=error)
            raise ServerLost(message, sum(len(sample.token_ids) for sample in samples)) from error
        finally:
            self._calls -= 1

    async def publish(self, shard: str, *, keep_open: bool = False) -> list[str]:
        async def publish_at(name: str, place: int) -> bool:
            if name != self.shard_at(place, shard):
                return False  # it was lost, and is used again
            try:
                await self.server(place).publish(name, keep_open=keep_open)
            except RequestRefused:  # it was started again, and nobody has noticed yet
                return False
            except EngineError as error:
                self.lose(place, error)
                return False
            return True

        left = self._left_open.pop(shard, {})
        if keep_open:
            self._left_open[shard] = dict(left)
        published = await asyncio.gather(*(publish_at(*names) for names in left.items()))
        lost = [name for name, done in zip(left, published, strict=True) if not done]
        for name in lost:
            self._left_open.get(shard, {}).pop(name, None)
        return lost

    def shard_at(self, place: int, shard: str) -> str:
        again = self._returns[place]
        return f"{shard}-server{place}" + (f"-again{again}" if again else "")

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Score token sequences, see Sampler.score. Server n publishes `shard`-server<n>."""

        async def score_on(number: int) -> ScoredTokens:
            await self._check(number, held[number])
            server_shard = None if shard is None else f"{shard}-server{number}"
            return await self.server(number).score(runs, shard=server_shard)

        held = self.confirmed()
        return list((await self.each(score_on)).values())

    async def counts(self) -> dict[str, int]:
        """Return the summed counts of the servers that are not lost, see Sampler.counts; includes work for other
        clients."""
        counts = await self.each(lambda place: self.server(place).counts())
        return dict(sum((Counter(worker) for workers in counts.values() for worker in workers), Counter()))

    async def pause(self) -> None:
        await self.each(lambda place: self.server(place).pause())

    async def resume(self) -> None:
        self.confirmed()
        await self.each(lambda place: self.server(place).resume())

    async def take_weights(self, update: WeightUpdate) -> None:
        """Send one part of an update to all servers, see Sampler.take_weights.

        Raises WeightSyncError for the first server that refuses. After that, nothing is sampled until all servers have
        confirmed a whole update.
        """
        running = [server.url for server in self.servers.values() if not server.paused]
        if running and (self._calls or len(running) < len(self.servers)):
            raise WeightSyncError("An update needs a pause of all servers", got=running, do="pause first")
        self._held = None
        # A broadcast waits for all of its workers: if one were missing, the others would receive nothing.
        spares = not isinstance(update.source, Broadcast)
        if update.number == 0:
            self._from_nothing = frozenset(self._returning)
            await self._take_back(paused=not running, spares=spares)
        sources = self._sources(update.source)

        async def update_server(number: int) -> HeldWeights:
            server = self.server(number)
            replaces = 0 if number in self._from_nothing else update.replaces  # it was adopted: it holds version 0
            sent = msgspec.structs.replace(update, source=sources[number], replaces=replaces)
            holding = await server.update(sent, seconds=self._load_seconds)
            if holding.refused:
                raise _UpdateRefused(f"{server.url}: {refusal(holding)}")
            return HeldWeights.of(await server.served())

        held = await self.each(update_server, spares=spares)
        if update.final:
            self._agree(update.version, held)

    async def sleep(self, level: int) -> bool:
        """Do nothing and return False: servers have their own GPUs, which no trainer needs."""
        return False

    async def wake(self, part: str) -> None:
        """Ask lost servers whether they can take an update again: servers do not sleep. See Sampler.wake.

        A server that was started again while nothing was asked of it counts as lost until then.
        """
        if part == "weights":
            if self._held is not None:
                await self.each(self._notice_restart)
            await asyncio.gather(*(self._ask(number) for number in self._all.keys() - self.servers.keys()))

    def close(self) -> None:
        """Stop sampling. The servers keep running."""
        self._held = None

    async def _notice_restart(self, number: int) -> None:
        """Raise EngineError if a server is not the one that confirmed its weights."""
        started = (await self.server(number).served()).start
        if started != self.confirmed()[number].start:
            raise EngineError("A server was started again", where={"server": number, "url": self.server(number).url})

    async def _ask(self, number: int) -> None:
        """Let a lost server return if it answers, serves the same as the others, and sees the run's folder."""
        server = self._all[number]
        self._returning.discard(number)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                mine, *others = await all_of(peer.served() for peer in (server, *self.servers.values()))
                if _same(mine) not in map(_same, others):
                    print(f"moe_rl: server {number} came back as another server", file=sys.stderr, flush=True)
                    return
                if problem := await folder_problem(server, self._root, self._folder):
                    print(f"moe_rl: server {number} is not used again: {problem}", file=sys.stderr, flush=True)
                    return
                await server.adopt()
        except TimeoutError:
            print(f"moe_rl: server {number} did not answer within {_ASK_SECONDS:g} s", file=sys.stderr, flush=True)
        except EngineError:
            pass  # it is still lost
        else:
            self._workers[number] = mine.gpus
            self._returning.add(number)

    async def _take_back(self, *, paused: bool, spares: bool) -> None:
        """Use the returning servers again, which the current update is sent to."""
        for number in sorted(self._returning):
            server = self.servers[number] = self._all[number]
            del self.lost[server.url]
            self._returns[number] += 1
            server.paused = False
            print(f"moe_rl: server {number} is used again", file=sys.stderr, flush=True)
            if paused:
                try:
                    await server.pause()
                except EngineError as error:
                    self.lose(number, error, spares=spares)
        self.servers = dict(sorted(self.servers.items()))
        self._returning.clear()

    async def _check(self, number: int, expected: HeldWeights) -> None:
        """Raise WeightSyncError if a server does not hold the weights that it confirmed last."""
        server = self.server(number)
        served = await server.served()
        now = HeldWeights.of(served)
        if now != expected or not served.weights_whole:
            restarted = "; it was started again" if now.start != expected.start else ""
            raise WeightSyncError(
                "A server does not hold the weights that it was sent",
                where={"server": number, "url": server.url},
                got=f"{now}, {now.updates} updates{restarted}",
                expected=f"{expected}, {expected.updates} updates",
                do="see that no other run uses it",
            )

    def _sources(self, source: Source) -> dict[int, Source]:
        """Return each server's source of bytes: files by paths below its trace root, a broadcast by the server's own
        ranks."""
        if isinstance(source, Files):
            paths = [str(Path(path).resolve().relative_to(self._root)) for path in source.paths]
            return dict.fromkeys(self.servers, Files(paths))
        if isinstance(source, Broadcast):
            sources: dict[int, Source] = {}
            rank = source.first_rank
            for number in self.servers:
                sources[number] = msgspec.structs.replace(source, first_rank=rank)
                rank += self._workers[number]
            return sources
        if isinstance(source, Received):
            return dict.fromkeys(self.servers, source)
        message = "Servers share no memory with the trainer"
        raise WeightSyncError(message, got=type(source).__name__, do="sync by disk or broadcast")

    def confirmed(self) -> dict[int, HeldWeights]:
        """Return each server's weights. Raises WeightSyncError unless all have confirmed a whole update."""
        if self._held is None:
            raise WeightSyncError("The servers hold no weights that all have confirmed", do="send a whole update")
        return self._held

    def _agree(self, version: int, held: dict[int, HeldWeights]) -> None:
        check_agreement(
            version, {self.server(number).url: (weights.version, weights.digest) for number, weights in held.items()}
        )
        self._held = held

    async def each[T](self, call: Callable[[int], Awaitable[T]], *, spares: bool = True) -> dict[int, T]:
        """Call each server concurrently and return the results by server number, without servers lost meanwhile.

        The first refused call, or the first failure beyond the allowed losses, cancels the other calls.

        Args:
            call: makes the call for a server number.
            spares: whether any server may be lost.
        """
        tasks = {asyncio.ensure_future(call(number)): number for number in self.servers}
        results: dict[int, T] = {}
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        results[tasks[task]] = task.result()
                    except (RequestRefused, _UpdateRefused):
                        raise
                    except EngineError as error:
                        self.lose(tasks[task], error, spares=spares)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {number: results[number] for number in sorted(results) if number in self.servers}

    def server(self, number: int) -> VllmServer:
        """Return a server that is not lost. Raises EngineError for a lost one."""
        if number not in self.servers:
            raise EngineError("A server is no longer in use", where={"server": number})
        return self.servers[number]

    def lose(self, number: int, error: EngineError, *, spares: bool = True) -> None:
        """Stop using a server; do nothing if it is lost already.

        Raises SamplerGone if more servers are then lost than allowed; without `spares`, none may be lost.
        """
        bound = self._max_lost if spares else 0
        server = self.servers.pop(number, None)
        if server is None:
            return
        server.paused = False  # its calls in flight no longer wait for an update
        self.lost[server.url] = str(error)
        if not bound or len(self.lost) > bound:
            raise SamplerGone(
                f"A server failed and the run cannot do without it: {error}",
                where={"server": number, "url": server.url},
                got=f"{len(self.lost)} lost",
                expected=f"at most rollout.max_lost_servers = {bound}"
                if bound or not self._max_lost
                else "none while weights are broadcast",
                do="read its log, start it again, and continue the run with --resume",
            ) from error
        print(f"moe_rl: server {number} is no longer used: {error}", file=sys.stderr, flush=True)
