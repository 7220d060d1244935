"""Runs the pool, `python -m moe_rl.rollout.pool FD PARENT_PID`: a separate process that samples while the ranks train.

    rank 0 (pool_client.PooledRollouts)            pool
    TakeBatch(step n + 1)  ---------------------->  samples the batch of step n + 1
    ... trains step n ...                                 |
                       <------------ BatchSampled -  the completions are on disk
    Update(n)  ---------------------------------->  loads the weights into the sampler, while completions are judged
    TakeBatch(step n + 2)  ---------------------->  samples the batch of step n + 2
                       <-------------- BatchTaken -  the batch of step n + 1 is on disk

It owns the sampler, the verifiers, the prompts, their ledger and the kept rollouts, all in one event loop.

consumes    calls of rank 0, in the order in which they come, so weights never change while a batch is sampled
waits for   the sampler; batches wait for verdicts in tasks. In mode async, groups are sampled one by one without a
            break (group_feed.py), and new weights go in meanwhile.
unblocks    rank 0, by an answer to each call; a batch is answered when it is on disk
produces    files of batches and groups, and deletes them when rank 0 says which steps it still needs
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moe_rl import prometheus
from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import MoeRLError
from moe_rl.messages import Channel, Message
from moe_rl.models.hf import read_model
from moe_rl.rollout import pool_client as wire
from moe_rl.rollout.group_feed import GroupFeed
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.rollouts import Environment, Rollouts, Unjudged
from moe_rl.tasks.prompts import load_task
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
from moe_rl.vllm.process import channel_to_parent
from moe_rl.vllm.wire import Alive, Close, Score, Update, Wake

_ALIVE_SECONDS = 0.5


def main(environment: Environment | None = None) -> None:
    """Run the pool. environment: needed if the config has one."""
    line = _PoolLine(channel_to_parent(wire.CALLS))
    with ExitStack() as stack:
        try:
            call = line.receive()
            assert isinstance(call, wire.OpenPool)  # rank 0 sends it first, and only once
            with line.beating():
                rollouts = _open(call.run_dir, call.config, stack, environment)
                port, states = _port(rollouts.config), dict[str, float]()
                stack.enter_context(prometheus.serving(port, call.run_dir.name, states.copy))
        except Exception as error:
            line.answer(_failed(error))
            return
        sampler = rollouts.sampler
        line.answer(wire.PoolOpened(sampler.vllm_version, sampler.workers, sampler.address))
        asyncio.run(_Pool(line, rollouts, call.run_dir, states).serve())
    os._exit(0)


def _open(run_dir: Path, config_file: Path, stack: ExitStack, environment: Environment | None) -> Rollouts:
    config = load_config(config_file)
    facts = read_model(config.model.path)
    task = load_task(config, TextCodec(config.model.path, stop_tokens(config, facts), config.rollout.stop))
    return Rollouts.start(config, facts, task, run_dir, stack, environment)


def _port(config: Config) -> int | None:
    """Return the port for the numbers of groups. Only a feed has them."""
    port = config.report.prometheus_port
    return port + 1 if port is not None and config.pipeline.by_group else None


class _Pool:
    """Answers rank 0's calls."""

    def __init__(self, line: _PoolLine, rollouts: Rollouts, run_dir: Path, states: dict[str, float]):
        """states: filled with how many groups of the feed are in which state."""
        self._line, self._rollouts, self._sampler = line, rollouts, rollouts.sampler
        self._files = GroupFiles(run_dir / "groups", rollouts.kept, rollouts.ledger)
        self._feed: GroupFeed | None = None  # in mode async, once rank 0 has sent the step and the weight version
        self._order, self._judging = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._states = states

    async def serve(self) -> None:
        """Answer calls until rank 0 closes."""
        await self._rollouts.open()
        self._spawn(self._beat())
        while not isinstance(call := await asyncio.to_thread(self._line.receive), Close):
            assert not isinstance(call, wire.OpenPool)
            self._spawn(self._answer(call))
        if self._feed is not None:
            await self._feed.stop()
        await self._rollouts.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_SECONDS)
            self._line.beat()
            if self._feed is not None:
                self._states.update(self._feed.states())

    async def _answer(self, call: wire.Call) -> None:
        """Answer a call, after those that came before. Only files are deleted at once."""
        try:
            if isinstance(call, wire.RetainSteps):
                # Without a feed nobody knows which groups of an earlier process are still needed: all are kept.
                kept = self._rollouts.kept if self._feed is None else self._files
                await asyncio.to_thread(kept.unneeded(call.steps))
                reply: Message | None = wire.StepsRetained()
            else:
                async with self._order:
                    reply = await self._reply(call)
        except Exception as error:
            reply = _failed(error)
        if reply is not None:
            self._line.answer(reply)

    async def _reply(self, call: wire.Call) -> wire.Reply | None:
        """Return the answer; None if a task gives it later."""
        match call:
            case wire.BeginGroups(step, version):
                self._feed = GroupFeed(self._rollouts, self._files, step=step, version=version)
                await self._feed.begin()
                return wire.GroupsBegun(self._feed.unusable)
            case wire.TakeBatch(step):
                if self._feed is not None:
                    await self._feed.take(step)
                    return wire.BatchTaken(step, self._feed.worked())
                parts: list[tuple[str, float, float]] = []
                unjudged = await self._rollouts.sample(step, _clock(parts))
                self._line.send(wire.BatchSampled(step, parts))
                self._spawn(self._judge(unjudged))
                return None
            case wire.EvaluatePolicy(step):
                return wire.PolicyEvaluated(await self._rollouts.evaluate(step))
            case Score(runs, shard):
                return wire.RunsScored(await self._sampler.score(runs, shard=shard))
            case Wake(part):
                await self._sampler.wake(part)
                return wire.SamplerUpdated(self._sampler.workers)
            case Update(update):
                player = self._rollouts.player
                if player is not None:
                    player.hold()
                await (self._sampler.take_weights if self._feed is None else self._feed.update)(update)
                if player is not None and update.final:
                    player.updated(update.version)
                return wire.SamplerUpdated(self._sampler.workers)
            case wire.RetainSteps():
                raise AssertionError  # answered at once

    async def _judge(self, unjudged: Unjudged) -> None:
        """Answer a call for a batch once the whole batch is judged. Batches are judged in order."""
        parts: list[tuple[str, float, float]] = []
        try:
            async with self._judging:
                await self._rollouts.keep(unjudged, _clock(parts))
            reply: Message = wire.BatchTaken(unjudged.step, parts)
        except Exception as error:
            reply = _failed(error)
        self._line.answer(reply)


