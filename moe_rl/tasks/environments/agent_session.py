"""Gives an environment access to the model: the session of one episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from moe_rl.messages import Message


class SessionAccess(Message, frozen=True):
    """Describes how to reach a session of the gateway, and its limits.

    Attributes:
        name: the owner's name of the session.
        url: for clients of Anthropic's API. base_url: for those of OpenAI's. Both contain the key.
        key: API key, for clients that take the gateway's own address.
        turns, tokens: limits that the session was opened with; None: the gateway's own limits apply.
    """

    name: str
    url: str
    base_url: str
    key: str
    turns: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Holds the next message of a dialogue.

    Attributes:
        message: the assistant's: role, content (None if empty), and reasoning_content and tool_calls if there are any.
            It can be appended to the dialogue as it is.
        finish_reason: stop, tool_calls, or length for a message that was cut off.
    """

    message: dict[str, Any]
    finish_reason: str


class ChatError(Exception):
    """Raised if the gateway refuses a request or cannot answer it.

    Attributes:
        status: HTTP status.
        code: the gateway's name of the fault. session_limit: the session has used its turns, tokens or time.
            context_length_exceeded: the dialogue exceeds the model's length limit.
    """

    def __init__(self, status: int, code: str, text: str):
        super().__init__(f"status {status}, {code}: {text}")
        self.status, self.code = status, code


class AgentSession:
    """Lets an environment query the model.

    A harness passes its own client `base_url` (OpenAI's packages) or `url` (Anthropic's), and `key`.

    Attributes:
        url, base_url, key, turns, tokens: as in `SessionAccess`.
        seconds: time limit of the episode.
        options: task.environment.options of the config.
    """

    def __init__(self, access: SessionAccess, seconds: float, options: Mapping[str, Any] | None = None):
        self.url, self.base_url, self.key = access.url, access.base_url, access.key
        self.turns, self.tokens, self.seconds = access.turns, access.tokens, seconds
        self.options = dict(options or {})

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> dict[str, Any]:
        """Call `ask`, and return only the message."""
        return (await self.ask(messages, tools=tools, **sampling)).message

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> ChatReply:
        """Request the next message of a dialogue, which is one turn of the session.

        Args:
            messages, tools: as in OpenAI's chat completions.
            sampling: further fields of the request, such as temperature or max_tokens; not n above 1, and not stream.

        Raises:
            ChatError: the gateway refused the request.
            OSError: the gateway cannot be reached, or went away.
        """
        body = {"model": "policy", "messages": list(messages), **({"tools": list(tools)} if tools else {}), **sampling}
        status, answer = await _post(f"{self.base_url}/chat/completions", json.dumps(body).encode())
        if status != 200:
            raise _refusal(status, answer)
        (choice,) = json.loads(answer)["choices"]
        message = {name: value for name, value in choice["message"].items() if value is not None or name == "content"}
        return ChatReply(message, choice["finish_reason"])


async def _post(url: str, body: bytes) -> tuple[int, bytes]:
    """Send JSON over a new connection, and return the status and body of the answer.

    Every episode imports this module anew, and an HTTP library takes longer to import than a short episode lasts. The
    time limit of the episode is the only one. No proxy is used: it would see the key.
    """
    to = urlsplit(url)
    assert to.hostname is not None  # the gateway returns its full address
    reader, writer = await asyncio.open_connection(
        to.hostname, to.port or (443 if to.scheme == "https" else 80), ssl=to.scheme == "https" or None
    )
    try:
        # The server keeps the connection open, to notice whether we close it before or after reading the answer.
        head = f"POST {to.path} HTTP/1.1\r\nHost: {to.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        first, *others = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in others)}
        return int(first.split()[1]), await reader.readexactly(int(fields["content-length"]))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError(f"the gateway disconnected during its answer, after {len(error.partial)} bytes") from None
    except KeyError:
        raise ConnectionError("the gateway's answer does not state its length: a proxy changed it") from None
    finally:
        writer.close()


def _refusal(status: int, answer: bytes) -> ChatError:
    try:
        error = json.loads(answer)["error"]
        return ChatError(status, error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        return ChatError(status, "unknown", answer.decode(errors="replace")[:200])
