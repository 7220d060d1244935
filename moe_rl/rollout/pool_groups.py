"""Answers rank 0's calls in a pool that samples groups one by one, see `group_feed`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moe_rl.rollout import pool_wire as wire
from moe_rl.rollout.distribution import assign
from moe_rl.rollout.group_feed import GroupFeed
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.group_sampler import GroupSampler, ServerLost
from moe_rl.rollout.rollouts import EVALUATED, Rollouts
from moe_rl.rollout.trajectories import LivePlayer
from moe_rl.types import Completion, GenerateRequest
from moe_rl.vllm.wire import AskCounts, Counted, Score, Update
from moe_rl.weights.update import WeightUpdate


class GroupPool:
    """Owns the feed of groups, which begins once rank 0 sends the step and the weight version."""

    def __init__(self, rollouts: Rollouts, sampler: GroupSampler, run_dir: Path, player: LivePlayer | None = None):
        """player: plays the groups, if there is an environment. Must be open."""
        self._rollouts, self._sampler, self._player = rollouts, sampler, player
        self._files = GroupFiles(run_dir / "groups", rollouts.kept, rollouts.ledger)
        self._feed: GroupFeed | None = None

    async def answer(self, call: wire.Call) -> wire.Reply:
        match call:
            case wire.BeginGroups(step, version):
                return wire.GroupsBegun(await self._begin(step, version))
            case wire.TakeBatch(step):
                assert self._feed is not None  # rank 0 begins the groups first
                await self._feed.take(step)
                return wire.BatchTaken(step, self._feed.worked())
            case wire.RetainSteps(steps):
                if self._feed is None:
                    self._rollouts.retain(steps)
                else:
                    self._files.retain(steps)
                return wire.StepsRetained()
            case wire.EvaluatePolicy(step):
                return wire.PolicyEvaluated(await self._evaluate(step))
            case Score(runs, shard):
                return wire.RunsScored(await self._sampler.score(runs, shard=shard))
            case AskCounts():
                return Counted(await self._sampler.counts())
            case Update(update):
                if self._player is not None:
                    self._player.hold()
                await (self._load(update) if self._feed is None else self._feed.update(update))
                if self._player is not None and update.final:
                    self._player.updated(update.version)
                return wire.SamplerUpdated(self._rollouts.engine.workers)

    async def close(self) -> None:
        """Keep the tokens sampled so far, for the run's next pool."""
        if self._feed is not None:
            await self._feed.stop()

    async def _begin(self, step: int, version: int) -> list[str]:
        """Begin sampling groups. Return messages about an earlier process's groups that cannot be used."""
        given = self._rollouts, self._sampler, self._files
        self._feed = GroupFeed(*given, step=step, version=version, player=self._player)
        await self._feed.begin()
        return self._feed.unusable

    async def _load(self, update: WeightUpdate) -> None:
        """Load one part of weights before any group has begun."""
        if update.number == 0:
            await self._sampler.pause()
        await self._sampler.take_weights(update)
        if update.final:
            await self._sampler.resume()

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Sample held-out prompts while groups are sampled, and return the metrics."""
        rollouts, answers = self._rollouts, []
        if self._player is not None and rollouts.episodes is not None:
            for places, episodes in rollouts.episodes.evaluation(rollouts.heldout):
                answers.append((places, [one.verdict for one in await self._player.play(episodes)]))
            return rollouts.rates(answers)
        for name, asked in zip(EVALUATED, rollouts.evaluation(), strict=True):
            places, requests = [place for place, _ in asked], [one for _, one in asked]
            completions = await sample_beside(self._sampler, requests, shard=f"{name}-step{step:06d}")
            prompts = [rollouts.heldout[place][1] for place in places]
            items = [rollouts.batches.item(*one) for one in zip(prompts, completions, strict=True)]
            answers.append((places, await rollouts.verifiers.judge(items)))
        return rollouts.rates(answers)


async def sample_beside(sampler: GroupSampler, requests: Sequence[GenerateRequest], *, shard: str) -> list[Completion]:
    """Sample requests that belong to no group while groups are sampled. Returns one completion per request, in order.

    shard: prefix of the shards' names.
    """
    completions: dict[int, Completion] = {}
    calls = itertools.count()

    async def one(place: int, indices: Sequence[int]) -> None:
        asked, never = [requests[at] for at in indices], asyncio.Event()
        with suppress(ServerLost):  # other places sample these requests again
            sampled = await sampler.sample_group(place, asked, shard=f"{shard}-{next(calls)}", leave=never)
            completions.update(zip(indices, sampled, strict=True))

    while lacking := [at for at in range(len(requests)) if at not in completions]:
        shares = assign([requests[at] for at in lacking], sampler.places)
        await asyncio.gather(*(one(place, [lacking[at] for at in share]) for place, share in shares.items()))
    return [completions[at] for at in range(len(requests))]
