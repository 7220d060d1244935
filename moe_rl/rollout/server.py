"""A recording vLLM server (tools/serve_vllm.py) as its clients see it, and what both say to each other.

    client                                           server
    VllmServer.generate -- POST /moe_rl/open ------>  begin a shard
                        -- POST /inference/v1/generate, one a request, many at once: token ids in and out
                        -- POST /moe_rl/publish ----> rows of these tokens ----> trace store
                        <- references to routes -----

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import numpy as np

from moe_rl.errors import EngineError, describe
from moe_rl.rollout.recording import RecordingRequest, as_stored
from moe_rl.rollout.versions import one_version
from moe_rl.types import Completion, GenerateRequest, RouteRef

# A server closes a connection that was idle for 5 s; one that is used again at that very moment fails.
_KEEPALIVE_SECONDS = 1.0
# What vLLM answers for the logprob of a token that it does not know one of.
_NO_LOGPROB = -9999.0
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,256}", re.ASCII)

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Sink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /moe_rl/open and /moe_rl/abandon."""

    sink: str


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /moe_rl/publish; answered by {key: RouteRef}. sequences: key -> token ids that had to be forwarded."""

    sink: str
    sequences: dict[str, list[TokenId]]
    aborted: list[str] = []


class WeightVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /moe_rl/weight_version."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Served(msgspec.Struct, frozen=True):
    """Answer of /moe_rl/recording. num_experts, top_k, layer_map: as in trace.record.TraceSpec."""

    moe_rl: str
    vllm: str
    trace_root: str
    model_fingerprint: str
    num_experts: int
    top_k: int
    layer_map: str
    vocab_size: int
    max_model_len: int
    weight_version: int


def read_token(path: Path) -> str:
    """The token of a run. Raises EngineError for a file that others may read, or that holds no token."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            status, text = os.fstat(file.fileno()), file.read(300).decode("ascii", "replace").strip()
    except OSError as error:
        raise EngineError(describe("The run's token cannot be read", where=str(path), got=error.strerror)) from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        mode = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        raise EngineError(
            describe("The run's token is no secret", where=str(path), got=mode, expected="your own file, mode 600")
        )
    if not _TOKEN.fullmatch(text):
        raise EngineError(
            describe("The file holds no token", where=str(path), expected="32 to 256 letters, digits, - and _")
        )
    return text


