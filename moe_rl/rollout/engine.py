"""Runs one vLLM engine in a child process: a `Sampler` with one place. Imports neither vLLM nor torch.

    parent (rank 0, or the pool)                child (moe_rl.vllm.child)
    VllmEngine.sample(0, requests)  -- Generate -->  vLLM, in-process
                                    <-- Alive ----   after every step
                                    <-- RequestsEnded -  completions, as they end
                                    <-- Generated -  tokens, logprobs, references to routes
                                                     routes ----> trace store

Several calls may run at once, see `NumberedCalls`. A child that ends or stops answering raises SamplerGone in each,
see `child_process`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Unpack

from moe_rl.errors import EngineError, RequestRefused, WeightSyncError
from moe_rl.messages import Message
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.rollout.sampler import CallOptions, nobody
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm import wire
from moe_rl.vllm.process import child_environment
from moe_rl.vllm.wire import EngineSettings
from moe_rl.weights.update import Holding, WeightUpdate

_Hears = Callable[[list[tuple[int, Completion]]], None]


class NumberedCalls:
    """Sends numbered calls to a started child, and receives on its own thread while any call is pending.

    If the child dies, hangs or sends an invalid reply, every pending call fails with that error.
    """

    def __init__(self, child: ChildProcess):
        self._child = child
        self._numbers = itertools.count()
        # Guards the state shared by the receiving thread and the callers. It is not held while a call is sent: the
        # child may not read until its own reply has been read.
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[int, tuple[Future[Message], _Hears]] = {}
        self._receiver: threading.Thread | None = None

    def submit(self, call: wire.Call, hears: _Hears = lambda completions: None) -> tuple[int, Future[Message]]:
        """Send a call. Returns its number, and the future that gets its reply or SamplerGone.

        hears: called on the receiving thread with the completions that have ended, see wire.RequestsEnded.
        """
        answer: Future[Message] = Future()
        answer.set_running_or_notify_cancel()  # the caller can no longer cancel it
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer, hears
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive, name="replies of the engine", daemon=True)
                self._receiver.start()
        self._send(wire.Numbered(number, call))
        return number, answer

    def leave(self, number: int) -> None:
        """End a Generate call early, see wire.Leave."""
        with self._lock:
            known = number in self._waiting
        if known:
            self._send(wire.Leave(number))

    def _send(self, message: Message) -> None:
        with self._sending:
            self._child.send(message)

    def _receive(self) -> None:
        """Hand out replies while calls wait for them."""
        while True:
            try:
                message = self._child.receive()
                numbered = isinstance(message, wire.Answered | wire.RequestsEnded)
                with self._lock:
                    call = self._waiting.get(message.number) if numbered else None
                if call is None:
                    raise self._child.broken("sent an invalid frame", type(message).__name__)
            except EngineError as error:
                with self._lock:
                    left, self._waiting, self._receiver = self._waiting, {}, None
                for answer, _ in left.values():
                    answer.set_exception(error)
                return
            answer, hears = call
            if isinstance(message, wire.RequestsEnded):
                hears(message.completions)
                continue
            with self._lock:
                del self._waiting[message.number]
                if last := not self._waiting:
                    self._receiver = None
            answer.set_result(message.reply)
            if last:
                return


class VllmEngine:
    """Talks to a running engine. Every call raises SamplerGone, with process and log, once the engine is dead or
    hung."""

    def __init__(self, settings: EngineSettings, number: int = 0, engines: int = 1, *, waits: bool = True):
        """Spawn the engine and wait until it can sample. Raises EngineError with the tail of its log.

        Args:
            settings: the engine's settings.
            number, engines: it is engine `number` of so many on this host, see `colocated`.
            waits: false returns at once; `wait` must follow.
        """
        self._settings = settings
        self._name = f"vLLM engine {number}" if engines > 1 else "vLLM engine"
        self._child = ChildProcess(
            self._name,
            "moe_rl.vllm.child",
            log_path=settings.log_path,
            environment=child_environment(settings.capture, number, engines, compiles=settings.cuda_graphs),
            replies=wire.REPLIES,
            alive=wire.Alive,
            silence_seconds=settings.silence_seconds,
        )
        self.pid = self._child.pid
        self.calls = NumberedCalls(self._child)
        self.workers, self.address, self.lost = [f"engine{number}"], "127.0.0.1", dict[str, str]()
        self.vllm_version = ""
        try:
            self._child.send(wire.Start(settings))
            if waits:
                self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until the engine can sample. Raises EngineError as the constructor does."""
        ready = self._child.started(wire.Ready, self._settings.startup_timeout_seconds)
        if isinstance(ready, wire.Failed):
            raise self._child.broken("could not start", ready.message)
        self.vllm_version = self.checked(ready, wire.Ready).vllm_version

    @property
    def places(self) -> Sequence[int]:
        return (0,)

    async def sample(
        self, place: int, requests: Sequence[GenerateRequest], *, shard: str, **options: Unpack[CallOptions]
    ) -> list[Completion]:
        """Sample one completion per request, see Sampler.sample.

        Raises:
            EngineError: a request exceeds the model's length, a key is repeated, or the shard exists.
        """
        loop, errors, ended = asyncio.get_running_loop(), list[Exception](), options.get("ended", nobody)
        leave, keep_open = options.get("leave"), options.get("keep_open", False)

        def tell(completions: list[tuple[int, Completion]]) -> None:
            try:
                for index, completion in completions:
                    ended(index, completion)
            except Exception as error:
                errors.append(error)
                self.calls.leave(number)

        def hear(completions: list[tuple[int, Completion]]) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell, completions)

        number, answer = self.calls.submit(wire.Generate(list(requests), shard, leave is None, keep_open), hear)
        sampled = asyncio.wrap_future(answer)
        left = asyncio.ensure_future((leave or asyncio.Event()).wait())
        waits: set[asyncio.Future[Any]] = {sampled, left}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not sampled.done():
                self.calls.leave(number)
            reply = await sampled
            if errors:
                raise errors[0]
            return self.checked(reply, wire.Generated).completions
        finally:
            left.cancel()
            if not sampled.done():  # no caller waits any more
                self.calls.leave(number)

    async def publish(self, shard: str, *, keep_open: bool = False) -> list[str]:
        """Publish a shard that calls left open, see Sampler.publish. Returns nothing: no run outlives its engine."""
        await self._call(wire.Generate([], shard, keep_open=keep_open), wire.Generated)
        return []

    def shard_at(self, place: int, shard: str) -> str:
        return shard

    def name(self) -> str:
        """Return the engine's name for messages."""
        return f"the {self._name}, log {self._settings.log_path}"

    async def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        scored = await self._call(wire.Score(list(map(list, runs)), shard), wire.Scored)
        return [ScoredTokens(scored.logprobs, scored.routes, self.name())]

    async def counts(self) -> dict[str, int]:
        return (await self._call(wire.AskCounts(), wire.Counted)).counts

    async def pause(self) -> None:
        await self._call(wire.Pause(), wire.Done)

    async def take_weights(self, update: WeightUpdate) -> None:
        await self.load(update)

    async def load(self, update: WeightUpdate) -> Holding:
        """Load a part of an update, see Sampler.take_weights, and return what the engine then holds."""
        return (await self._call(wire.Update(update), wire.Updated)).holding

    async def resume(self) -> None:
        await self._call(wire.Resume(), wire.Done)

    async def sleep(self, level: int) -> bool:
        """Release memory, see Sampler.sleep. The engine must have been started with `sleeps`."""
        return (await self._call(wire.Sleep(level), wire.Slept)).gives_back

    async def wake(self, part: str) -> None:
        await self._call(wire.Wake(part), wire.Done)

    def alive(self) -> bool:
        """Return whether the process runs and no call has failed for good."""
        return self._child.alive()

    def close(self) -> None:
        """End the engine and everything it started. May be called at any time, and repeatedly."""
        self._child.close(wire.Close())

    def checked[R: Message](self, reply: Message, expected: type[R]) -> R:
        """Return a reply of the expected type; raise the error if it carries one."""
        if isinstance(reply, wire.Failed):
            kind = WeightSyncError if reply.weights else RequestRefused if reply.refused else EngineError
            raise kind(f"{reply.message} [{self._name}, pid {self.pid}, log {self._settings.log_path}]")
        return self._child.expect(reply, expected)

    async def _call[R: Message](self, call: wire.Call, expected: type[R]) -> R:
        _, answer = self.calls.submit(call)
        return self.checked(await asyncio.wrap_future(answer), expected)
