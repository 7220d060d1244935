"""Runs the engine process, `python -m moe_rl.vllm.child FD PARENT_PID`: answers numbered calls with vLLM, several at a
time."""

from __future__ import annotations

import os
import select
import sys
import tempfile
import time
import traceback
from pathlib import Path

from moe_rl.disk import reason
from moe_rl.errors import MoeRLError, WeightSyncError, is_refusal
from moe_rl.messages import Channel
from moe_rl.vllm import wire
from moe_rl.vllm.child_engine import ChildEngine
from moe_rl.vllm.process import channel_to_parent

_ALIVE_SECONDS = 0.5


def main() -> int:
    channel = channel_to_parent(wire.CALLS)
    pulse = _Pulse(channel)
    try:
        start = channel.receive()
        assert isinstance(start, wire.Start)  # the parent sends it first, and only once
        engine = ChildEngine(start.settings, pulse)
    except Exception as error:
        traceback.print_exc()
        channel.send(_failure(error))
        return 1
    channel.send(wire.Ready(engine.vllm_version))
    while True:
        # vLLM makes one step between two polls of the channel. Without work this waits, and during a pause sends signs
        # of life.
        seconds = 0.0 if engine.has_work() else _ALIVE_SECONDS if engine.running else None
        if select.select([channel.socket], [], [], seconds)[0]:
            sound = _take(channel, engine)
        else:
            sound = _step(channel, engine)
            pulse()
        if not sound:
            return 1


def _take(channel: Channel, engine: ChildEngine) -> bool:
    """Handle one message. Returns whether the engine can continue."""
    try:
        message = channel.receive()
    except EOFError:
        message = wire.Close()
    if isinstance(message, wire.Close):
        sys.stdout.flush()
        # vLLM's own shutdown takes seconds and has nothing to save.
        os._exit(0)
    if isinstance(message, wire.Leave):
        engine.leave(message.number)
        return True
    assert isinstance(message, wire.Numbered)
    try:
        reply = engine.answer(message.number, message.call)
    except Exception as error:
        traceback.print_exc()
        channel.send(wire.Answered(message.number, _failure(error)))
        # If vLLM itself failed, the state of its caches and weights is unknown.
        return isinstance(error, MoeRLError)
    if reply is not None:
        channel.send(wire.Answered(message.number, reply))
    return True


def _step(channel: Channel, engine: ChildEngine) -> bool:
    """Make one step of vLLM and answer the calls that end with it. Returns whether the engine can continue."""
    if not engine.has_work():
        return True
    try:
        ended = engine.step()
    except Exception as error:
        traceback.print_exc()
        for number in engine.running:
            channel.send(wire.Answered(number, _failure(error)))
        return False
    for news in engine.news():
        channel.send(news)
    for number, reply in ended:
        if isinstance(reply, Exception):
            traceback.print_exception(reply)
            channel.send(wire.Answered(number, _failure(reply)))
            if not isinstance(reply, MoeRLError):
                return False
        else:
            channel.send(wire.Answered(number, reply))
    return True


class _Pulse:
    """Reports progress to the parent, at limited frequency."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._sent = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._sent >= _ALIVE_SECONDS:
            self._sent = now
            self._channel.send(wire.Alive())


def _failure(error: Exception) -> wire.Failed:
    text = str(error) if isinstance(error, MoeRLError) else reason(error, Path(tempfile.gettempdir()))
    return wire.Failed(text, isinstance(error, WeightSyncError), is_refusal(error))


if __name__ == "__main__":
    sys.exit(main())
