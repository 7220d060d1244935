"""Runs the sampler for the trainer: one vLLM engine in a child process. Imports neither vLLM nor torch.

    parent (trainer rank 0)                        child (moe_rl.vllm.child)
    VllmEngine.generate(requests)  -- Generate -->  vLLM, in-process
                                   <-- Alive ----   after every step
                                   <-- Generated -  tokens, logprobs, references to routes
                                                    routes ----> trace store

The child ends whenever the parent ends. A child that ends or stops answering raises SamplerGone here.
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

from moe_rl.errors import About, EngineError, SamplerGone, WeightSyncError, describe
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
    """Talks to a running engine. Every call raises SamplerGone, with process and log, once the engine is dead or
    hung."""

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
        # A killed engine cannot remove its temporary files, so this process removes their folder.
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
        """Sample one completion per request, in request order, and publish the routes as trace shard `shard`.

        The result depends only on the weights and the requests: the prefix cache is emptied before each call.

        Args:
            requests: what to sample.
            shard: name of the new trace shard.
            enough: number of finished completions to wait for. The other requests are then aborted; they return the
                tokens so far, with finish_reason "abort" and their routes marked.

        Raises:
            EngineError: a request exceeds the model's length, a key is repeated, or the shard exists.
        """
        if not requests:
            return []
        return self._call(wire.Generate(list(requests), shard, enough), wire.Generated).completions

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        """Score token sequences, see Sampler.score; returns one element."""
        scored = self._call(wire.Score(list(map(list, runs)), shard), wire.Scored)
        return [ScoredTokens(scored.logprobs, scored.routes, f"the vLLM engine, log {self._settings.log_path}")]

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
        return not self._failure and self._process.poll() is None

    def close(self) -> None:
        """End the engine and everything it started. May be called at any time, and repeatedly."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                self._channel.socket.settimeout(_POLL_SECONDS)
                self._channel.send(wire.Close())
            self._channel.socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # An engine in the middle of a call, or one that failed, does not answer; waiting is pointless.
                self._process.wait(0 if self._failure else _CLOSE_SECONDS)
        self._kill()
        self._failure = self._failure or describe("The vLLM engine was closed", where={"pid": self.pid})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _call(self, message: Message, expected: type, seconds: float | None = None):
        """Send one call and wait for its reply. `seconds` limits the whole call; None limits the silence between
        frames."""
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
            raise self._broken("sent an invalid frame", str(error)) from error
        except BaseException:
            # After an interruption, the late reply to this call would be taken for the reply to the next one.
            self._failure = describe("The vLLM engine was left in the middle of a call", where={"pid": self.pid})
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
        """Describe how the process ended. Its socket closes a moment earlier."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _broken(self, what: str, got: str) -> EngineError:
        """Record that the engine is unusable, end its process, and return the error.

        The error is SamplerGone only if the engine was once ready: an engine that cannot start would fail again.
        """
        self._kill()
        where: About = {"pid": self.pid, "log": self._settings.log_path}
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
