"""Runs the pool, `python -m moe_rl.rollout.pool FD PARENT_PID`: a separate process that samples while the ranks train.

    rank 0 (pool_client.PooledRollouts)            pool
    TakeBatch(step n + 1)  ---------------------->  samples the batch of step n + 1
    ... trains step n ...                                 |
                       <------------ BatchSampled -  the completions are on disk
    Update(n)  ---------------------------------->  loads the weights into the sampler, while completions are judged
    TakeBatch(step n + 2)  ---------------------->  samples the batch of step n + 2
                       <-------------- BatchTaken -  the batch of step n + 1 is on disk

It owns the sampler, the verifiers, the prompts, their ledger and the kept rollouts. Calls are answered in the order in
which they come, so weights never change while a batch is sampled. A thread waits for the verdicts. In mode async the
pool samples groups one by one without a break, and takes new weights meanwhile (pool_groups.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import MoeRLError
from moe_rl.messages import Channel, Message
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_model
from moe_rl.rollout import pool_wire as wire
from moe_rl.rollout.pool_groups import GroupPool
from moe_rl.rollout.rollouts import Rollouts, Unjudged, start_sampler
from moe_rl.rollout.sampler import Blocking, Sampler
from moe_rl.rollout.trajectories import EpisodePlayer, LivePlayer
from moe_rl.tasks.prompts import load_task
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
from moe_rl.tasks.verifiers import VerifierPool
from moe_rl.trace import TraceStore
from moe_rl.vllm.process import channel_to_parent
from moe_rl.vllm.wire import Alive, AskCounts, Close, Counted, Score, Update, Wake

_ALIVE_SECONDS = 0.5


class Environments(Protocol):
    """Makes the players of a run's episodes. The gateway implements it, as this room may not import that one."""

    def beside(self, config: Config, facts: ModelFacts, sampler: Sampler, run_dir: Path) -> LivePlayer:
        """Return a player for the pool's event loop, not yet open."""
        ...

    def alone(
        self, config: Config, facts: ModelFacts, sampler: Sampler, run_dir: Path
    ) -> AbstractContextManager[EpisodePlayer]:
        """Return a player with its own thread."""
        ...


def main(environments: Environments | None = None) -> None:
    """Run the pool. environments: needed if the config has an environment."""
    line = _PoolLine(channel_to_parent(wire.CALLS))
    with ExitStack() as stack:
        try:
            call = line.receive()
            assert isinstance(call, wire.OpenPool)  # rank 0 sends it first, and only once
            with line.beating():
                rollouts, player = _open(call.run_dir, call.config, stack, environments)
        except Exception as error:
            line.answer(_failed(error))
            return
        engine = rollouts.engine
        line.answer(wire.PoolOpened(engine.vllm_version, engine.workers, engine.address))
        if rollouts.config.pipeline.by_group:
            asyncio.run(_by_group(line, GroupPool(rollouts, engine.sampler, call.run_dir, player), player))
        else:
            _by_batch(line, rollouts)
    os._exit(0)


def _by_batch(line: _PoolLine, rollouts: Rollouts) -> None:
    """Answer calls one by one until rank 0 closes. A thread judges the batches in order."""
    judging = ThreadPoolExecutor(1)
    with line.beating():
        while not isinstance(call := line.receive(), Close):
            assert not isinstance(call, wire.OpenPool)
            try:
                if isinstance(call, wire.TakeBatch):
                    parts: list[tuple[str, float, float]] = []
                    unjudged = rollouts.sample(call.step, _clock(parts))
                    line.send(wire.BatchSampled(call.step, parts))
                    judging.submit(_judge, line, rollouts, unjudged)
                    continue
                reply: Message = _reply(rollouts, call)
            except Exception as error:
                reply = _failed(error)
            line.answer(reply)


def _judge(line: _PoolLine, rollouts: Rollouts, unjudged: Unjudged) -> None:
    """Answer a call for a batch once the whole batch is judged."""
    parts: list[tuple[str, float, float]] = []
    try:
        rollouts.keep(unjudged.step, rollouts.judge(unjudged, _clock(parts)))
        reply: Message = wire.BatchTaken(unjudged.step, parts)
    except Exception as error:
        reply = _failed(error)
    line.answer(reply)


def _clock(parts: list[tuple[str, float, float]]) -> Clock:
    """Return a clock that adds each part to `parts` as it ends."""
    return Clock(ended=lambda *part: parts.append(part))


async def _by_group(line: _PoolLine, pool: GroupPool, player: LivePlayer | None) -> None:
    """Answer calls one by one until rank 0 closes, while groups are sampled and judged."""
    if player is not None:
        await player.open()

    async def beat() -> None:
        while True:
            await asyncio.sleep(_ALIVE_SECONDS)
            line.beat()

    beats = asyncio.create_task(beat())
    while not isinstance(call := await asyncio.to_thread(line.receive), Close):
        assert not isinstance(call, wire.OpenPool)
        try:
            reply: Message = await pool.answer(call)
        except Exception as error:
            reply = _failed(error)
        line.answer(reply)
    beats.cancel()
    await pool.close()
    if player is not None:
        await player.close()


def _open(
    run_dir: Path, config_file: Path, stack: ExitStack, environments: Environments | None
) -> tuple[Rollouts, LivePlayer | None]:
    """Start the sampler and the verifiers or player. Return the player only if groups are played one by one."""
    config = load_config(config_file)
    facts, store = read_model(config.model.path), TraceStore(run_dir / "trace")
    task = load_task(config, TextCodec(config.model.path, stop_tokens(config, facts), config.rollout.stop))
    if config.task.environment is None:
        verifiers = stack.enter_context(VerifierPool.of(config.task))
        engine = stack.enter_context(Blocking(start_sampler(config, facts, run_dir)))
        return Rollouts(config, facts, task, engine, verifiers, run_dir, store), None
    assert environments is not None  # rank 0 starts the module that provides them
    engine = stack.enter_context(Blocking(start_sampler(config, facts, run_dir)))
    given = config, facts, engine.sampler, run_dir
    if config.pipeline.by_group:
        rollouts = Rollouts(config, facts, task, engine, None, run_dir, store)
        return rollouts, environments.beside(*given)
    alone = stack.enter_context(environments.alone(*given))
    return Rollouts(config, facts, task, engine, None, run_dir, store, alone), None


def _reply(rollouts: Rollouts, call: wire.Call) -> wire.Reply:
    engine = rollouts.engine
    match call:
        case wire.RetainSteps(steps):
            rollouts.retain(steps)
            return wire.StepsRetained()
        case wire.EvaluatePolicy(step):
            return wire.PolicyEvaluated(rollouts.evaluate(step))
        case Score(runs, shard):
            return wire.RunsScored(engine.score(runs, shard=shard))
        case AskCounts():
            return Counted(engine.counts())
        case Update(update):
            engine.update_weights(update)
            return wire.SamplerUpdated(engine.workers)
        case Wake(part):
            engine.wake(part)
            return wire.SamplerUpdated(engine.workers)
        case wire.TakeBatch() | wire.BeginGroups():
            raise ValueError("not answered here: batches are taken in two parts, and only a pool of groups begins them")


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
        """Send a sign of life if a call is unanswered."""
        with self._sending:
            if self._unanswered:
                self._channel.send(Alive())

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send signs of life from a thread, while this one may be busy for long."""
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
