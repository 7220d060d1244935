"""Compares what a renderer writes with what the model's own chat template writes, dialogue by dialogue."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.config.environment import DialogueKind

Message = Mapping[str, Any]
"""A chat message in OpenAI's form: role, content as text, and perhaps tool_calls, tool_call_id, reasoning_content."""

Chat = Sequence[Message]
Ids = tuple[int, ...]

# How many tokens of each rendering a message shows.
_TOLD = 8

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def _says(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _call(number: int, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"abcdefgh{number}",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps(arguments)},
    }


def _result(number: int, text: str) -> Message:
    return _says("tool", text, tool_call_id=f"abcdefgh{number}")


_ASKS, _AGAIN, _SYSTEM = _says("user", "Hello, you."), _says("user", "And then?"), _says("system", "Be brief.")
_ANSWERS = _says("assistant", "I am well.")
_CALLS = _says("assistant", "", tool_calls=[_call(1, a=2)])
_CALLS_TWICE = _says("assistant", "", tool_calls=[_call(1, a=2, s="two words"), _call(2, a=[3, {"b": None}])])

DIALOGUES: Mapping[DialogueKind, Sequence[tuple[Chat, Chat]]] = {
    "first_turns": [([_ASKS], []), ([_SYSTEM, _ASKS], [])],
    "later_turns": [
        ([_ASKS, _ANSWERS, _AGAIN, _ANSWERS, _AGAIN], []),
        ([_SYSTEM, _ASKS, _ANSWERS, _AGAIN], []),
        ([_ASKS, _says("assistant", ""), _AGAIN], []),
    ],
    "tools": [([_ASKS], [_TOOL]), ([_SYSTEM, _ASKS], [_TOOL])],
    "tool_calls": [
        ([_ASKS, _CALLS, _result(1, "5")], [_TOOL]),
        ([_ASKS, {**_CALLS, "content": "I add."}, _result(1, "5")], [_TOOL]),
        ([_ASKS, _CALLS_TWICE, _result(1, "5"), _result(2, "6")], [_TOOL]),
        ([_SYSTEM, _ASKS, _CALLS, _result(1, "5"), _ANSWERS, _AGAIN], [_TOOL]),
    ],
    "reasoning": [
        ([_ASKS, {**_CALLS, "reasoning_content": "I must add."}, _result(1, "5")], [_TOOL]),
        ([_ASKS, {**_ANSWERS, "reasoning_content": "Polite."}, _AGAIN], []),
    ],
}
"""Messages and tools of dialogues by kind. Together they cover every element that a session may have."""


def kinds_of(messages: Chat, tools: Chat) -> set[DialogueKind]:
    """Return the kinds of a dialogue."""
    kinds: set[DialogueKind] = {"first_turns"}
    if tools:
        kinds.add("tools")
    for message in messages:
        if message["role"] == "assistant":
            kinds.add("later_turns")
        if message["role"] == "tool" or message.get("tool_calls"):
            kinds.add("tool_calls")
        # Renderers read the tags of thinking in a text too.
        if message.get("reasoning_content") or "</think>" in (message.get("content") or ""):
            kinds.add("reasoning")
    return kinds


ChatWriter = Callable[..., Ids]
"""Writes the tokens of messages with tools; with `answers`, the default, also the beginning of the next answer. Raises
ValueError if the messages are refused."""

ChatExtender = Callable[[Sequence[int], Sequence[int], Chat, Chat], Ids | None]
"""Writes messages after a prompt and its completion, see ChatRenderer.extend."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Describes where two renderings diverge: index of the first differing token, and some tokens from it on."""

    at: int
    ours: Sequence[int]
    theirs: Sequence[int]


def difference(ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """Return where two lists of tokens diverge; None if they are equal."""
    if list(ours) == list(theirs):
        return None
    start = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return Difference(start, ours[start : start + _TOLD], theirs[start : start + _TOLD])


def differences(
    ours: ChatWriter, theirs: ChatWriter, extend: ChatExtender, ends: Collection[int]
) -> Iterator[tuple[DialogueKind, Chat, Difference]]:
    """Yield the dialogues that a renderer writes differently from the template: whole, or the messages after an answer.

    Dialogues that the template or the renderer refuses are skipped: no client can request them.

    Args:
        ends: tokens that end an answer.
    """
    for kind, dialogues in DIALOGUES.items():
        for messages, tools in dialogues:
            try:
                written, expected = ours(messages, tools), theirs(messages, tools)
            except ValueError:
                continue
            where = difference(written, expected) or _behind_an_answer(messages, tools, theirs, extend, ends)
            if where is not None:
                yield kind, messages, where


def _behind_an_answer(
    messages: Chat, tools: Chat, template: ChatWriter, extend: ChatExtender, ends: Collection[int]
) -> Difference | None:
    """Compare what both write after the last answer. The answer itself is skipped, because its tokens are kept as they
    are."""
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        return None
    prompt, answered = template(messages[:last], tools), template(messages[: last + 1], tools, answers=False)
    answer = answered[len(prompt) :]
    end = next((n for n, token in enumerate(answer) if token in ends), None)
    if answered[: len(prompt)] != prompt or end is None:
        return None  # the template writes a finished answer differently
    extended = extend(prompt, answer[: end + 1], messages[last + 1 :], tools)
    if extended is None:
        return None
    new = extended[len(prompt) + end + 1 :]
    expected = template(messages, tools)
    return difference(new, expected[len(expected) - len(new) :])
