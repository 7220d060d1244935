"""Samples the turns of sessions through a Sampler: one call for the samples of a prompt.

The record of a turn continues its parent's, so shared prefixes are stored once. If the weights have changed since the
parent was sampled, the prefix is computed again, with other routes; the record then holds the rows of the whole prompt
again, those that the completion attended to. So it does if the parent's record is in an open shard of another place.

The requests of many sessions share one trace shard at each place. Their records are written before the turns are
returned, and published when its owner says so: the run whose episodes they are, or `SharedShard`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from moe_rl.errors import SamplerGone
from moe_rl.gateway.asking import SamplingWish
from moe_rl.gateway.sessions import PendingTurns, Session
from moe_rl.rollout.sampler import Sampler, ServerLost
from moe_rl.types import Completion, GenerateRequest, RouteRef
from moe_rl.vllm import sampling


@dataclass(frozen=True, slots=True)
class SamplerBounds:
    """Describes the sampler's limits.

    Attributes:
        max_model_len: prompt plus completion, in tokens.
        vocabulary: number of rows of the embeddings.
        reads_text: whether it finds stop strings.
        keeps_support: whether it records the ids that a token could be drawn from, which a grammar needs.
        at_once: samples at one place, from which on no further call begins there.
    """

    max_model_len: int
    vocabulary: int
    reads_text: bool
    keeps_support: bool
    at_once: int


class TurnSampler:
    """Samples turns where there is room, each session preferably at the place that caches its prefixes.

    Attributes:
        version: the sampler's weight version. Whoever updates the weights sets it.
        held: whether no turn may begin, because weights go in.
        counts: `sampled_again`: turns after a lost server; `lost_tokens`: tokens that it had sampled of them;
            `recorded_anew`: turns under other weights than the parent's, or away from its open shard;
            `over_older_rows`: turns sampled again because weights changed just when they began, so that their record
            had the parent's rows although the prefix was computed again.
    """

    def __init__(self, sampler: Sampler, bounds: SamplerBounds, *, seed: int | None, version: int = 0):
        self.bounds, self.version = bounds, version
        self.counts: Counter[str] = Counter(sampled_again=0, lost_tokens=0, recorded_anew=0, over_older_rows=0)
        self._sampler, self._seed = sampler, seed
        self._running: Counter[int] = Counter()  # samples at each place
        self.held = False
        self._changed = asyncio.Event()

    def hold(self) -> None:
        """Let no turn begin until `updated`. Running turns are not interrupted."""
        self.held = True

    def updated(self, version: int) -> None:
        """Let turns begin again, with weights of this version."""
        self.version, self.held = version, False
        self._change()

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens may follow a prompt."""
        return self.bounds.max_model_len - len(prompt)

    def check(self, place: PendingTurns, wish: SamplingWish) -> None:
        """Raise RequestRefused for a prompt or parameters that no place can sample."""
        bounds = self.bounds
        sampling.check(
            self._requests("checked", "", place, wish),
            max_model_len=bounds.max_model_len,
            vocabulary=bounds.vocabulary,
            reads_text=bounds.reads_text,
            keeps_support=bounds.keeps_support,
        )

    async def sample(
        self, session: Session, place: PendingTurns, wish: SamplingWish, leave: asyncio.Event
    ) -> tuple[list[Completion], bool]:
        """Sample the completions of a prompt. Returns them, and whether their records continue the parent's.

        Args:
            wish: must have passed `check`.
            leave: set it to abort unfinished completions, which return the tokens so far, perhaps none. If they have
                not begun, there are none.

        Raises:
            SamplerGone: no place is left.
            RequestRefused: they cannot be sampled, or not recorded.
        """
        session.calls += 1
        # A request that was running when a gateway was killed may have left a record.
        start = f"{session.reopened}." if session.reopened else ""
        number, recorded = f"{start}{session.calls}", session.shard is not None
        call, seed = f"{session.name}/{number}", f"{session.seed}/{number}"
        for again in itertools.count():
            home = await self._enter(session, place.samples, leave)
            if home is None:
                return [], False
            try:
                version, parent = self.version, self._record(session, place, home)
                attempt = f"-again{again}" if again else ""
                requests = self._requests(call + attempt, seed, place, wish, parent, record=recorded)
                sampled = await self._sampler.sample(
                    home, requests, shard=session.shard or session.name, leave=leave, keep_open=recorded
                )
            except ServerLost as lost:
                self.counts["sampled_again"] += 1
                self.counts["lost_tokens"] += lost.tokens
                continue
            finally:
                self._running[home] -= place.samples
                self._change()
            began = [sample.oldest_version for sample in sampled if sample.versions]
            self.version = max([self.version, *(sample.newest_version for sample in sampled if sample.versions)])
            if parent is not None and any(oldest != version for oldest in began):
                self.counts["over_older_rows"] += 1
                continue
            self.counts["recorded_anew"] += int(recorded and place.parent is not None and parent is None)
            return sampled, parent is not None
        raise AssertionError

    def _record(self, session: Session, place: PendingTurns, home: int) -> RouteRef | None:
        """Return the record that the requests continue at a place, if all its rows are from the current weights and
        the place can read it."""
        if place.parent is None or session.rows_version(place.parent) != self.version:
            return None
        record = session.turns[place.parent].routes
        if record is not None and session.shard is not None:
            shard = record.parts[0].shard.partition(".")[0]
            # The shard of a gateway that was killed is published by now.
            if shard.startswith(session.shard) and shard != self._sampler.shard_at(home, session.shard):
                return None
        return record

    def _requests(
        self,
        call: str,
        seed: str,
        place: PendingTurns,
        wish: SamplingWish,
        parent: RouteRef | None = None,
        *,
        record: bool = True,
    ) -> list[GenerateRequest]:
        default = None if self._seed is None else f"{self._seed} {seed}"
        seeds = default if wish.seed is None else str(wish.seed)
        return [
            GenerateRequest(
                key=f"{call}/{sample}",
                prompt_token_ids=place.prompt,
                seed=None if seeds is None else xxhash.xxh3_64_intdigest(f"{seeds} {sample}".encode()) >> 1,
                max_tokens=place.max_tokens,
                temperature=wish.temperature,
                stop_token_ids=wish.stop_token_ids,
                top_k=wish.top_k,
                top_p=wish.top_p,
                min_p=wish.min_p,
                parent=parent,
                record=record,
                stop=wish.stop,
                grammar=wish.grammar,
            )
            for sample in range(place.samples)
        ]

    async def _enter(self, session: Session, samples: int, leave: asyncio.Event) -> int | None:
        """Wait for room, and return the place: the session's previous one, or the one with the most room. Returns None
        if `leave` is set before."""
        while not leave.is_set():
            if not self.held:
                places = self._sampler.places
                if not places:
                    raise SamplerGone("No server is left to sample on", where={"session": session.name})
                home = session.home
                place = home if home is not None and home in places else min(places, key=lambda n: self._running[n])
                if self._running[place] < self.bounds.at_once:
                    session.home = place
                    self._running[place] += samples
                    return place
            await _wait_for_any(self._changed, leave)
        return None

    def _change(self) -> None:
        """Let each request that waits look again whether it may begin."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _wait_for_any(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
