"""Finds the turn that a chat continues by comparing messages, before they are tokenised.

A chat continues a turn if its first messages are those of the turn's request and the reply, as the client got it. A
client need not send the reasoning back. The positions of messages and the tools must match too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from moe_rl.gateway.rendering import Message, read_arguments


class Dialogues:
    """Knows the dialogues of one session: for each history that ends with a reply, its turn."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}

    def find(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, any_system: bool = False
    ) -> tuple[int, int] | None:
        """Return the newest turn whose dialogue is a prefix of the messages, and the dialogue's length, or None.

        The longest dialogue wins.

        Args:
            any_system: accept a dialogue with other system messages, which the length then does not count.
        """
        longest = None
        for count, history in enumerate(_histories(messages, tools, any_system)):
            if history in self._turns:
                longest = self._turns[history], count
        return longest

    def add(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], reply: Message, number: int
    ) -> dict[bytes, int]:
        """Remember that a turn answered these messages with `reply`. Returns the new entries, for `restore`."""
        without = {name: value for name, value in reply.items() if name != "reasoning_content"}
        new: dict[bytes, int] = {}
        for any_system in (False, True):
            *_, asked = _histories(messages, tools, any_system)
            new |= {_after(asked, answer): number for answer in (reply, without)}
        self._turns |= new
        return new

    def restore(self, turns: Mapping[bytes, int]) -> None:
        """Remember what `add` returned."""
        self._turns |= turns


def _histories(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], any_system: bool) -> Iterable[bytes]:
    """Yield a digest of the first 0, 1, 2, ... messages. any_system: skip system messages."""
    digest = hashlib.sha256(msgspec.json.encode((tools, any_system), order="deterministic")).digest()
    yield digest
    for message in messages:
        if any_system and message["role"] == "system":
            continue
        digest = _after(digest, message)
        yield digest


def _after(history: bytes, message: Message) -> bytes:
    """Return the digest of a history with one more message.

    Differences without meaning do not count: missing or empty content, and the layout of a tool call's arguments.
    """
    fields = {name: value for name, value in message.items() if value not in (None, "", [])}
    if "tool_calls" in fields:
        fields["tool_calls"] = [
            (call.get("id"), call["function"]["name"], read_arguments(call["function"]["arguments"]))
            for call in fields["tool_calls"]
        ]
    return hashlib.sha256(history + msgspec.json.encode(fields, order="deterministic")).digest()
