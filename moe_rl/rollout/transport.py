"""Makes HTTP calls with the run's token and typed answers. Each failure of a server is an EngineError that names it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec

from moe_rl.disk import allow_files
from moe_rl.errors import About, EngineError, MoeRLError, RequestRefused
from moe_rl.types import GenerateRequest
from moe_rl.vllm import sampling
from moe_rl.vllm.control import GENERATE, RUN_HEADER, read_token
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sampling import Growing, ReportedSpan


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    weight_versions: list[ReportedSpan] | None = None
    stop_reason: int | str | None = None


class _Answer(msgspec.Struct, frozen=True):
    """Holds a completion, or the next piece of one in a stream. `error` is set when the stream cannot continue."""

    choices: list[_Choice] = []
    error: object = None


# Created at import time, by one thread: msgspec crashes when two threads are the first to decode a type.
_ANSWER = msgspec.json.Decoder(_Answer)
# vLLM's message for a request that ended with the finish reason "error". That of a dead engine differs.
_ENDED_IN_ERROR = "Internal server error"


async def collect(
    transport: Transport,
    client: httpx.AsyncClient,
    request: GenerateRequest,
    sample: Growing,
    shard: str,
    *,
    stream: bool,
    priority: int = 0,
    name: str | None = None,
    forever: bool,
) -> None:
    """Sample one request, and add the result to `sample`.

    Args:
        shard: the trace shard that records it.
        stream: whether tokens arrive as they are sampled rather than all at the end.
        priority: requests with lower numbers go first.
        name: the request's name for /moe_rl/leave; None if it is never aborted.
        forever: whether the server may be silent indefinitely.

    Raises:
        RequestRefused: the server refuses the request, or cannot follow its grammar.
        EngineError: the server is silent for too long, or cannot sample it.
    """
    params = sampling.parameters(request, RecordingRequest.of(request, shard))
    if request.grammar:
        params["structured_outputs"] = {"structural_tag": request.grammar}
    # The fields are those of control.Generation.
    asked = msgspec.json.encode(
        {
            "token_ids": request.prompt_token_ids,
            "stream": stream,
            "priority": priority,
            "name": name,
            "sampling_params": params,
        }
    )
    seconds = None if forever else transport.timeout
    try:
        async with transport.ask(client, "POST", GENERATE, asked, seconds) as response:
            async for line in response.aiter_lines():
                if (text := line.removeprefix("data: ")) and text != "[DONE]":
                    _add(sample, transport.decode(text, _ANSWER), request.key)
    except EngineError as error:
        if request.grammar and _ENDED_IN_ERROR in error.message.got:
            raise sampling.ended_in_error(request) from None
        raise


def _add(sample: Growing, answer: _Answer, key: str) -> None:
    if answer.error is not None or len(answer.choices) != 1:
        got = str(answer.error)[:500] if answer.error is not None else "no completion"
        raise EngineError("The vLLM server could not sample", where={"request": key}, got=got)
    (choice,) = answer.choices
    logprobs = [token.logprob for token in choice.logprobs.content]
    if len(logprobs) != len(choice.token_ids):
        raise EngineError("The vLLM server returned too few log-probabilities", where={"request": key})
    sample.add(choice.token_ids, logprobs, choice.finish_reason, choice.weight_versions, choice.stop_reason)


# A server that something else started closes connections that were idle for 5 s. Reusing one at that moment fails, so
# idle ones are dropped earlier.
_KEEPALIVE_SECONDS = 1.0
# The statuses of the gate and of vLLM that mean: this call is impossible. Others are about the server or its weights.
_AT_FAULT = frozenset({400, 403, 413, 415, 422})
# File descriptors that this process uses for anything but connections to servers.
_OTHER_FILES = 256
_connections: list[int] = []  # of each open client of this process


class Transport:
    """Calls one server. `timeout_seconds` of silence count as a hang; `run` identifies the calling run, "" for none."""

    def __init__(self, url: str, token_file: Path, timeout_seconds: float, run: str = ""):
        self.url = url.rstrip("/")
        self.timeout = timeout_seconds
        self._headers = {"Authorization": f"Bearer {read_token(token_file)}"} | ({RUN_HEADER: run} if run else {})

    @contextlib.asynccontextmanager
    async def client(self, connections: int) -> AsyncIterator[httpx.AsyncClient]:
        """Yield a client for this many concurrent calls."""
        # trust_env=False: a proxy from the environment would see the token.
        with _files_for(connections):
            async with httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(self.timeout, pool=None),
                limits=httpx.Limits(max_connections=connections, keepalive_expiry=_KEEPALIVE_SECONDS),
                trust_env=False,
            ) as client:
                yield client

    async def call(
        self,
        client: httpx.AsyncClient | None,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        answer: msgspec.json.Decoder,
        seconds: float | None = None,
        *,
        forever: bool = False,
    ):
        """Make one control call and decode the answer.

        Args:
            client: None makes the call over a new connection.
            seconds: silence that counts as a hang; default: timeout_seconds.
            forever: whether the server may be silent indefinitely.
        """
        if client is None:
            async with self.client(1) as client:
                return await self.call(client, method, path, message, answer, seconds, forever=forever)
        body = b"" if message is None else msgspec.json.encode(message)
        silence = None if forever else seconds or self.timeout
        async with self.ask(client, method, path, body, silence) as response:
            return self.decode(await response.aread(), answer)

    @contextlib.asynccontextmanager
    async def ask(
        self, client: httpx.AsyncClient, method: str, path: str, body: bytes, seconds: float | None
    ) -> AsyncIterator[httpx.Response]:
        """Yield the response while it arrives. `seconds` limits the silence; None: no limit.

        Raises RequestRefused if the call is at fault, and EngineError for any other error status.
        """
        where: About = {"call": f"{method} {self.url}{path}"}
        timeout = httpx.Timeout(self.timeout, read=seconds, pool=None)
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream(
                method, self.url + path, content=body, headers=headers, timeout=timeout
            ) as response:
                if not response.is_success:
                    got = f"HTTP {response.status_code}: {_message(await response.aread())}"
                    kind = RequestRefused if response.status_code in _AT_FAULT else EngineError
                    raise kind(f"The vLLM server refused {method} {path}", where={"url": self.url}, got=got)
                yield response
        except httpx.TimeoutException:
            got = f"no sign of life for {seconds or self.timeout:g} s"
            raise EngineError(
                "The vLLM server hangs", where=where, got=got, do="read its log", fault="silent"
            ) from None
        except httpx.TransportError as error:
            got = f"{type(error).__name__}: {error}".rstrip(": .")  # some errors have no message
            raise EngineError(
                "The vLLM server cannot be reached", where=where, got=got, do="see whether it runs", fault="silent"
            ) from None

    def decode(self, text: str | bytes, answer: msgspec.json.Decoder):
        try:
            return answer.decode(text)
        except msgspec.DecodeError as error:
            got = f"{error}: {str(text)[:200]}"
            raise EngineError("The vLLM server gave the wrong answer", where={"url": self.url}, got=got) from None


@contextlib.contextmanager
def _files_for(connections: int) -> Iterator[None]:
    """Let this process open as many files as it may while a client has connections.

    Raises MoeRLError if that is too few for the connections of all its clients: a server that cannot be called for want
    of files would look unreachable. It is no EngineError, because no server is at fault.
    """
    hard = allow_files()
    _connections.append(connections)
    try:
        needed = sum(_connections) + _OTHER_FILES
        if needed > hard != resource.RLIM_INFINITY:
            raise MoeRLError(
                "Too many requests to vLLM servers at once",
                got=f"{hard} open files allowed",
                expected=f"{needed}, for {sum(_connections)} connections",
                do="raise ulimit -Hn, or sample fewer completions at once",
            )
        yield
    finally:
        _connections.remove(connections)


def _message(body: bytes) -> str:
    """Return the error message of a control route ({"error": text}) or of vLLM ({"error": {"message": text}})."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
