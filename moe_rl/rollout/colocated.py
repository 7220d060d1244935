"""Uses several engines beside the ranks of one node as one `Sampler`, whose places they are. Imports neither vLLM nor
torch.

Engine n runs on the GPU of the rank with local number n, or on the CPUs. All get each update, sleep and wake together.
Each publishes what it samples as its own shard: step000007-engine0, step000007-engine1, ... None is replaced: when one
ends or hangs, the run ends with SamplerGone, which names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import msgspec

from moe_rl.errors import WeightSyncError
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import CallOptions, Sampler, all_of, check_agreement
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm.wire import EngineSettings
from moe_rl.weights.update import Broadcast, WeightUpdate


def start_engines(settings: EngineSettings, count: int) -> Sampler:
    """Start `count` engines at once and wait until all can sample. Call it from the main thread.

    With several, the log of engine n is engine<n>.log.

    Raises:
        EngineError: an engine does not start; none is left running.
    """
    if count == 1:
        return VllmEngine(settings)
    log, engines = settings.log_path, list[VllmEngine]()
    try:
        for number in range(count):
            engine_settings = replace(settings, log_path=log.with_stem(f"{log.stem}{number}"))
            engines.append(VllmEngine(engine_settings, number, count, waits=False))
        for engine in engines:
            engine.wait()
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return ColocatedEngines(engines)


class ColocatedEngines:
    """Combines running engines into one `Sampler`. An engine's number is its index. All hold the same weights."""

    def __init__(self, engines: Sequence[VllmEngine]):
        self.engines = list(engines)
        self.vllm_version, self.address = engines[0].vllm_version, engines[0].address
        self.workers = [name for engine in engines for name in engine.workers]
        self.lost = dict[str, str]()
        self._left_open: dict[str, set[int]] = {}  # the places where calls left a shard open
        self._agree = True  # False during an update, and after one that some engine has not confirmed

    @property
    def places(self) -> Sequence[int]:
        return range(len(self.engines))

    async def sample(
        self, place: int, requests: Sequence[GenerateRequest], *, shard: str, **options: Unpack[CallOptions]
    ) -> list[Completion]:
        self._refuse_different()
        if options.get("keep_open"):
            self._left_open.setdefault(shard, set()).add(place)
        return await self.engines[place].sample(0, requests, shard=self.shard_at(place, shard), **options)

    async def publish(self, shard: str, *, keep_open: bool = False) -> list[str]:
        left = sorted(self._left_open.get(shard, ()) if keep_open else self._left_open.pop(shard, ()))
        await all_of(self.engines[place].publish(self.shard_at(place, shard), keep_open=keep_open) for place in left)
        return []

    def shard_at(self, place: int, shard: str) -> str:
        return f"{shard}-engine{place}"

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Score token sequences, see Sampler.score. Engine n publishes `shard`-engine<n>."""
        self._refuse_different()
        by_engine = await all_of(
            engine.score(runs, shard=None if shard is None else self.shard_at(number, shard))
            for number, engine in enumerate(self.engines)
        )
        return [scored for of_engine in by_engine for scored in of_engine]

    async def counts(self) -> dict[str, int]:
        counts = await all_of(engine.counts() for engine in self.engines)
        return dict(sum(map(Counter, counts), Counter()))

    async def pause(self) -> None:
        await all_of(engine.pause() for engine in self.engines)

    async def take_weights(self, update: WeightUpdate) -> None:
        """Have all engines load one part of an update, see Sampler.take_weights.

        Raises WeightSyncError for the first engine that refuses. After that, nothing is sampled until all have
        confirmed a whole update.
        """
        self._agree = False
        held = await all_of(engine.load(_own_part(update, number)) for number, engine in enumerate(self.engines))
        if update.final:
            named = zip(self.engines, held, strict=True)
            check_agreement(
                update.version, {engine.name(): (holding.version, holding.digest) for engine, holding in named}
            )
            self._agree = True

    async def resume(self) -> None:
        self._refuse_different()
        await all_of(engine.resume() for engine in self.engines)

    async def sleep(self, level: int) -> bool:
        return all(await all_of(engine.sleep(level) for engine in self.engines))

    async def wake(self, part: str) -> None:
        await all_of(engine.wake(part) for engine in self.engines)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _refuse_different(self) -> None:
        if not self._agree:
            raise WeightSyncError("The engines hold no weights that all have confirmed", do="send a whole update")


def _own_part(update: WeightUpdate, number: int) -> WeightUpdate:
    """Return the part for engine `number`: in a broadcast each worker has its own rank; else all read the same."""
    if not isinstance(update.source, Broadcast):
        return update
    source = msgspec.structs.replace(update.source, first_rank=update.source.first_rank + number)
    return msgspec.structs.replace(update, source=source)