def _clock(parts: list[tuple[str, float, float]]) -> Clock:
    """Return a clock that adds each part to `parts` as it ends."""
    return Clock(ended=lambda *part: parts.append(part))


def _failed(error: Exception) -> wire.PoolFailed:
    traceback.print_exc()
    kind = type(error).__name__
    return (
        wire.PoolFailed(kind, str(error)) if isinstance(error, MoeRLError) else wire.PoolFailed("", f"{kind}: {error}")
    )


class _PoolLine:
    """Holds the socket to rank 0."""

    def __init__(self, channel: Channel):
        self._channel, self._sending = channel, threading.Lock()
        self._unanswered = 0  # calls

    def receive(self) -> wire.OpenPool | wire.Call | Close:
        try:
            call = self._channel.receive()
        except (EOFError, OSError):
            return Close()
        with self._sending:
            self._unanswered += 1
        return call

    def answer(self, reply: Message) -> None:
        """Answer a call."""
        with self._sending:
            self._unanswered -= 1
            self._channel.send(reply)

    def send(self, news: Message) -> None:
        """Send a message that does not complete a call."""
        with self._sending:
            self._channel.send(news)

    def beat(self) -> None:
        """Send a sign of life if a call is unanswered, unless many are unread, as while rank 0 trains."""
        with self._sending:
            # Linux calls a socket writable while three quarters of its buffer are free: a sign goes out whole, at once,
            # and leaves room for news.
            if self._unanswered and select.select([], [self._channel.socket], [], 0)[1]:
                self._channel.send(Alive())

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send signs of life from a thread, while the main thread starts the sampler."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_ALIVE_SECONDS):
                self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


if __name__ == "__main__":
    main()
