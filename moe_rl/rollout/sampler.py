"""Defines what samples completions for a run: engines in child processes, or vLLM servers.

    places        servers, or engines; each may run several calls at once
    sample        one call at one place, as its own trace shard
    sample_all    one call at every place, which share the requests
    pause         every place confirms that it runs no forward pass; requests keep their place and KV cache
    take_weights  sends the weights, only while nothing is forwarded; at the end compares digests and versions
    resume        every place continues all its requests

A request that had sampled tokens before the update continues with the keys and values of the older weights, and its
completion records which weights sampled which tokens. Cached prefixes are shared only within one version.
Alternatively, set `leave` before the pause: the call returns with the tokens so far, and its completions continue as
new requests.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, TypedDict, Unpack

from moe_rl.errors import EngineError, WeightSyncError
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.weights.update import WeightUpdate

Hears = Callable[[int, Completion], None]
"""Called when a completion has ended, with the index of its request in the call and the completion without routes."""


def nobody(*news: object) -> None:
    """Do nothing: the default callback."""


class CallOptions(TypedDict, total=False):
    """Holds the options of a call that samples.

    Attributes:
        leave: set it to abort unfinished requests. They return the tokens so far, perhaps none, with finish_reason
            "abort"; the rows of these tokens are published. It may be set during a pause too. None, the default: the
            call is alone at its place, where the prefix cache is emptied first, so that the result depends only on the
            weights and the requests.
        ended: called in the event loop with each completion as soon as it ends, while others continue, but not with
            aborted ones.
        keep_open: leave the place's shard open, for further calls that may continue its records, until `publish`. Only
            with `leave`. Otherwise the shard is of this call only.
    """

    leave: asyncio.Event | None
    ended: Hears
    keep_open: bool


class ServerLost(EngineError):
    """A place is lost, and the others continue. `tokens`: how many the call had sampled there; their rows are lost
    too."""

    def __init__(self, problem: str, tokens: int = 0):
        super().__init__(problem)
        self.tokens = tokens


class Sampler(Protocol):
    """Samples completions at several places with the weights that it holds, and scores tokens with them.

    A call raises SamplerGone when the run cannot continue after a loss. It raises EngineError, and changes nothing, if
    the sampler refuses. A sampler with incomplete weights refuses to sample and to score with WeightSyncError; a
    sleeping one with EngineError.

    Attributes:
        lost: servers no longer used, by address, each with the reason; never engines.
    """

    vllm_version: str
    lost: dict[str, str]

    @property
    def places(self) -> Sequence[int]:
        """Return the numbers of the places that are not lost."""

    @property
    def workers(self) -> list[str]:
        """Return the names of the processes that hold weights, by rank. One that is used again has another name.

        With several engines, each gets its own ranks in a broadcast, starting at `Broadcast.first_rank`.
        """

    @property
    def address(self) -> str:
        """Return the address by which these processes reach this host."""

    async def sample(
        self, place: int, requests: Sequence[GenerateRequest], *, shard: str, **options: Unpack[CallOptions]
    ) -> list[Completion]:
        """Sample one completion per request, in request order, and publish the routes as trace shard `shard`.

        Args:
            place: where.
            requests: what to sample.
            shard: name of the new trace shard; that of a place's shard begins with it, see `shard_at`.
            options: see CallOptions.

        Raises:
            ServerLost: the place is lost, with all that this call sampled.
            RequestRefused: the requests cannot be sampled, or not recorded. The place continues.
        """

    async def publish(self, shard: str, *, keep_open: bool = False) -> list[str]:
        """Publish a shard that calls left open, at every place where they did. No such call may be running.

        Args:
            keep_open: publish the records of the calls that have ended. Others may be running, and later ones use the
                shard too: their records are published as other shards, whose names begin with the same and a dot.

        Returns:
            The names of the places' shards that are not published because the place was lost. Their files may have
            all or some of the records, see `trace.recovery.recover_shard`.
        """

    def shard_at(self, place: int, shard: str) -> str:
        """Return the name that the shard has now at a place; each pipeline stage adds a suffix."""

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Compute the log-probabilities of token sequences at each place, without its prefix cache.

        Args:
            runs: token ids of each sequence, at least 2 each.
            shard: trace shard for the routes of these forward passes; with several places, each publishes its own,
                named after this one. None: no routes are recorded.

        Returns:
            One element per place.
        """

    async def counts(self) -> dict[str, int]:
        """Return the recorders' counts since they started, summed over the places, see Recorder; {} without a
        recorder."""

    async def pause(self) -> None:
        """Stop sampling. After it returns, no place forwards a token before `resume`. Calls may still begin."""

    async def take_weights(self, update: WeightUpdate) -> None:
        """Load one part of an update, see `weights.update`, while no call runs or in a pause. Returns once it is loaded
        everywhere. After the final part everything sampled carries its version.

        Raises:
            WeightSyncError: a place refuses the part, or places hold different weights after the final one; the message
                says whether the sampler keeps its old weights.
        """

    async def resume(self) -> None:
        """Continue sampling. Raises WeightSyncError unless all places hold the same complete weights."""

    async def sleep(self, level: int) -> bool:
        """Release memory: level 1 the KV cache (weights move to the host), level 2 the KV cache and the weights.

        The sampler refuses to sample until it is awake again. Waking takes two calls: `wake("weights")`, then, after
        level 2, a whole update, then `wake("kv_cache")`.

        Returns:
            Whether memory was released; on a CPU it never is.
        """

    async def wake(self, part: str) -> None:
        """Take back the memory of "weights" or "kv_cache". Does nothing if that part is awake.

        A whole update may follow `wake("weights")`. So this is when lost servers that were started again return: they
        count among `workers`, and are used from that update on.
        """

    def close(self) -> None:
        """End what was started for this sampler. May be called at any time, and repeatedly."""


