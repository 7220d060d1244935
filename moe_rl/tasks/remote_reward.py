"""Provides the reward kind `remote`: a server that scores completions over HTTP.

One request scores one completion. Its body is a JSON object of the configured arguments. The server answers with
status 200 and a JSON object whose `reward` is a number; further keys are ignored. Any other answer fails the
verification and never counts as a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec

_LONGEST_ANSWER = 1 << 16
_SHOWN = 200
_TRY_AGAIN = (408, 429)
_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "connection": "close",  # if reused, extra bytes after an answer would be read as the next answer
}


class RemoteError(Exception):
    """The server returned no reward. again: whether another attempt may succeed."""

    def __init__(self, text: str, *, again: bool = False):
        super().__init__(text)
        self.again = again


class _Score(msgspec.Struct):
    reward: float


_SCORE = msgspec.json.Decoder(_Score)


def remote(
    *, url: str, arguments: Sequence[str], timeout_seconds: float, waits: Sequence[float]
) -> Callable[..., Awaitable[list[float | RemoteError]]]:
    """Return the reward function, which takes a batch.

    Args:
        timeout_seconds: time limit of one attempt.
        waits: seconds before each attempt but the first.
    """
    client: list[httpx.AsyncClient] = []

    async def ask_remote(**columns: list[Any]) -> list[float | RemoteError]:
        if not client:  # created inside the event loop that it belongs to
            # Redirects are not followed: they would carry data to a server that the config does not name.
            limits = httpx.Limits(max_connections=None)
            client.append(httpx.AsyncClient(headers=_HEADERS, timeout=None, trust_env=False, limits=limits))
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return await asyncio.gather(*(_ask(client[0], url, row, timeout_seconds, waits) for row in rows))

    # The worker passes the arguments that the signature names.
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in arguments]
    ask_remote.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return ask_remote


async def _ask(
    client: httpx.AsyncClient, url: str, row: dict[str, Any], timeout_seconds: float, waits: Sequence[float]
) -> float | RemoteError:
    """Score one completion, with retries where they may help. Return the error instead of raising it."""
    failure = RemoteError("")
    for wait in (0.0, *waits):
        await asyncio.sleep(wait)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await _attempt(client, url, row)
        except RemoteError as error:
            failure = error
        except TimeoutError:
            failure = RemoteError(f"no answer within {timeout_seconds:g} s", again=True)
        except httpx.TransportError as error:
            failure = RemoteError(f"{type(error).__name__}: {error}", again=True)
        if not failure.again:
            return failure
    return RemoteError(f"{len(waits) + 1} attempts, the last: {failure}")


async def _attempt(client: httpx.AsyncClient, url: str, row: dict[str, Any]) -> float:
    async with client.stream("POST", url, content=json.dumps(row).encode()) as response:
        body = b""
        async for piece in response.aiter_raw():  # not decompressed, so that a small answer cannot become huge
            body += piece
            if len(body) > _LONGEST_ANSWER:
                raise RemoteError(f"an answer of more than {_LONGEST_ANSWER} bytes")
    status, shown = response.status_code, body[:_SHOWN].decode("utf-8", "replace")
    if status != 200:
        what = "a redirect, which is not followed" if response.is_redirect else "not 200"
        raise RemoteError(f"status {status}, {what}: {shown}", again=status in _TRY_AGAIN or status >= 500)
    try:
        return _SCORE.decode(body).reward
    except msgspec.MsgspecError as error:
        raise RemoteError(f"not an object with a number as reward ({error}): {shown}") from error
