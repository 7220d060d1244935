"""Offers the model to an environment: the session of one episode, as its code sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from moe_rl.messages import Message


class SessionAccess(Message, frozen=True):
    """Says how a session of the gateway is reached, and what it may use.

    Attributes:
        name: of the session, as its owner knows it.
        url: for clients of Anthropic's API. base_url: for those of OpenAI's. Both hold the key.
        key: API key, for clients that take the gateway's own address.
        turns, tokens: limits that the session was opened with; None where the gateway's own hold.
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
        message: the assistant's: role, content (None if it is empty), and where there are any, reasoning_content and
            tool_calls. It may be put behind the others as it is.
        finish_reason: stop, tool_calls, or length for a message that was cut off.
    """

    message: dict[str, Any]
    finish_reason: str


class ChatError(Exception):
    """Says that the gateway refused a request, or could not answer it.

    Attributes:
        status: of HTTP.
        code: the gateway's name of the fault. session_limit: the session has used its turns, tokens or time.
            context_length_exceeded: the dialogue is longer than the model takes.
    """

    def __init__(self, status: int, code: str, text: str):
        super().__init__(f"status {status}, {code}: {text}")
        self.status, self.code = status, code


class AgentSession:
    """Lets an environment ask the model. Use it in the event loop that it was made in.

    A harness with a client of its own gives it `base_url` (OpenAI's packages) or `url` (Anthropic's), and `key`.

    Attributes:
        url, base_url, key, turns, tokens: as in `SessionAccess`.
        seconds: time limit of the episode.
    """

    def __init__(self, access: SessionAccess, seconds: float):
        self.url, self.base_url, self.key = access.url, access.base_url, access.key
        self.turns, self.tokens, self.seconds = access.turns, access.tokens, seconds
        # The time limit of the episode is the only one. A proxy would see the key.
        self._client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> dict[str, Any]:
        """Ask as `ask` does, and return the message alone."""
        return (await self.ask(messages, tools=tools, **sampling)).message

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> ChatReply:
        """Ask for the next message of a dialogue, which is one turn of the session.

        Args:
            messages, tools: as in OpenAI's chat completions.
            sampling: further fields of the request, such as temperature or max_tokens; not n above 1, and not stream.

        Raises:
            ChatError: the gateway refused the request.
            httpx.TransportError: the gateway cannot be reached.
        """
        body = {"model": "policy", "messages": list(messages), **({"tools": list(tools)} if tools else {}), **sampling}
        answer = await self._client.post(f"{self.base_url}/chat/completions", json=body)
        if answer.status_code != 200:
            raise _refusal(answer)
        (choice,) = answer.json()["choices"]
        message = {name: value for name, value in choice["message"].items() if value is not None or name == "content"}
        return ChatReply(message, choice["finish_reason"])


def _refusal(answer: httpx.Response) -> ChatError:
    try:
        told = answer.json()["error"]
        return ChatError(answer.status_code, told["code"], told["message"])
    except (ValueError, KeyError, TypeError):
        return ChatError(answer.status_code, "unknown", answer.text[:200])
