"""Runs the pool, `python -m moe_rl.rollout.pool FD PARENT_PID`: a process beside rank 0 that samples while the ranks
train.

    rank 0 (pool_client.PooledRollouts)            pool
    TakeBatch(step n + 1)  ---------------------->  samples, verifies, keeps the batch of step n + 1
    ... trains step n ...                                 |
                       <-------------- BatchTaken -  the batch is on disk
    UpdateSampler(n)  --------------------------->  loads the weights into the sampler

It owns the sampler, the verifiers, the prompts, their ledger and the kept rollouts. Calls are answered in the order in
which they come, so weights never change while a batch is sampled.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from contextlib import ExitStack, closing
from pathlib import Path

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.errors import MoeRLError
from moe_rl.messages import Channel, Message
from moe_rl.models.hf import read_model
from moe_rl.parent import belong_to
from moe_rl.rollout import pool_wire as wire
from moe_rl.rollout.rollouts import Rollouts, start_sampler
from moe_rl.tasks.prompts import load_task
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
from moe_rl.tasks.verifiers import VerifierPool
from moe_rl.trace import TraceStore
from moe_rl.vllm.process import outlive_a_full_log

_ALIVE_SECONDS = 0.5


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    belong_to(parent)
    outlive_a_full_log()
    line = _PoolLine(Channel(socket.socket(fileno=descriptor), wire.CALLS))
    with ExitStack() as stack:
        try:
            call = line.receive()
            assert isinstance(call, wire.OpenPool)  # rank 0 sends it first, and only once
            rollouts = _open(call.run_dir, call.config, stack)
        except Exception as error:
            line.answer(_failed(error))
            return
        engine = rollouts.engine
        line.answer(wire.PoolOpened(engine.vllm_version, engine.workers, engine.address))
        while not isinstance(call := line.receive(), wire.ClosePool):
            assert not isinstance(call, wire.OpenPool)
            try:
                reply: Message = _reply(rollouts, call)
            except Exception as error:
                reply = _failed(error)
            line.answer(reply)
    os._exit(0)


def _open(run_dir: Path, config_file: Path, stack: ExitStack) -> Rollouts:
    config = load_config(config_file)
    facts = read_model(config.model.path)
    task = load_task(config, TextCodec(config.model.path, stop_tokens(config, facts), config.rollout.stop))
    verifiers = stack.enter_context(VerifierPool.of(config.task))
    engine = stack.enter_context(closing(start_sampler(config, facts, run_dir)))
    return Rollouts(config, facts, task, engine, verifiers, run_dir, TraceStore(run_dir / "trace"))


def _reply(rollouts: Rollouts, call: wire.Call) -> wire.Reply:
    engine = rollouts.engine
    match call:
        case wire.TakeBatch(step):
            parts: list[tuple[str, float, float]] = []
            rollouts.take(step, Clock(ended=lambda *part: parts.append(part)))
            return wire.BatchTaken(step, parts)
        case wire.EvaluatePolicy(step):
            return wire.PolicyEvaluated(rollouts.evaluate(step))
        case wire.ScoreRuns(runs, shard):
            return wire.RunsScored(engine.score(runs, shard=shard))
        case wire.AskPoolCounts():
            return wire.PoolCounted(engine.counts())
        case wire.UpdateSampler(update):
            engine.update_weights(update)
            return wire.SamplerUpdated(engine.workers)


def _failed(error: Exception) -> wire.PoolFailed:
    traceback.print_exc()
    kind = type(error).__name__
    return (
        wire.PoolFailed(kind, str(error)) if isinstance(error, MoeRLError) else wire.PoolFailed("", f"{kind}: {error}")
    )


class _PoolLine:
    """Holds the socket to rank 0. A thread sends signs of life from each call on until it is answered."""

    def __init__(self, channel: Channel):
        self._channel, self._sending, self._works = channel, threading.Lock(), threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def receive(self) -> wire.OpenPool | wire.Call | wire.ClosePool:
        try:
            call = self._channel.receive()
        except (EOFError, OSError):
            return wire.ClosePool()
        self._works.set()
        return call

    def answer(self, reply: Message) -> None:
        self._works.clear()
        with self._sending:
            self._channel.send(reply)

    def _beat(self) -> None:
        while True:
            self._works.wait()
            time.sleep(_ALIVE_SECONDS)
            with self._sending:
                if self._works.is_set():
                    self._channel.send(wire.PoolAlive())


if __name__ == "__main__":
    main()
