"""Keeps the samplers busy with groups, judges each as soon as it is sampled, and gives every step its batch.

    groups.py (which, where, when)
        -> sampler.sample -> verifiers.judge -> group file -> take: batch, prompt ledger, kept rollouts

consumes    prompts, and new weights from rank 0
waits for   a free slot of the sampler, verdicts, and room for another group (groups.py)
unblocks    a step that waits for its batch, when enough groups are ready
produces    batches, lines of the prompt ledger, and group files

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
from dataclasses import replace
from typing import Any, get_args

from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, PipelineError
from moe_rl.rollout.batches import PromptGroup, check_drawing, discarded, recorded
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.groups import Group, Groups, Reason, State, all_pieces, joined, sampled_tokens, unfinished
from moe_rl.rollout.kept import RolloutBatch
from moe_rl.rollout.pipeline_metrics import Usage, of_consumed, of_dropped
from moe_rl.rollout.rollouts import Rollouts
from moe_rl.rollout.sampler import ServerLost
from moe_rl.types import Completion, GenerateRequest, Prompt, Verdict
from moe_rl.weights.update import WeightUpdate


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
        held = list(files.load(rollouts.source, self.unusable, self._fits))
        self._slots = _slots(config, len(self.sampler.places))
        self.groups = Groups(
            dict.fromkeys(self.sampler.places, self._slots),
            batch=config.rollout.prompts_per_step,
            size=config.rollout.group_size,
            staleness=self._staleness,
            spare=math.ceil(pipeline.oversample * config.rollout.prompts_per_step),
            patient=pipeline.late == "wait",
            last=config.run.steps,
            step=step,
            version=version,
            ended=rollouts.ledger.ended(step - 1),
            held=held,
        )
        for group in held:
            if group.cursor not in self.groups:
                files.remove(group.cursor)
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
        refused, self._refused, self._verdicts = self._refused, [], []  # for the next step
        self._check_ages(step, taken.groups)
        for group in taken.given_up:
            assert group.dropped is not None
            self._usage.waste(group.dropped, sampled_tokens(group.pieces))
            group.leave.set()
        self._pump()
        chosen = [self._judged(group, group.verdicts) for group in taken.groups]
        batch = self.rollouts.batches.make(step, [*chosen, *refused], chosen, exact=self._exact)
        counts = await self.sampler.counts()
        self._count_lost_turns()
        batch.metrics.update(
            of_consumed(step, taken.groups)
            | of_dropped(taken.dropped)
            | self._usage.next()
            | self.rollouts.lost_servers(),
            **recorded(self._counts, counts),
            **{"pipeline/queued": len(self.groups.all("ready"))},
        )
        if self.config.rollout.dynamic_sampling_rounds > 1:
            lacking = sum(not group.informative for group in chosen)
            batch.metrics.update(discarded(len(chosen) + len(refused), len(chosen), lacking))
        self._counts = counts
        self.rollouts.store.check_published({shard for group in chosen for shard in group.shards})
        ids = [group.prompt.id for group in chosen]
        self.rollouts.ledger.record(step - 1, taken.cursors, ids, batch.digest, taken.dropped)
        self.rollouts.kept.save(step, batch)
        self.files.counted(step, taken.cursors, [cursor for cursor, _ in taken.dropped])
        return batch

    def states(self) -> dict[str, float]:
        """Return how many groups are in each state."""
        return {f"pool_groups_{state}": len(self.groups.all(state)) for state in get_args(State)}

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
            self.groups.update(update.version, dict.fromkeys(self.sampler.places, self._slots))
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
        for group in self.groups:
            if sampled_tokens(group.pieces) and not group.verdicts:
                self._save(group)

    def _pump(self) -> None:
        """Begin the groups that can begin, and wake a waiting step to check again."""
        if self._open.is_set() and not self._stopping:
            for group in self.groups.start():
                self._spawn(group)
            self._usage.slots.set(self.groups.busy)
        self._changed.set()

    def _spawn(self, group: Group) -> None:
        self.files.begin(group.cursor)
        group.leave = asyncio.Event()
        task = asyncio.create_task(self._begun(group))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._pump()

    async def _begun(self, group: Group) -> None:
        with self.files.running(group.cursor):
            await self._run(group, self._prompt(group))

    async def _run(self, group: Group, prompt: Prompt) -> None:
        """Sample a group and judge it."""
        if group.state == "sampling":
            try:
                await (self._sample if self._player is None else self._play)(group, prompt)
            except ServerLost as lost:
                self._usage.sampled += lost.tokens
                self._usage.waste("lost", lost.tokens)
                self._lose(group)
                return
            if self._stopping or group.dropped is not None:
                return
            self.groups.sampled(group.cursor)
            self._pump()
        if group.trajectories:
            self._judge(group, [trajectory.verdict for trajectory in group.trajectories])
            return
        items = [self.rollouts.batches.item(prompt, joined(parts)) for parts in group.pieces]
        with self._usage.judging.one_more():
            verdicts = await self.rollouts.verifiers.judge(items)
        if group.dropped is None:
            self._judge(group, verdicts)

    async def _play(self, group: Group, prompt: Prompt) -> None:
        """Play the episodes of a group. It gets no trajectories if it is left meanwhile."""
        cursor = group.cursor
        assert self.rollouts.episodes is not None and self._player is not None
        asked = self.rollouts.episodes.group(self.files.shard(cursor), cursor, prompt)
        playing = asyncio.ensure_future(self._player.play(asked))
        left = asyncio.ensure_future(group.leave.wait())
        self._calls += 1
        try:
            waits: set[asyncio.Future[Any]] = {playing, left}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                group.trajectories = playing.result()
                group.pieces = [trajectory.sequences for trajectory in group.trajectories]
                self._usage.sampled += sampled_tokens(group.pieces)
        finally:
            left.cancel()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            self._calls -= 1
            self._changed.set()

    async def _sample(self, group: Group, prompt: Prompt) -> None:
        """Sample the unfinished completions of a group, in as many calls as needed."""
        while lacking := unfinished(group.pieces):
            await self._open.wait()
            if self._stopping or group.dropped is not None:
                return
            if group.place is None:
                raise ServerLost("a server was lost between two calls of a group")
            group.leave = asyncio.Event()
            requests = [self._request(group, prompt, index) for index in lacking]
            self._calls += 1
            try:
                sampled = await self.sampler.sample(
                    group.place,
                    requests,
                    shard=self.files.shard(group.cursor),
                    leave=group.leave,
                    ended=lambda *_: self._free(group, 1),
                )
            finally:
                self._calls -= 1
                self._changed.set()
            for index, piece in zip(lacking, sampled, strict=True):
                self._add(group, prompt, index, piece)
            self._free(group, group.requests - len(unfinished(group.pieces)))

    def _request(self, group: Group, prompt: Prompt, index: int) -> GenerateRequest:
        """Return the next request of a completion, which continues the tokens sampled so far."""
        parts, key = group.pieces[index], f"g{group.cursor}/c{index}"
        rollout = self.config.rollout
        so_far = sum((part.token_ids for part in parts), ())
        request = self.rollouts.request(
            f"{key}/{len(parts)}" if parts else key, prompt.token_ids + so_far, rollout.temperature
        )
        if not parts:
            return request
        check_drawing(parts, self.config)
        parent = None if self._exact else parts[-1].routes
        return replace(request, max_tokens=request.max_tokens - len(so_far), parent=parent)

    def _add(self, group: Group, prompt: Prompt, index: int, piece: Completion) -> None:
        """Add the result of a request to its completion."""
        self._usage.sampled += len(piece.token_ids)
        parts, cut = group.pieces[index], piece.finish_reason == "abort"
        if group.dropped is not None:
            self._usage.waste(group.dropped, len(piece.token_ids))
        elif cut and (self.config.rollout.stop or not self._has_room(prompt, [*parts, piece])):
            self._usage.waste("cut", len(piece.token_ids))
        elif piece.token_ids:
            parts.append(piece)
        elif piece.finish_reason != "abort":
            raise EngineError("a request ended without a token", where={"request": piece.key})

    def _has_room(self, prompt: Prompt, parts: Sequence[Completion]) -> bool:
        """Return whether the next piece of a completion fits into a microbatch together with these."""
        if not self._exact:
            return True
        so_far = sum(len(part.prompt_token_ids) + len(part.token_ids) for part in parts)
        longest = len(prompt.token_ids) + self.config.rollout.max_completion_tokens
        return so_far + longest <= self.config.train.microbatch_tokens

    def _fits(self, group: Group) -> bool:
        """Return whether the microbatches hold a group of an earlier process, whose microbatches may have been larger.
        What is unfinished needs room for another piece."""
        most, environment = self.config.train.microbatch_tokens, self.config.task.environment
        if environment is not None:
            return all(trajectory.fits(environment.credit, most) for trajectory in group.trajectories)
        prompt, continued = self._prompt(group), unfinished(group.pieces)
        return not self._exact or all(
            self._has_room(prompt, parts) if index in continued else sum(part.forwarded for part in parts) <= most
            for index, parts in enumerate(group.pieces)
        )

    def _free(self, group: Group, requests: int) -> None:
        """Free the slots of ended requests for other groups."""
        if group.dropped is None and group.state == "sampling":
            self.groups.requests_ended(group.cursor, requests)
            self._pump()

    def _lose(self, group: Group) -> None:
        """Put a group back to wait for another server."""
        if group.place is not None and group.place not in self.sampler.places:  # else it has returned meanwhile
            self.groups.lose(group.place)
        if not self._stopping and group.dropped is None:
            left, kept = len(unfinished(group.pieces)), sampled_tokens(group.pieces) > 0
            self.groups.put_back(group.cursor, requests=left, kept=kept)

    def _count_lost_turns(self) -> None:
        """Count the episode tokens that lost servers had sampled since the last step. Other servers redo them."""
        if self._player is not None and (lost := self._player.lost_tokens - self._lost_tokens):
            self._usage.sampled += lost
            self._usage.waste("lost", lost)
            self._lost_tokens += lost

    def _judge(self, group: Group, verdicts: list[Verdict]) -> None:
        """Keep a judged group for the steps, or drop it."""
        rollout, judged = self.config.rollout, self._judged(group, verdicts)
        self._verdicts += verdicts
        spared = sum(not refused.informative and refused.scored > 0 for refused in self._refused)
        reason: Reason | None = None
        if not judged.scored:
            reason = "failed"
        elif not judged.informative and spared < (rollout.dynamic_sampling_rounds - 1) * rollout.prompts_per_step:
            reason = "uninformative"
        self.groups.judged(group.cursor, reason)
        if reason is None:
            group.verdicts = verdicts
            self._save(group)
            return
        self._refused.append(judged)
        self._usage.waste(reason, sampled_tokens(group.pieces))
        if sum(not refused.scored for refused in self._refused) >= rollout.prompts_per_step:
            self.rollouts.batches.check(self._verdicts)  # a step may never find enough groups

    def _prompt(self, group: Group) -> Prompt:
        (prompt,) = self.rollouts.source.at(group.cursor, 1)
        return prompt

    def _save(self, group: Group) -> None:
        group.version = self.groups.version
        self.files.save(group, self._prompt(group))

    def _judged(self, group: Group, verdicts: Sequence[Verdict]) -> PromptGroup:
        numbered_prompt = group.cursor, self._prompt(group)
        if group.trajectories:
            return self.rollouts.batches.played(*numbered_prompt, group.trajectories)
        return self.rollouts.batches.group(*numbered_prompt, group.pieces, verdicts)

    async def _abort(self) -> None:
        """Abort all requests, and wait for the tokens that they had sampled."""
        for group in self.groups:
            group.leave.set()
        while self._calls:
            self._changed.clear()
            await self._changed.wait()

    def _check_ages(self, step: int, groups: Sequence[Group]) -> None:
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
