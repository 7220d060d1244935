"""Keeps the samplers busy with groups, judges each as soon as it is sampled, and gives every step its batch.

    groups.py (which, where, when)
        -> sampler.sample -> verifiers.judge -> group file -> take: batch, prompt ledger, kept rollouts

One process and one event loop run it. Every group that is sampled or judged has a task. Weights are updated while
requests are in flight: all servers stop between two forward steps, load, and continue. With `recompute`, unfinished
completions are aborted before the update and continued after it as new requests, so that no KV of older weights is
used.

When a request is aborted, its tokens so far are kept as a piece, with their routes. The next request continues it: at
once, on another server or after a restart. A stop string (rollout.stop) could begin in one piece and end in the next,
where the sampler would miss it, so with stop strings a completion starts over. With `exact`, all pieces of a completion
are trained on in one microbatch. A piece that would leave no room for another is sampled again.

A group of episodes is played in one call that also returns its verdicts. No turn begins during a weight update. If a
pool leaves such a group unfinished, its turns are lost: the next pool plays it from the beginning.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, PipelineError
from moe_rl.rollout.batches import PromptGroup, check_drawing, discarded, recorded
from moe_rl.rollout.group_files import GroupFiles, KeptGroup
from moe_rl.rollout.groups import Group, Groups, Reason
from moe_rl.rollout.kept import RolloutBatch
from moe_rl.rollout.pieces import all_pieces, joined, sampled_tokens, unfinished
from moe_rl.rollout.pipeline_metrics import Usage, of_consumed, of_dropped
from moe_rl.rollout.rollouts import Rollouts
from moe_rl.rollout.sampler import ServerLost
from moe_rl.rollout.trajectories import EpisodePlayer, Trajectory
from moe_rl.types import Completion, GenerateRequest, Prompt, Verdict
from moe_rl.weights.update import WeightUpdate


@dataclass(slots=True)
class _Work:
    """Holds a group that is being sampled or judged.

    Attributes:
        pieces: of each completion, in order.
        trajectories: the episodes played, if any.
        leave: set to abort its requests.
        dropped: why the group was dropped meanwhile.
    """

    group: Group
    prompt: Prompt
    pieces: list[list[Completion]]
    trajectories: list[Trajectory] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: Reason | None = None

    def kept(self, version: int, verdicts: Sequence[Verdict] = ()) -> KeptGroup:
        """Return the group in the form that is kept on disk."""
        group = self.group
        return KeptGroup(
            group.cursor, self.prompt.id, group.oldest, version, self.pieces, list(verdicts), self.trajectories
        )


class GroupFeed:
    """Runs the groups of an asynchronous run.

    Attributes:
        unusable: messages about an earlier process's groups that are sampled again.

    Args:
        rollouts: the sampler, the prompts, the verifiers or the player, and where batches are kept.
        files: the group files.
        step: the next step to be taken. The prompt ledger has the lines of all steps before.
        version: the weights that the servers have.
    """

    def __init__(self, rollouts: Rollouts, files: GroupFiles, *, step: int, version: int):
        self.rollouts, self.sampler, self.files, self._player = rollouts, rollouts.sampler, files, rollouts.player
        self.config = config = rollouts.config
        pipeline = config.pipeline
        self._staleness, self._recompute = pipeline.lag, pipeline.kv == "recompute"
        self._exact = pipeline.segments == "exact"  # otherwise a piece continues the previous one's record
        self.unusable: list[str] = []
        left = {one.cursor: one for one in files.load(rollouts.source, self.unusable)}
        self.groups = Groups(
            dict.fromkeys(self.sampler.places, _slots(config, len(self.sampler.places))),
            batch=config.rollout.prompts_per_step,
            size=config.rollout.group_size,
            staleness=self._staleness,
            spare=math.ceil(pipeline.oversample * config.rollout.prompts_per_step),
            patient=pipeline.late == "wait",
            last=config.run.steps,
            step=step,
            version=version,
            ended=rollouts.ledger.ended(step - 1),
            held=[one.held for one in left.values()],
        )
        for cursor in left:
            if cursor not in self.groups:
                files.remove(cursor)
        self._left = {cursor: one for cursor, one in left.items() if cursor in self.groups}  # waiting or ready
        self._work: dict[int, _Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._calls = 0  # calls of the sampler that have not returned
        self._open = asyncio.Event()  # cleared while new weights go in
        self._stopping = False
        self._refused: list[PromptGroup] = []  # judged groups dropped since the last step
        self._verdicts: list[Verdict] = []  # of all groups judged since the last step
        self._usage = Usage(asyncio.get_running_loop().time)
        self._lost_tokens = 0  # from turns, as the player counts them

    async def begin(self) -> None:
        """Begin sampling and judging groups."""
        self._counts = await self.sampler.counts()
        for group in self.groups.all("judging"):
            self._spawn(group)
        self._open.set()
        self._pump()

    async def take(self, step: int) -> RolloutBatch:
        """Return a step's batch once there are enough groups. It is then durable and has its line in the ledger.

        Raises:
            PipelineError: a completion is older than max_staleness allows.
            MoeRLError: a group could not be sampled or judged.
        """
        if step != self.groups.step:
            raise PipelineError("steps are taken in order", got=step, expected=self.groups.step)
        while True:
            if self._failure is not None:
                raise self._failure
            if (taken := self.groups.take()) is not None:
                break
            self._changed.clear()
            await self._changed.wait()
        groups = [self._left.pop(cursor) for cursor in taken.cursors]
        refused, self._refused, self._verdicts = self._refused, [], []  # for the next step
        self._check_ages(step, groups)
        for cursor, reason in taken.dropped:
            self._give_up(cursor, reason)
        self._pump()
        chosen = [self._judged(one) for one in groups]
        batch = self.rollouts.batches.make(step, [*chosen, *refused], chosen, exact=self._exact)
        counts = await self.sampler.counts()
        self._count_lost_turns()
        batch.metrics.update(
            of_consumed(step, groups) | of_dropped(taken.dropped) | self._usage.next() | self.rollouts.lost_servers(),
            **recorded(self._counts, counts),
            **{"pipeline/queued": len(self.groups.all("ready"))},
        )
        if self.config.rollout.dynamic_sampling_rounds > 1:
            lacking = sum(not one.informative for one in chosen)
            batch.metrics.update(discarded(len(chosen) + len(refused), len(chosen), lacking))
        self._counts = counts
        self.rollouts.store.check_published({shard for one in chosen for shard in one.shards})
        ids = [one.prompt for one in groups]
        self.rollouts.ledger.record(step - 1, taken.cursors, ids, batch.digest, taken.dropped)
        self.rollouts.kept.save(step, batch)
        self.files.counted(step, taken.cursors, [cursor for cursor, _ in taken.dropped])
        return batch

    def worked(self) -> list[tuple[str, float, float]]:
        """Return when servers sampled and verifiers judged since the last call, for the run's timeline."""
        return self._usage.worked()

    async def update(self, update: WeightUpdate) -> None:
        """Load one part of new weights. All requests pause from the first part to the last.

        Raises:
            WeightSyncError: the servers do not hold the weights that were sent. They no longer sample.
        """
        if self._open.is_set():
            self._open.clear()
            self._usage.slots.set(0.0)
            if self._recompute:
                await self._abort()
            await self.sampler.pause()
        await self.sampler.take_weights(update)
        if update.final:
            await self.sampler.resume()
            self.groups.update(update.version)
            self._open.set()
            self._pump()

    async def stop(self) -> None:
        """Abort all requests and keep the tokens sampled so far. The next pool continues from them."""
        self._stopping = True
        self._open.set()
        await self._abort()
        for task in self._tasks:  # tasks that wait for verdicts
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for work in self._work.values():
            self._left[work.group.cursor] = work.kept(self.groups.version)
        for kept in self._left.values():
            if sampled_tokens(kept.pieces) and not kept.verdicts:
                self.files.save(kept)

    def _pump(self) -> None:
        """Begin the groups that can begin, and wake a waiting step to check again."""
        if self._open.is_set() and not self._stopping:
            for group in self.groups.start():
                self._spawn(group)
            self._usage.slots.set(self.groups.busy)
        self._changed.set()

    def _spawn(self, group: Group) -> None:
        self.files.begin(group.cursor)
        left = self._left.pop(group.cursor, None)
        (prompt,) = self.rollouts.source.at(group.cursor, 1)
        pieces = [[] for _ in range(self.config.rollout.group_size)] if left is None else left.pieces
        work = self._work[group.cursor] = _Work(group, prompt, pieces)
        task = asyncio.create_task(self._begun(work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._pump()

    async def _begun(self, work: _Work) -> None:
        with self.files.running(work.group.cursor):
            await self._run(work)

    async def _run(self, work: _Work) -> None:
        """Sample a group and judge it."""
        if work.group.state == "sampling":
            try:
                await (self._sample(work) if self._player is None else self._play(work, self._player))
            except ServerLost as lost:
                self._usage.sampled += lost.tokens
                self._usage.waste("lost", lost.tokens)
                self._lose(work)
                return
            if self._stopping or work.dropped is not None:
                return
            self.groups.sampled(work.group.cursor)
            self._pump()
        if work.trajectories:
            self._judge(work, [one.verdict for one in work.trajectories])
            return
        items = [self.rollouts.batches.item(work.prompt, joined(parts)) for parts in work.pieces]
        with self._usage.judging.one_more():
            verdicts = await self.rollouts.verifiers.judge(items)
        if work.dropped is None:
            self._judge(work, verdicts)

    async def _play(self, work: _Work, player: EpisodePlayer) -> None:
        """Play the episodes of a group. It gets no trajectories if it is left meanwhile."""
        cursor = work.group.cursor
        assert self.rollouts.episodes is not None  # set whenever there is a player
        asked = self.rollouts.episodes.group(self.files.shard(cursor), cursor, work.prompt)
        playing = asyncio.ensure_future(player.play(asked))
        left = asyncio.ensure_future(work.leave.wait())
        self._calls += 1
        try:
            waits: set[asyncio.Future[Any]] = {playing, left}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                work.trajectories = playing.result()
                work.pieces = [one.sequences for one in work.trajectories]
                self._usage.sampled += sampled_tokens(work.pieces)
        finally:
            left.cancel()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            self._calls -= 1
            self._changed.set()

    async def _sample(self, work: _Work) -> None:
        """Sample the unfinished completions of a group, in as many calls as needed."""
        cursor, place = work.group.cursor, work.group.place
        assert place is not None
        while lacking := unfinished(work.pieces):
            await self._open.wait()
            if self._stopping or work.dropped is not None:
                return
            work.leave = asyncio.Event()
            requests = [self._request(work, at) for at in lacking]
            self._calls += 1
            try:
                sampled = await self.sampler.sample(
                    place,
                    requests,
                    shard=self.files.shard(cursor),
                    leave=work.leave,
                    ended=lambda *_: self._free(work, 1),
                )
            finally:
                self._calls -= 1
                self._changed.set()
            for at, piece in zip(lacking, sampled, strict=True):
                self._add(work, at, piece)
            self._free(work, work.group.requests - len(unfinished(work.pieces)))

    def _request(self, work: _Work, at: int) -> GenerateRequest:
        """Return the next request of a completion, which continues the tokens sampled so far."""
        parts, key = work.pieces[at], f"g{work.group.cursor}/c{at}"
        rollout = self.config.rollout
        so_far = sum((part.token_ids for part in parts), ())
        request = self.rollouts.request(
            f"{key}/{len(parts)}" if parts else key,
            work.prompt.token_ids + so_far,
            rollout.temperature,
        )
        if not parts:
            return request
        check_drawing(parts, self.config)
        parent = None if self._exact else parts[-1].routes
        return replace(request, max_tokens=request.max_tokens - len(so_far), parent=parent)

    def _add(self, work: _Work, at: int, piece: Completion) -> None:
        """Add the result of a request to its completion."""
        self._usage.sampled += len(piece.token_ids)
        if work.dropped is not None:
            self._usage.waste(work.dropped, len(piece.token_ids))
        elif piece.finish_reason == "abort" and (self.config.rollout.stop or not self._has_room(work, at, piece)):
            self._usage.waste("cut", len(piece.token_ids))
        elif piece.token_ids:
            work.pieces[at].append(piece)
        elif piece.finish_reason != "abort":
            raise EngineError("a request ended without a token", where={"request": piece.key})

    def _has_room(self, work: _Work, at: int, piece: Completion) -> bool:
        """Return whether the next piece of a completion fits into a microbatch together with this and earlier ones."""
        if not self._exact:
            return True
        so_far = sum(len(one.prompt_token_ids) + len(one.token_ids) for one in (*work.pieces[at], piece))
        longest = len(work.prompt.token_ids) + self.config.rollout.max_completion_tokens
        return so_far + longest <= self.config.train.microbatch_tokens

    def _free(self, work: _Work, requests: int) -> None:
        """Free the slots of ended requests for other groups."""
        if work.dropped is None and work.group.state == "sampling":
            self.groups.requests_ended(work.group.cursor, requests)
            self._pump()

    def _lose(self, work: _Work) -> None:
        """Put a group back to wait for another server."""
        cursor, place = work.group.cursor, work.group.place
        if place is not None:
            self.groups.lose(place)
        if self._stopping or work.dropped is not None:
            return
        kept = work.kept(self.groups.version)
        self.groups.put_back(cursor, requests=len(unfinished(kept.pieces)), kept=sampled_tokens(kept.pieces) > 0)
        self._left[cursor] = kept
        del self._work[cursor]

    def _count_lost_turns(self) -> None:
        """Count the episode tokens that lost servers had sampled since the last step. Other servers redo them."""
        if self._player is not None and (lost := self._player.lost_tokens - self._lost_tokens):
            self._usage.sampled += lost
            self._usage.waste("lost", lost)
            self._lost_tokens += lost

    def _judge(self, work: _Work, verdicts: Sequence[Verdict]) -> None:
        """Keep a judged group for the steps, or drop it."""
        rollout, cursor = self.config.rollout, work.group.cursor
        kept = work.kept(self.groups.version, verdicts)
        judged = self._judged(kept)
        self._verdicts += verdicts
        spared = sum(not one.informative and one.scored > 0 for one in self._refused)
        reason: Reason | None = None
        if not judged.scored:
            reason = "failed"
        elif not judged.informative and spared < (rollout.dynamic_sampling_rounds - 1) * rollout.prompts_per_step:
            reason = "uninformative"
        del self._work[cursor]
        self.groups.judged(cursor, reason)
        if reason is None:
            self.files.save(kept)
            self._left[cursor] = kept
            return
        self._refused.append(judged)
        self._usage.waste(reason, sampled_tokens(kept.pieces))
        if sum(not one.scored for one in self._refused) >= rollout.prompts_per_step:
            self.rollouts.batches.check(self._verdicts)  # a step may never find enough groups

    def _judged(self, kept: KeptGroup) -> PromptGroup:
        (prompt,) = self.rollouts.source.at(kept.cursor, 1)
        if kept.trajectories:
            return self.rollouts.batches.played(kept.cursor, prompt, kept.trajectories)
        return self.rollouts.batches.group(kept.cursor, prompt, kept.pieces, kept.verdicts)

    def _give_up(self, cursor: int, reason: Reason) -> None:
        """End the remaining work of a dropped group."""
        left, work = self._left.pop(cursor, None), self._work.pop(cursor, None)
        if left is not None:
            self._usage.waste(reason, sampled_tokens(left.pieces))
        if work is not None:
            self._usage.waste(reason, sampled_tokens(work.pieces))
            work.dropped = reason
            work.leave.set()

    async def _abort(self) -> None:
        """Abort all requests, and wait for the tokens that they had sampled."""
        for work in self._work.values():
            work.leave.set()
        while self._calls:
            self._changed.clear()
            await self._changed.wait()

    def _check_ages(self, step: int, groups: Sequence[KeptGroup]) -> None:
        """Raise PipelineError if a consumed token is older than allowed, or older than its group records."""
        for group in groups:
            for piece in all_pieces(group.pieces):
                oldest = max(group.oldest, step - 1 - self._staleness)
                if piece.oldest_version < oldest:
                    raise PipelineError(
                        "a completion is older than the step may train on",
                        where={"step": step, "group": group.cursor, "request": piece.key},
                        got=f"weight version {piece.oldest_version}",
                        expected=f"at least {oldest}",
                    )


def _slots(config: Config, places: int) -> int:
    """Return how many completions or episodes each place runs at once."""
    environment, most = config.task.environment, config.rollout.max_concurrent
    return most if environment is None else min(most, math.ceil(environment.concurrent / places))