async def sample_all(
    sampler: Sampler,
    requests: Sequence[GenerateRequest],
    *,
    shard: str,
    leave: asyncio.Event | None = None,
    ended: Hears = nobody,
    in_flight: int | None = None,
) -> list[Completion]:
    """Sample one completion per request, in request order. The places share the requests, see `assign`.

    If a place is lost, the others sample its share again.

    Args:
        shard: as in Sampler.sample; every place gets its own, whose name begins with this one.
        leave: as in CallOptions. With None, the result depends only on the weights, the requests and the places.
        ended: as in CallOptions. Called again for completions that are sampled again.
        in_flight: number of requests that a place may have before it gets no further group from a queue, which then
            replaces the shares. Not with `leave`. The result then depends on how fast the places are.

    Raises:
        SamplerGone: more servers are lost than allowed.
    """
    completions: dict[int, Completion] = {}

    async def share(place: int, members: Sequence[int], name: str) -> None:
        with suppress(ServerLost):
            completions.update(await _sample_at(sampler, place, requests, members, ended, shard=name, leave=leave))

    for attempt in itertools.count():
        lacking = [index for index in range(len(requests)) if index not in completions]
        if not lacking:
            break
        name = f"{shard}-again{attempt}" if attempt else shard
        if in_flight is not None:
            completions |= await _sample_queue(sampler, requests, lacking, name, ended, in_flight)
            continue
        shares = assign([requests[index] for index in lacking], sampler.places)
        await all_of(share(place, [lacking[index] for index in members], name) for place, members in shares.items())
    return [completions[index] for index in range(len(requests))]


async def _sample_queue(
    sampler: Sampler,
    requests: Sequence[GenerateRequest],
    lacking: Sequence[int],
    shard: str,
    ended: Hears,
    in_flight: int,
) -> dict[int, Completion]:
    """Sample the lacking requests. A place takes the largest group left whenever it has less than `in_flight` requests.

    Every place fills one shard, which is published at the end. Returns the completions whose shards are: what a lost
    place had sampled is missing. The group that it was sampling goes back to the queue.
    """
    busy, sampled = dict.fromkeys(sampler.places, 0), {place: dict[int, Completion]() for place in sampler.places}
    never, first, freed = asyncio.Event(), asyncio.Lock(), asyncio.Event()
    records = any(requests[index].record for index in lacking)

    async def sample_group(members: Sequence[int]) -> None:
        async with first:  # groups get it in their order
            while busy[place := min(sampler.places, key=lambda place: (busy[place], place))] >= in_flight:
                freed.clear()
                await freed.wait()
            busy[place] += len(members)

        def hear(index: int, completion: Completion) -> None:
            busy[place] -= 1
            freed.set()
            ended(index, completion)

        try:
            sampled[place] |= await _sample_at(
                sampler, place, requests, members, hear, shard=shard, leave=never, keep_open=records
            )
        except ServerLost:
            await sample_group(members)

    groups = by_prompt([requests[index] for index in lacking])
    await all_of(sample_group([lacking[index] for index in members]) for _, members in groups)
    lost = await sampler.publish(shard) if records else []
    kept = (done for place, done in sampled.items() if sampler.shard_at(place, shard) not in lost)
    return {index: completion for done in kept for index, completion in done.items()}


