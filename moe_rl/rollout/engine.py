"""The sampler as the trainer sees it: one vLLM engine in a child process. Imports neither vLLM nor torch.

    parent (trainer rank 0)                        child (moe_rl.vllm.child)
    VllmEngine.generate(requests)  -- Generate -->  vLLM, in-process
                                   <-- Alive ----   after every step
                                   <-- Generated -  tokens, logprobs, references to routes
                                                    routes ----> trace store

The child ends when the parent does, whatever ends it; a child that ends or falls silent is gone (SamplerGone) here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from moe_rl.errors import EngineError, SamplerGone, WeightSyncError, describe
from moe_rl.messages import Channel, Message
from moe_rl.types import Completion, GenerateRequest, ScoredTokens
from moe_rl.vllm import wire
from moe_rl.vllm.process import Scratch, child_environment
from moe_rl.vllm.wire import EngineSettings
from moe_rl.weights.update import WeightUpdate

_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 10.0
_LOG_TAIL_LINES = 15


class VllmEngine:
    """A running engine. Every call raises SamplerGone, naming process and log, once the engine is dead or hung."""

    def __init__(
        self,
        settings: EngineSettings,
        process: subprocess.Popen,
        channel: Channel,
        scratch: Scratch,
    ):
        self._settings = settings
        self._process = process
        self._channel = channel
        self._scratch = scratch
        self._failure = ""
        self.pid: int = process.pid
        self.vllm_version = ""
        self.workers, self.address = 1, "127.0.0.1"

    @classmethod
    def start(cls, settings: EngineSettings) -> Self:
        """Spawn the engine and wait until it can sample. Raises EngineError with the tail of its log."""
        if threading.current_thread() is not threading.main_thread():
            # The kernel ties the child's life to the thread that spawned it, not to the process.
            raise EngineError(describe("An engine must be started from the main thread", do="start it there"))
        log_path = settings.log_path.absolute()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # A killed engine cannot remove its temporary files; their folder is removed for it.
        scratch = Scratch()
        ours, theirs = socket.socketpair()
        with theirs, open(log_path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "moe_rl.vllm.child", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(settings.capture) | {"TMPDIR": scratch.name},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        engine = cls(settings, process, Channel(ours, wire.REPLIES), scratch)
        try:
            ready = engine._call(wire.Start(settings), wire.Ready, settings.startup_timeout_seconds)
            engine.vllm_version = ready.vllm_version
        except BaseException:
            engine.close()
            raise
        return engine

    def generate(
        self, requests: Sequence[GenerateRequest], *, shard: str, enough: int | None = None
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; routes are published as trace shard `shard`.

        Depends on the weights and the requests only: the prefix cache is emptied before each call. enough: completions
        that are waited for; requests that are not finished then are aborted and come back as far as they got, with
        finish_reason "abort" and their routes marked so. Raises EngineError for a request that does not fit into the
        model's length, a repeated key or a shard that exists.
        """
        if not requests:
            return []
        return self._call(wire.Generate(list(requests), shard, enough), wire.Generated).completions

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """See Sampler.score: one element."""
        scored = self._call(wire.Score(list(map(list, runs)), shard), wire.Scored)
        return [ScoredTokens(scored.logprobs, scored.routes, f"the vLLM engine, log {self._settings.log_path}")]

    def counts(self) -> dict[str, int]:
        """See Sampler.counts."""
        return self._call(wire.AskCounts(), wire.Counted).counts

    def update_weights(self, update: WeightUpdate) -> None:
        """Load one part of new weights; after the final one everything sampled carries its version.

        Raises WeightSyncError when the engine refuses it: the message says what it holds then.
        """
        self._call(wire.Update(update), wire.Updated)

    def sleep(self, level: int) -> bool:
        """See Sampler.sleep. The engine must have been started with `sleeps`."""
        return self._call(wire.Sleep(level), wire.Slept).gives_back

    def wake(self, part: str) -> None:
        """See Sampler.wake."""
        self._call(wire.Wake(part), wire.Awake)

    def alive(self) -> bool:
        """Whether the process runs and has failed no call for good."""
        return not self._failure and self._process.poll() is None

    def close(self) -> None:
        """End the engine and everything it started. May be called at any time and again."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                self._channel.socket.settimeout(_POLL_SECONDS)
                self._channel.send(wire.Close())
            self._channel.socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # An engine in the middle of a call, or one that failed, will not answer: no use in waiting.
                self._process.wait(0 if self._failure else _CLOSE_SECONDS)
        self._kill()
        self._failure = self._failure or describe("The vLLM engine was closed", where=f"pid {self.pid}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _call(self, message: Message, expected: type, seconds: float | None = None):
        """Send one call and wait for its reply. seconds: of all of it; None: of silence between frames."""
        if self._failure:
            raise SamplerGone(self._failure)
        limit = self._settings.silence_seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        try:
            self._channel.socket.settimeout(limit)
            self._channel.send(message)
            self._channel.socket.settimeout(_POLL_SECONDS)
            while True:
                try:
                    reply = self._channel.receive()
                except TimeoutError:
                    if self._process.poll() is not None:
                        raise EOFError("its process ended") from None
                    if time.monotonic() > deadline:
                        raise
                    continue
                if not isinstance(reply, wire.Alive):
                    break
                if seconds is None:
                    deadline = time.monotonic() + limit
        except TimeoutError:
            what = "was not ready in time" if seconds is not None else "hangs"
            raise self._broken(what, f"no sign of life for {limit:g} s") from None
        except (EOFError, OSError):
            raise self._broken("died", self._exit()) from None
        except ValueError as error:
            raise self._broken("sent what is no frame", str(error)) from error
        except BaseException:
            # Interrupted: the reply to this call would be taken for that to the next one.
            self._failure = describe("The vLLM engine was left in the middle of a call", where=f"pid {self.pid}")
            raise
        if isinstance(reply, wire.Failed):
            if isinstance(message, wire.Start):
                raise self._broken("could not start", reply.message)
            raise (WeightSyncError if reply.weights else EngineError)(
                f"{reply.message} [vLLM engine, pid {self.pid}, log {self._settings.log_path}]"
            )
        if not isinstance(reply, expected):
            raise self._broken("gave the wrong answer", type(reply).__name__)
        return reply

    def _exit(self) -> str:
        """How the process ended. Its socket closes a moment before."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _broken(self, what: str, got: str) -> EngineError:
        """Remember that the engine is of no more use, end what is left of it and describe it. One that was never ready
        is not gone: it would not be ready the next time either."""
        self._kill()
        where = f"pid {self.pid}, log {self._settings.log_path}"
        self._failure = describe(f"The vLLM engine {what}", where=where, got=got, do="read its log and start again")
        kind = SamplerGone if self.vllm_version else EngineError
        return kind(f"{self._failure}\n{_tail(self._settings.log_path)}".rstrip())

    def _kill(self) -> None:
        self._channel.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._scratch.cleanup()


def _tail(log_path: Path) -> str:
    try:
        with open(log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in lines)
