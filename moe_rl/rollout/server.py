"""Talks to a recording vLLM server (moe-rl serve).

    client                                           server
    VllmServer.generate -- POST /moe_rl/open ------>  begin a shard
                        -- POST /inference/v1/generate, one a request, many at once: token ids in and out
                        -- POST /moe_rl/publish ----> rows of these tokens ----> trace store
                        <- references to routes -----

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Unpack

import httpx
import msgspec
import numpy as np

from moe_rl.disk import PUBLISH_SECONDS
from moe_rl.errors import EngineError
from moe_rl.rollout.sampler import CallOptions, Hears, nobody
from moe_rl.rollout.transport import Transport, collect
from moe_rl.types import Completion, GenerateRequest, RouteRef, ScoredTokens
from moe_rl.vllm import sampling
from moe_rl.vllm.control import Challenge, LeaveRequests, Open, Publish, Release, Scores, Scoring, Served, Sink
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sampling import Growing
from moe_rl.weights.update import Holding, WeightUpdate

_TIDY_SECONDS = 12.0
_LEAVE_AGAIN_SECONDS = 0.2
# Tokens of one publication: as JSON they are less than the longest body that a server takes.
_PUBLISH_TOKENS = 1 << 24


# Created at import time, by one thread: msgspec crashes when two threads are the first to decode a type.
_SERVED = msgspec.json.Decoder(Served)
_STATS = msgspec.json.Decoder(list[dict[str, int]])
_REFERENCES = msgspec.json.Decoder(dict[str, RouteRef])
_NOTHING = msgspec.json.Decoder(None)
_HOLDING = msgspec.json.Decoder(Holding)
_SCORES = msgspec.json.Decoder(Scores)
_TEXT = msgspec.json.Decoder(str)


class VllmServer:
    """Calls a running server. Each call runs its own event loop; calls may come from several threads or
    processes.

    Every call raises EngineError if the server cannot be reached, refuses, or hangs.

    Args:
        url: the server's address.
        token_file: file with the run's token.
        connections: most requests in flight at once.
        timeout_seconds: silence after which the server counts as hung. A completion sends nothing before it is
            finished.
        folder: where the trace store is, below the server's trace root.
        alone: no other client uses the server. Each `generate` then aborts leftover requests, empties the prefix cache
            and starts all requests together in their order, so that the result depends only on weights and requests. It
            also watches progress: a server that samples nothing for timeout_seconds counts as hung, however long a
            completion takes.
    """

    def __init__(
        self,
        url: str,
        token_file: Path,
        *,
        connections: int = 64,
        timeout_seconds: float = 600.0,
        folder: str = "",
        alone: bool = False,
    ):
        self._transport = Transport(url, token_file, timeout_seconds, secrets.token_hex(8) if alone else "")
        self.url = self._transport.url
        self._connections = connections
        self._folder = folder
        self._alone = alone
        self.paused = False
        self._shards: dict[str, asyncio.Task[None]] = {}  # those left open, and what opened each

    def generate(self, requests: Sequence[GenerateRequest], *, shard: str) -> list[Completion]:
        """Sample one completion per request, in request order, and publish the routes as trace shard `shard`.

        Unless the client is `alone`, the server keeps its prefix cache and may serve others at the same time.
        """
        return asyncio.run(self.sample(requests, shard)) if requests else []

    def recording(self) -> Served:
        """Return which model the server samples from and what it records."""
        return asyncio.run(self.served())

    def stats(self) -> list[dict[str, int]]:
        """Return the counts of every recording worker since its start; see recorder.Recorder."""
        return asyncio.run(self.counts())

    def update_weights(self, update: WeightUpdate) -> Holding:
        """Send a part of an update and return what the server then holds. Files are named relative to its trace
        root."""
        return asyncio.run(self.update(update))

    # Asynchronous versions of these calls and others, for callers that use several servers at once.

    async def served(self) -> Served:
        return await self._transport.call(None, "GET", "/moe_rl/recording", None, _SERVED)

    async def update(self, update: WeightUpdate, seconds: float | None = None) -> Holding:
        """Send a part of an update. `seconds` limits the loading; default: timeout_seconds."""
        return await self._transport.call(None, "POST", "/moe_rl/update", update, _HOLDING, seconds)

    async def adopt(self) -> Holding:
        """Take the server for a run: it holds version 0 and samples nothing until the run's weights have arrived.

        With `alone`, the server then refuses every call from a run that took it earlier.
        """
        return await self._transport.call(None, "POST", "/moe_rl/adopt", None, _HOLDING)

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> ScoredTokens:
        """Score token sequences, see Sampler.score."""
        asked = Scoring(list(map(list, runs)), shard, self._folder)
        scores = await self._watched(None, "POST", "/moe_rl/score", asked, _SCORES)
        return ScoredTokens([np.asarray(run, np.float32) for run in scores.logprobs], scores.routes, self.url)

    async def counts(self) -> list[dict[str, int]]:
        return await self._transport.call(None, "GET", "/moe_rl/stats", None, _STATS)

    async def challenge(self, folder: str, name: str) -> str:
        """Return the text that the server reads from a file below its trace root. It writes the same text next to the
        file."""
        return await self._transport.call(None, "POST", "/moe_rl/challenge", Challenge(folder, name), _TEXT)

    async def sample(
        self,
        requests: Sequence[GenerateRequest],
        shard: str,
        *,
        started: str = "",
        samples: list[Growing] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Sample completions, see `generate` and Sampler.sample. With `leave` other calls may sample meanwhile.

        Opens the shard, samples and publishes; if anything fails, abandons the shard. With `keep_open` earlier calls
        may have opened it, and later ones use it.

        Args:
            started: id of the server start that got the weights; any other start is refused. "": any.
            samples: one per request, empty. They are filled with the results, even if the call fails.
        """
        leave, ended = options.get("leave"), options.get("ended", nobody)
        keep_open = options.get("keep_open", False)
        samples = [Growing() for _ in requests] if samples is None else samples
        async with self._transport.client(3 + self._at_once(requests, leave)) as client:
            served = await self._watched(client, "GET", "/moe_rl/recording", None, _SERVED)
            sampling.check(
                requests,
                max_model_len=served.max_model_len,
                vocabulary=served.vocab_size,
                reads_text=served.reads_text,
                keeps_support=served.support,
            )
            if not served.weights_whole:
                got = "an update that failed" if served.updates else "no update since it started without weights"
                raise EngineError("The vLLM server's weights are incomplete", where={"url": self.url}, got=got)
            if started not in ("", served.start):
                raise self._shared("The vLLM server was started again", shard)
            records = any(request.record for request in requests)
            if records:
                await self._open(shard, keep_open)
            try:
                await self._run(client, requests, shard, leave, ended, samples)
                if leave is None:
                    now = await self._transport.call(client, "GET", "/moe_rl/recording", None, _SERVED)
                    if (now.start, now.updates) != (served.start, served.updates):
                        raise self._shared("Another client changed the vLLM server's weights during sampling", shard)
                if any(sample.aborted for sample in samples) and (leave is None or not leave.is_set()):
                    raise self._shared("Another client made the vLLM server abort requests", shard)
                refs: dict[str, RouteRef] = {}
                if records:  # of the completions, and of aborted requests with at least one token
                    asks = [RecordingRequest.of(request, shard) for request in requests]
                    lengths = [
                        len(request.prompt_token_ids) + len(sample.token_ids)
                        for request, sample in zip(requests, samples, strict=True)
                    ]
                    size = max(1, _PUBLISH_TOKENS // max(lengths))  # requests
                    for start in range(0, len(requests), size):
                        part = slice(start, start + size)
                        tokens = sampling.forwarded(requests[part], asks[part], samples[part])
                        message = Publish(shard, *tokens, keep_open or part.stop < len(requests))
                        refs |= await self._published(client, message)
            except BaseException:
                if records and not keep_open:
                    await self._tidy(client, "/moe_rl/abandon", Sink(shard))
                raise
        return [sample.completion(request, refs) for request, sample in zip(requests, samples, strict=True)]

    async def publish(self, shard: str, *, keep_open: bool = False) -> None:
        """Publish a shard that calls left open, see Sampler.publish."""
        if not keep_open:
            self._shards.pop(shard, None)
        message = Publish(shard, {}, keep_open=keep_open, cut=keep_open)
        await self._published(None, message)

    async def pause(self) -> None:
        """Stop the server's forward passes; requests keep their KV cache."""
        await self._transport.call(None, "POST", "/moe_rl/pause", None, _NOTHING)
        self.paused = True

    async def resume(self) -> None:
        """End a pause. The server refuses while its weights are incomplete."""
        await self._transport.call(None, "POST", "/moe_rl/resume", None, _NOTHING)
        self.paused = False

    async def _open(self, shard: str, keep_open: bool) -> None:
        """Begin a shard. The first of the calls that leave it open begins it."""
        opening = self._shards.get(shard) if keep_open else None
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            message = Open(shard, self._folder)
            opening = asyncio.ensure_future(self._watched(None, "POST", "/moe_rl/open", message, _NOTHING))
            if keep_open:
                self._shards[shard] = opening
        await asyncio.shield(opening)

    def _shared(self, what: str, shard: str) -> EngineError:
        return EngineError(what, where={"url": self.url, "shard": shard}, do="give every run servers of its own")

    async def _run(
        self,
        client: httpx.AsyncClient,
        requests: Sequence[GenerateRequest],
        shard: str,
        leave: asyncio.Event | None,
        ended: Hears,
        samples: list[Growing],
    ) -> None:
        """Fill `samples` with the results of all requests, or with the results so far once `leave` is set.

        Without `leave` at most `connections` run at a time, or all at once when alone, and nothing is streamed.
        """
        names, alone = [secrets.token_hex(8) for _ in requests], leave is None and self._alone
        turn = asyncio.Semaphore(self._at_once(requests, leave))

        async def run_request(index: int) -> None:
            async with turn:
                await collect(
                    self._transport,
                    client,
                    requests[index],
                    samples[index],
                    shard,
                    stream=leave is not None,
                    priority=index if alone else 0,
                    name=None if leave is None else names[index],
                    forever=leave is not None or alone,
                )

        async def end(index: int) -> None:
            await asyncio.wait([calls[index]])
            if calls[index].cancelled():
                samples[index] = Growing(finish_reason="abort")
                return
            calls[index].result()
            if not samples[index].finish_reason:
                raise EngineError("The vLLM server ended an answer early", where={"request": requests[index].key})
            if not samples[index].aborted:
                ended(index, samples[index].completion(requests[index], {}))

        async def abort(leave: asyncio.Event) -> None:
            await leave.wait()
            while True:
                left = [index for index, sample in enumerate(samples) if not sample.finish_reason]
                for index in left:
                    if not samples[index].token_ids:  # it may not have reached vLLM yet; the server drops it
                        calls[index].cancel()
                named = LeaveRequests([names[index] for index in left if samples[index].token_ids])
                await self._transport.call(client, "POST", "/moe_rl/leave", named, _NOTHING)
                await asyncio.sleep(_LEAVE_AGAIN_SECONDS)

        if alone:
            await self._transport.call(client, "POST", "/moe_rl/hold", None, _NOTHING)
        calls = [asyncio.create_task(run_request(index)) for index in range(len(requests))]
        ends = [asyncio.create_task(end(index)) for index in range(len(requests))]
        watches = [self._together(client, len(requests)), self._watch(client)] if alone else []
        if leave is not None:
            watches = [self._watch(client), abort(leave)]
        try:
            await _finished(ends, watches)
        finally:
            # The server aborts a request whose connection is closed.
            for task in (*calls, *ends):
                task.cancel()
            await asyncio.gather(*calls, *ends, return_exceptions=True)

    def _at_once(self, requests: Sequence[GenerateRequest], leave: asyncio.Event | None) -> int:
        return self._connections if leave is None and not self._alone else len(requests)

    async def _together(self, client: httpx.AsyncClient, requests: int) -> None:
        """Make the server start the requests once all have arrived. If that fails, the server is released anyway."""
        try:
            await self._transport.call(client, "POST", "/moe_rl/release", Release(requests), _NOTHING)
        except BaseException:
            await self._tidy(client, "/moe_rl/release", Release(0))
            raise

    async def _tidy(self, client: httpx.AsyncClient, path: str, message: msgspec.Struct) -> None:
        """Make a cleanup call after a failed call. The server may be dead or hang, so its failure is ignored."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_TIDY_SECONDS):
                await self._transport.call(client, "POST", path, message, _NOTHING)

    async def _published(self, client: httpx.AsyncClient | None, message: Publish) -> dict[str, RouteRef]:
        seconds = max(PUBLISH_SECONDS, self._transport.timeout)
        return await self._watched(client, "POST", "/moe_rl/publish", message, _REFERENCES, seconds)

    async def _watched(
        self,
        client: httpx.AsyncClient | None,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        answer: msgspec.json.Decoder,
        still: float | None = None,
    ):
        """Make a control call that may wait until an update is loaded, or behind running requests: it ends with an
        error only if the server hangs, see `_watch`."""
        call = asyncio.create_task(self._transport.call(client, method, path, message, answer, forever=True))
        try:
            await _finished([call], [self._watch(client, still)])
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        return call.result()

    async def _watch(self, client: httpx.AsyncClient | None, still: float | None = None) -> None:
        """Raise EngineError once the server forwards no token for `still` seconds, or does not answer for
        timeout_seconds; otherwise never return. still: default: timeout_seconds.

        A paused server may load weights, and answers nothing meanwhile.
        """
        still = self._transport.timeout if still is None else still
        forwarded, since = -1, time.monotonic()
        while True:
            await asyncio.sleep(self._transport.timeout / 4)
            try:
                stats = [] if self.paused else await self._transport.call(client, "GET", "/moe_rl/stats", None, _STATS)
            except EngineError:
                if not self.paused:
                    raise
                stats = []
            now = sum(worker.get("forwarded", 0) for worker in stats)
            if now != forwarded or self.paused:
                forwarded, since = now, time.monotonic()
            elif time.monotonic() - since > still:
                got = f"requests, and no token of them forwarded for {still:g} s"
                raise EngineError("The vLLM server hangs", where={"url": self.url}, got=got, do="read its log")


async def _finished(tasks: Sequence[asyncio.Task], watches: Sequence[Awaitable[None]]) -> None:
    """Wait until these tasks are finished. Raises the first exception of a task or a watch."""
    beside = [asyncio.ensure_future(watch) for watch in watches]
    pending = {*tasks, *beside}
    try:
        while not pending.isdisjoint(tasks):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for watch in beside:
            watch.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