async def _sample_at(
    sampler: Sampler,
    place: int,
    requests: Sequence[GenerateRequest],
    members: Sequence[int],
    ended: Hears,
    **options: Any,
) -> dict[int, Completion]:
    """Sample the requests with the indexes `members` at one place. `ended` hears these indexes too."""
    sampled = await sampler.sample(
        place,
        [requests[index] for index in members],
        ended=lambda number, completion: ended(members[number], completion),
        **options,
    )
    return dict(zip(members, sampled, strict=True))


async def all_of[T](calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Make calls at once and return their results, in order. The first that fails cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_agreement(version: int, held: Mapping[str, tuple[int, str]]) -> None:
    """Raise WeightSyncError unless all places hold `version`, with the same digest.

    held: the version and the digest of each place's weights, by the name of the place.
    """
    if len(set(held.values())) > 1 or {number for number, _ in held.values()} != {version}:
        got = "; ".join(
            f"{name}: version {weights[0]}, digest {weights[1] or 'none'}" for name, weights in held.items()
        )
        raise WeightSyncError("The sampler's places hold different weights", got=got, expected=version)


def assign(requests: Sequence[GenerateRequest], places: Sequence[int]) -> dict[int, list[int]]:
    """Distribute requests: place -> indexes of its requests, ascending. Places without requests are left out.

    Groups are assigned largest first, each to the place with the least load so far. The same requests and places always
    give the same distribution.
    """
    shares: dict[int, list[int]] = {place: [] for place in places}
    loads = dict.fromkeys(places, 0)
    for load, members in by_prompt(requests):
        place = min(places, key=lambda place: (loads[place], place))
        loads[place] += load
        shares[place] += members
    return {place: sorted(share) for place, share in shares.items() if share}


def by_prompt(requests: Sequence[GenerateRequest]) -> list[tuple[int, list[int]]]:
    """Return the load and the indexes of the requests of each prompt, the largest load first.

    They stay together, so the prompt is computed and stored once. A request's load is the most tokens it can have.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt_token_ids, []).append(index)
    loads = (
        (sum(len(prompt) + requests[index].max_tokens for index in members), members)
        for prompt, members in groups.items()
    )
    return sorted(loads, key=lambda group: (-group[0], group[1][0]))


class Blocking:
    """Makes the calls of a sampler for callers that wait, in an event loop in a thread. Use as a context manager.

    Attributes:
        sampler: makes the calls.
    """

    def __init__(self, sampler: Sampler):
        self.sampler, self.vllm_version = sampler, sampler.vllm_version
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="calls of the sampler", daemon=True).start()

    def run[R](self, what: Coroutine[Any, Any, R]) -> R:
        """Return the result of a coroutine that uses the sampler. If the wait is interrupted, it is cancelled."""
        running = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    @property
    def workers(self) -> list[str]:
        return self.sampler.workers

    @property
    def address(self) -> str:
        return self.sampler.address

    def generate(self, requests: Sequence[GenerateRequest], *, shard: str, ended: Hears = nobody) -> list[Completion]:
        """Sample one completion per request, see `sample_all`; each place samples for this call alone."""
        return self.run(sample_all(self.sampler, requests, shard=shard, ended=ended))

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        return self.run(self.sampler.score(runs, shard=shard))

    def counts(self) -> dict[str, int]:
        return self.run(self.sampler.counts())

    def update_weights(self, update: WeightUpdate) -> None:
        self.run(self.sampler.take_weights(update))

    def sleep(self, level: int) -> bool:
        return self.run(self.sampler.sleep(level))

    def wake(self, part: str) -> None:
        self.run(self.sampler.wake(part))

    def close(self) -> None:
        self.sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
