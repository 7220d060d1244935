"""HTTP to a server that wants the run's token: calls with typed answers, every failure an EngineError that names it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec

from moe_rl.errors import EngineError, describe
from moe_rl.vllm.control import RUN_HEADER, read_token

# A server closes a connection that was idle for 5 s; one that is used again at that very moment fails.
_KEEPALIVE_SECONDS = 1.0
# Descriptors that this process has or needs for other things than connections.
_OTHER_FILES = 256


class Transport:
    """To one server. timeout_seconds: of silence, after which it is taken for hung. run: who calls, "" for no run."""

    def __init__(self, url: str, token_file: Path, timeout_seconds: float, run: str = ""):
        self.url = url.rstrip("/")
        self.timeout = timeout_seconds
        self._headers = {"Authorization": f"Bearer {read_token(token_file)}"} | ({RUN_HEADER: run} if run else {})

    def client(self, connections: int) -> httpx.AsyncClient:
        """Connections for so many calls at once."""
        _allow_files(connections)
        # trust_env: a proxy of the environment would be given the token.
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self.timeout, pool=None),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=_KEEPALIVE_SECONDS),
            trust_env=False,
        )

    async def once(
        self,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        answer: msgspec.json.Decoder,
        seconds: float | None = None,
    ):
        """As `call`, by a connection of its own."""
        async with self.client(1) as client:
            return await self.call(client, method, path, message, answer, seconds)

    async def call(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        answer: msgspec.json.Decoder,
        seconds: float | None = None,
    ):
        """One control call; its answer as `answer` reads it. seconds: of silence, in place of timeout_seconds."""
        body = b"" if message is None else msgspec.json.encode(message)
        async with self.ask(client, method, path, body, seconds or self.timeout) as response:
            return self.decode(await response.aread(), answer)

    @contextlib.asynccontextmanager
    async def ask(
        self, client: httpx.AsyncClient, method: str, path: str, body: bytes, seconds: float | None
    ) -> AsyncIterator[httpx.Response]:
        """The answer while it comes. seconds: that the server may be silent, None: any time. Raises EngineError for
        everything but success."""
        where = f"{method} {self.url}{path}"
        timeout = httpx.Timeout(self.timeout, read=seconds, pool=None)
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream(
                method, self.url + path, content=body, headers=headers, timeout=timeout
            ) as response:
                if not response.is_success:
                    got = f"HTTP {response.status_code}: {_message(await response.aread())}"
                    raise EngineError(describe("The vLLM server refused a call", where=where, got=got))
                yield response
        except httpx.TimeoutException:
            got = f"no sign of life for {seconds or self.timeout:g} s"
            raise EngineError(describe("The vLLM server hangs", where=where, got=got, do="read its log")) from None
        except httpx.TransportError as error:
            got = f"{type(error).__name__}: {error}".rstrip(": .")  # some say no more than their name
            raise EngineError(
                describe("The vLLM server cannot be reached", where=where, got=got, do="see whether it runs")
            ) from None

    def decode(self, text: str | bytes, answer: msgspec.json.Decoder):
        try:
            return answer.decode(text)
        except msgspec.DecodeError as error:
            got = f"{error}: {str(text)[:200]}"
            raise EngineError(describe("The vLLM server gave the wrong answer", where=self.url, got=got)) from None


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files where it is too low. Raises EngineError where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise EngineError(
            describe(
                "Too many requests to one vLLM server at once",
                got=f"{connections} connections, and {hard} open files allowed",
                do="raise ulimit -n, or sample with more servers",
            )
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _message(body: bytes) -> str:
    """The message in the error of a control route ({"error": text}) or of vLLM ({"error": {"message": text}})."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
