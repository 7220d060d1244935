"""Answers rank 0's calls in a pool that samples groups one by one, see `group_feed`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from moe_rl.rollout import pool_wire as wire
from moe_rl.rollout.group_feed import GroupFeed
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.rollouts import EVALUATED, Rollouts
from moe_rl.rollout.sampler import Sampler, sample_all
from moe_rl.rollout.trajectories import LivePlayer
from moe_rl.vllm.wire import AskCounts, Counted, Score, Update, Wake


class GroupPool:
    """Owns the feed of groups, which begins once rank 0 sends the step and the weight version."""

    def __init__(self, rollouts: Rollouts, sampler: Sampler, run_dir: Path, player: LivePlayer | None = None):
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
            case Wake(part):
                await self._sampler.wake(part)
                return wire.SamplerUpdated(self._rollouts.engine.workers)
            case Update(update):
                if self._player is not None:
                    self._player.hold()
                await (self._sampler.take_weights if self._feed is None else self._feed.update)(update)
                if self._player is not None and update.final:
                    self._player.updated(update.version)
                return wire.SamplerUpdated(self._sampler.workers)

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

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Sample held-out prompts while groups are sampled, and return the metrics."""
        rollouts, answers = self._rollouts, []
        if self._player is not None and rollouts.episodes is not None:
            for places, episodes in rollouts.episodes.evaluation(rollouts.heldout):
                answers.append((places, [one.verdict for one in await self._player.play(episodes)]))
            return rollouts.rates(answers)
        for name, asked in zip(EVALUATED, rollouts.evaluation(), strict=True):
            places, requests = [place for place, _ in asked], [one for _, one in asked]
            shard, never = f"{name}-step{step:06d}", asyncio.Event()
            completions = await sample_all(self._sampler, requests, shard=shard, leave=never)
            prompts = [rollouts.heldout[place][1] for place in places]
            items = [rollouts.batches.item(*one) for one in zip(prompts, completions, strict=True)]
            answers.append((places, await rollouts.verifiers.judge(items)))
        return rollouts.rates(answers)
