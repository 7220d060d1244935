"""Runs the sampler for the trainer: one vLLM engine in a child process. Imports neither vLLM nor torch.

    parent (trainer rank 0)                        child (moe_rl.vllm.child)
    VllmEngine.generate(requests)  -- Generate -->  vLLM, in-process
                                   <-- Alive ----   after every step
                                   <-- RequestsEnded -  completions, as they end
                                   <-- Generated -  tokens, logprobs, references to routes
                                                    routes ----> trace store

Several calls may run at once, see `numbered_calls`. A child that ends or stops answering raises SamplerGone in each,
see `child_process`.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Self

from moe_rl.errors import EngineError, WeightSyncError
from moe_rl.messages import Message
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.rollout.numbered_calls import NumberedCalls
from moe_rl.rollout.sampler import Hears, nobody
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm import wire
from moe_rl.vllm.process import child_environment
from moe_rl.vllm.wire import EngineSettings
from moe_rl.weights.update import WeightUpdate


class VllmEngine:
    """Talks to a running engine. Every call raises SamplerGone, with process and log, once the engine is dead or
    hung."""

    def __init__(self, settings: EngineSettings):
        """Spawn the engine and wait until it can sample. Raises EngineError with the tail of its log."""
        self._settings = settings
        self._child = ChildProcess(
            "vLLM engine",
            "moe_rl.vllm.child",
            log_path=settings.log_path,
            environment=child_environment(settings.capture),
            replies=wire.REPLIES,
            alive=wire.Alive,
            silence_seconds=settings.silence_seconds,
        )
        self.pid = self._child.pid
        self.calls = NumberedCalls(self._child)
        self.workers, self.address = 1, "127.0.0.1"
        try:
            ready = self._child.start(wire.Start(settings), wire.Ready, settings.startup_timeout_seconds)
            if isinstance(ready, wire.Failed):
                raise self._child.broken("could not start", ready.message)
            self.vllm_version: str = self.checked(ready, wire.Ready).vllm_version
        except BaseException:
            self.close()
            raise

    def generate(
        self, requests: Sequence[GenerateRequest], *, shard: str, enough: int | None = None, ended: Hears = nobody
    ) -> list[Completion]:
        """Sample one completion per request, in request order, and publish the routes as trace shard `shard`.

        The result depends only on the weights and the requests: the prefix cache is emptied before each call.

        Args:
            requests: what to sample.
            shard: name of the new trace shard.
            enough: number of finished completions to wait for. The other requests are then aborted; they return the
                tokens so far, with finish_reason "abort" and their routes marked.
            ended: as in Sampler.generate. If it raises, the engine becomes unusable.

        Raises:
            EngineError: a request exceeds the model's length, a key is repeated, or the shard exists.
        """
        if not requests:
            return []
        call = wire.Generate(list(requests), shard, enough, alone=True)
        return self._call(call, wire.Generated, ended).completions

    def name(self) -> str:
        """Return the engine's name for messages."""
        return f"the vLLM engine, log {self._settings.log_path}"

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Score token sequences, see Sampler.score; returns one element."""
        scored = self._call(wire.Score(list(map(list, runs)), shard), wire.Scored)
        return [ScoredTokens(scored.logprobs, scored.routes, self.name())]

    def counts(self) -> dict[str, int]:
        """Return the recorder's counts, see Sampler.counts."""
        return self._call(wire.AskCounts(), wire.Counted).counts

    def update_weights(self, update: WeightUpdate) -> None:
        """Load one part of new weights. After the final part, everything sampled carries its version.

        Raises WeightSyncError if the engine refuses the part; the message says which weights it then holds.
        """
        self._call(wire.Update(update), wire.Updated)

    def sleep(self, level: int) -> bool:
        """Release memory, see Sampler.sleep. The engine must have been started with `sleeps`."""
        return self._call(wire.Sleep(level), wire.Slept).gives_back

    def wake(self, part: str) -> None:
        """Take memory back, see Sampler.wake."""
        self._call(wire.Wake(part), wire.Awake)

    def alive(self) -> bool:
        """Return whether the process runs and no call has failed for good."""
        return self._child.alive()

    def close(self) -> None:
        """End the engine and everything it started. May be called at any time, and repeatedly."""
        self._child.close(wire.Close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def checked[R: Message](self, reply: Message, expected: type[R]) -> R:
        """Return a reply of the expected type; raise the error if it carries one."""
        if isinstance(reply, wire.Failed):
            raise (WeightSyncError if reply.weights else EngineError)(
                f"{reply.message} [vLLM engine, pid {self.pid}, log {self._settings.log_path}]"
            )
        return self._child.expect(reply, expected)

    def _call[R: Message](self, message: wire.Call, expected: type[R], ended: Hears = nobody) -> R:
        """Send one call and wait for its reply."""
        news: SimpleQueue[list[tuple[int, Completion]]] = SimpleQueue()
        _, answer = self.calls.submit(message, news.put)
        answer.add_done_callback(lambda _: news.put([]))
        try:
            while completions := news.get():
                for at, completion in completions:
                    ended(at, completion)
        except BaseException:
            self._child.desert()
            raise
        return self.checked(answer.result(), expected)