class VllmServer:
    """A running server. Calls run an event loop of their own; they may come from several threads or processes.

    connections: requests under way at once. timeout_seconds: of silence, after which a server is taken for hung; a
    completion is silent until it is finished, but with `enough`. Every call raises EngineError when the server cannot
    be reached, refuses, or hangs.
    """

    def __init__(self, url: str, token_file: Path, *, connections: int = 64, timeout_seconds: float = 600.0):
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {read_token(token_file)}"}
        self._connections = connections
        self._timeout = timeout_seconds

    def generate(
        self, requests: Sequence[GenerateRequest], *, shard: str, enough: int | None = None
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; routes are published as trace shard `shard`.

        As VllmEngine.generate, but that the server's prefix cache is kept and that it may serve others meanwhile.
        enough: completions that are waited for; the others are aborted and come back as far as they got.
        """
        return asyncio.run(self._generate(requests, shard, enough)) if requests else []

    def recording(self) -> Served:
        """What the server samples from and records."""
        return asyncio.run(self._once("GET", "/moe_rl/recording", None, _SERVED))

    def stats(self) -> list[dict[str, int]]:
        """Counts of every worker that records, since its start; see recorder.Recorder."""
        return asyncio.run(self._once("GET", "/moe_rl/stats", None, _STATS))

    def set_weight_version(self, version: int) -> None:
        """Say which weights the server holds from now on. Call it when nothing is sampled."""
        asyncio.run(self._once("POST", "/moe_rl/weight_version", WeightVersion(version), _NOTHING))

    async def _once(self, method: str, path: str, message: msgspec.Struct | None, answer: msgspec.json.Decoder):
        async with self._client() as client:
            return await self._call(client, method, path, message, answer)

    async def _generate(self, requests: Sequence[GenerateRequest], shard: str, enough: int | None) -> list[Completion]:
        async with self._client() as client:
            served = await self._call(client, "GET", "/moe_rl/recording", None, _SERVED)
            _check(requests, served)
            records = any(request.record for request in requests)
            if records:
                await self._call(client, "POST", "/moe_rl/open", Sink(shard), _NOTHING)
            try:
                samples = await self._sample(client, requests, shard, enough)
                if any(sample.finish_reason == "abort" for sample in samples):
                    now = await self._call(client, "GET", "/moe_rl/recording", None, _SERVED)
                    if now.weight_version != served.weight_version:
                        raise EngineError(describe("The weights changed under requests that were aborted", where=shard))
                refs = await self._publish(client, requests, samples, shard) if records else {}
            except BaseException:
                if records:
                    with contextlib.suppress(EngineError):
                        await self._call(client, "POST", "/moe_rl/abandon", Sink(shard), _NOTHING)
                raise
        return [
            Completion(
                key=request.key,
                prompt_token_ids=request.prompt_token_ids,
                token_ids=tuple(sample.token_ids),
                logprobs=np.asarray(sample.logprobs, np.float32),
                finish_reason=sample.finish_reason,
                weight_version=sample.weight_version(request.key, served.weight_version),
                routes=refs.get(request.key),
            )
            for request, sample in zip(requests, samples, strict=True)
        ]

    async def _sample(
        self, client: httpx.AsyncClient, requests: Sequence[GenerateRequest], shard: str, enough: int | None
    ) -> list[_Sample]:
        """What came of the requests, at most `connections` at a time."""
        samples = [_Sample() for _ in requests]
        turn = asyncio.Semaphore(self._connections)

        async def one(request: GenerateRequest, sample: _Sample) -> None:
            # An aborted request has no final answer: who may abort takes the tokens as they come.
            body = _body(request, shard, stream=enough is not None)
            async with turn, self._ask(client, "POST", "/inference/v1/generate", body) as response:
                async for line in response.aiter_lines():
                    if (text := line.removeprefix("data: ")) and text != "[DONE]":
                        sample.add(_decode(text, _ANSWER, self.url), request.key)

        tasks = [asyncio.create_task(one(*pair)) for pair in zip(requests, samples, strict=True)]
        wanted = len(tasks) if enough is None else min(enough, len(tasks))
        try:
            for finished in asyncio.as_completed(tasks) if wanted else ():
                await finished
                wanted -= 1
                if not wanted:
                    break
        finally:
            # The server aborts a request whose connection is closed.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for request, sample in zip(requests, samples, strict=True):
            if enough is not None:
                sample.finish_reason = sample.finish_reason or "abort"
            if not sample.finish_reason:
                raise EngineError(describe("The vLLM server ended an answer early", where=f"request {request.key}"))
        return samples

    async def _publish(
        self, client: httpx.AsyncClient, requests: Sequence[GenerateRequest], samples: Sequence[_Sample], shard: str
    ) -> dict[str, RouteRef]:
        """Publish the routes of what was sampled; of an aborted request, when it had got as far as a token."""
        asks = [RecordingRequest.of(request, shard) for request in requests]
        sequences, aborted = {}, []
        for request, sample in zip(requests, samples, strict=True):
            if request.record and sample.token_ids:
                sequences[request.key] = [*request.prompt_token_ids, *sample.token_ids[:-1]]
                if sample.finish_reason == "abort":
                    aborted.append(request.key)
        message = Publish(shard, sequences, aborted)
        refs = await self._call(client, "POST", "/moe_rl/publish", message, _REFERENCES)
        return as_stored(refs, asks)

    def _client(self) -> httpx.AsyncClient:
        # trust_env: a proxy of the environment would be given the token.
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self._timeout, pool=None),
            limits=httpx.Limits(max_connections=self._connections + 1, keepalive_expiry=_KEEPALIVE_SECONDS),
            trust_env=False,
        )

    async def _call(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        answer: msgspec.json.Decoder,
    ):
        """One control call; its answer as `answer` reads it."""
        body = b"" if message is None else msgspec.json.encode(message)
        async with self._ask(client, method, path, body) as response:
            return _decode(await response.aread(), answer, self.url)

    @contextlib.asynccontextmanager
    async def _ask(self, client: httpx.AsyncClient, method: str, path: str, body: bytes):
        """The answer while it comes. Raises EngineError for everything but success."""
        where = f"{method} {self.url}{path}"
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream(method, self.url + path, content=body, headers=headers) as response:
                if not response.is_success:
                    got = f"HTTP {response.status_code}: {_message(await response.aread())}"
                    raise EngineError(describe("The vLLM server refused a call", where=where, got=got))
                yield response
        except httpx.TimeoutException:
            got = f"no sign of life for {self._timeout:g} s"
            raise EngineError(describe("The vLLM server hangs", where=where, got=got, do="read its log")) from None
        except httpx.TransportError as error:
            got = f"{type(error).__name__}: {error}"
            raise EngineError(
                describe("The vLLM server cannot be reached", where=where, got=got, do="see whether it runs")
            ) from None


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob]


class _Version(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by one version of the weights."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    weight_versions: list[_Version] | None = None


class _Answer(msgspec.Struct, frozen=True):
    """All of a completion, or what came of it since the last one. error: of a stream that cannot go on."""

    choices: list[_Choice] = []
    error: msgspec.Raw | None = None


# Made while the module is imported, by one thread: msgspec dies when two threads are the first to decode into a type.
_ANSWER = msgspec.json.Decoder(_Answer)
_SERVED = msgspec.json.Decoder(Served)
_STATS = msgspec.json.Decoder(list[dict[str, int]])
_REFERENCES = msgspec.json.Decoder(dict[str, RouteRef])
_NOTHING = msgspec.json.Decoder(None)


@dataclass(slots=True)
class _Sample:
    """A completion as it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    versions: list[_Version] = field(default_factory=list)

    def add(self, answer: _Answer, key: str) -> None:
        if answer.error is not None or len(answer.choices) != 1:
            got = bytes(answer.error)[:500].decode("utf-8", "replace") if answer.error else "no completion"
            raise EngineError(describe("The vLLM server could not sample", where=f"request {key}", got=got))
        (choice,) = answer.choices
        logprobs = [at.logprob for at in choice.logprobs.content]
        if len(logprobs) != len(choice.token_ids) or any(logprob <= _NO_LOGPROB for logprob in logprobs):
            raise EngineError(describe("The vLLM server left a logprob out", where=f"request {key}"))
        self.token_ids += choice.token_ids
        self.logprobs += logprobs
        self.finish_reason = choice.finish_reason or ""
        self.versions = choice.weight_versions or []

    def weight_version(self, key: str, now: int) -> int:
        """Of the weights that sampled every token. now: the server's; of an aborted request vLLM tells none."""
        aborted = self.finish_reason == "abort"
        return now if aborted else one_version(self.versions, tokens=len(self.token_ids), key=key)


def _body(request: GenerateRequest, shard: str, *, stream: bool) -> bytes:
    """JSON of one request to /inference/v1/generate."""
    ask = RecordingRequest.of(request, shard)
    return msgspec.json.encode(
        {
            "token_ids": request.prompt_token_ids,
            "stream": stream,
            "sampling_params": {
                "temperature": request.temperature,
                "top_k": request.top_k,
                "top_p": request.top_p,
                "min_p": request.min_p,
                "seed": request.seed,
                "max_tokens": request.max_tokens,
                "stop_token_ids": request.stop_token_ids,
                # The stop tokens of the request are all there are.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "extra_args": ask.extra_args() if ask is not None else None,
            },
        }
    )


def _check(requests: Sequence[GenerateRequest], served: Served) -> None:
    """Raises EngineError for what vLLM would cut short without a word, or die of."""
    seen = set()
    for request in requests:
        tokens = request.prompt_token_ids
        length = len(tokens) + request.max_tokens
        if length > served.max_model_len:
            got, expected = f"{length} tokens", f"at most {served.max_model_len}, the server's max_model_len"
        elif not tokens or not 0 <= min(tokens) <= max(tokens) < served.vocab_size:
            got = f"token ids from {min(tokens)} to {max(tokens)}" if tokens else "an empty prompt"
            expected = f"0 to {served.vocab_size - 1}"
        elif request.key in seen:
            got, expected = "a key used twice", "another one"
        else:
            seen.add(request.key)
            continue
        raise EngineError(
            describe("A request cannot be sampled", where=f"request {request.key}", got=got, expected=expected)
        )


def _decode(text: str | bytes, answer: msgspec.json.Decoder, url: str):
    try:
        return answer.decode(text)
    except msgspec.DecodeError as error:
        got = f"{error}: {str(text)[:200]}"
        raise EngineError(describe("The vLLM server gave the wrong answer", where=url, got=got)) from None


def _message(body: bytes) -> str:
    """The message in the error of a control route ({"error": text}) or of vLLM ({"error": {"message": text}})."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
