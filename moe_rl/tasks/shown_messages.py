"""Finds parts of a chat that its rendered text does not show.

A template silently omits what it does not know: tools, calls, reasoning, names. So a copy of the chat is rendered too,
in which a unique word replaces each text. A text whose word is missing from the result was not shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Chat = Sequence[Mapping[str, Any]]
Render = Callable[[Chat, Chat], str]
"""Renders messages and tools as text, with the beginning of the next answer."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
_ASKS: Mapping[str, Any] = {"role": "user", "content": "a"}


class NotShown(ValueError):
    """Raised for a part that is not shown. The text is for the user.

    Attributes:
        number: the message's number; None for a tool.
        field: the field of the message or the request.
    """

    def __init__(self, text: str, number: int | None, field: str):
        super().__init__(text)
        self.number, self.field = number, field


@dataclass(frozen=True, slots=True)
class _Place:
    number: int | None
    field: str
    got: str


@dataclass
class _Words:
    """Makes the copy of a chat, and maps each word to its text."""

    places: dict[str, _Place] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def new(self, number: int | None, name: str, got: str) -> str:
        # The strictest templates require a call id of nine letters and digits.
        word = f"zq{len(self.places):07d}"
        self.places[word] = _Place(number, name, got)
        return word

    def text(self, text: str, number: int | None, name: str) -> str:
        return self.new(number, name, text) if text.strip() else text

    def id(self, given: str) -> str:
        return self.ids.setdefault(given, f"zx{len(self.ids):07d}")

    def message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(message)
        for name, value in message.items():
            if name == "tool_calls" and value:
                made[name] = [self._call(number, call) for call in value]
            elif name == "tool_call_id" and isinstance(value, str):
                made[name] = self.id(value)
            elif name == "content" and isinstance(value, list):
                made[name] = [{**part, "text": self.text(part["text"], number, name)} for part in value]
            elif name != "role" and isinstance(value, str):
                made[name] = self.text(value, number, name)
        return made

    def _call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(call)
        if isinstance(call.get("id"), str):
            made["id"] = self.id(call["id"])
        inner = call.get("function")
        function = dict(inner if isinstance(inner, Mapping) else call)
        if isinstance(function.get("name"), str):
            function["name"] = self.text(function["name"], number, "tool_calls")
        function["arguments"] = self._arguments(number, function.get("arguments"))
        return {**made, "function": function} if isinstance(inner, Mapping) else {**made, **function}

    def _arguments(self, number: int, arguments: Any) -> Any:
        """Return arguments with one word as name and one as value, in the form of the given arguments."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
        value = _json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, Mapping):
            return self.text(arguments, number, "tool_calls") if isinstance(arguments, str) else arguments
        made = {self.new(number, "tool_calls", text): self.new(number, "tool_calls", text)} if value else {}
        return json.dumps(made) if isinstance(arguments, str) else made

    def tool(self, number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        inner = tool.get("function")
        function = dict(inner if isinstance(inner, Mapping) else tool)
        name = f"tools.{number}"
        tool_name = str(function.get("name"))
        for key in ("name", "description"):
            if isinstance(function.get(key), str):
                function[key] = self.new(None, name, tool_name) if function[key].strip() else function[key]
        parameters = function.get("parameters")
        if isinstance(parameters, Mapping) and parameters.get("properties"):
            if not isinstance(parameters["properties"], Mapping):
                raise NotShown(f"the properties of a tool's parameters are no object: {tool_name!r}", None, name)
            schemas = [schema for schema in parameters["properties"].values() if isinstance(schema, Mapping)]
            made: dict[str, Any] = {"type": "string"}
            if any(schema.get("description") for schema in schemas):
                made["description"] = self.new(None, name, tool_name)
            if any(schema.get("enum") for schema in schemas):
                made["enum"] = [self.new(None, name, tool_name)]
            properties = {self.new(None, name, tool_name): made}
            function["parameters"] = {**parameters, "properties": properties, "required": list(properties)}
        return {**tool, "function": function} if isinstance(inner, Mapping) else function


def shown_whole(messages: Chat, tools: Chat, render: Render) -> tuple[Chat, str]:
    """Return the messages of a row and their text, which shows all of them.

    Data sets and templates have several spellings of a call of a tool: beside it null, "" or no content, and its
    arguments as an object or as JSON text. Where the template does not show the row's spelling, others are tried.

    Raises:
        NotShown: no spelling is shown whole, see `check_shown`.
        ValueError: `render` raised it.
    """
    refusals = []
    for spelt in _spellings(messages):
        try:
            text = render(spelt, tools)
            check_shown(spelt, tools, render)
            return spelt, text
        except ValueError as error:
            refusals.append(error)
    raise next((refusal for refusal in refusals if isinstance(refusal, NotShown)), refusals[0])


def _spellings(messages: Chat) -> Iterator[Chat]:
    yield messages
    if any(message.get("tool_calls") for message in messages):
        for convert in (None, json.loads, json.dumps):
            for nothing in (None, ""):
                yield [
                    _spelt(message, nothing, convert) if message.get("tool_calls") else message for message in messages
                ]


def _spelt(message: Mapping[str, Any], nothing: str | None, convert: Callable[[Any], Any] | None) -> Mapping[str, Any]:
    def spelt(call: Any) -> Any:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if convert is None or not isinstance(inner, Mapping):
            return call
        arguments = inner.get("arguments")
        if arguments is not None and isinstance(arguments, str) != (convert is json.dumps):
            with suppress(ValueError):  # a text that is no JSON
                inner = {**inner, "arguments": convert(arguments)}
        return {**call, "function": inner} if "function" in call else {"type": "function", "function": inner}

    return {**message, "content": message.get("content") or nothing, "tool_calls": [*map(spelt, message["tool_calls"])]}


def check_shown(messages: Chat, tools: Chat, render: Render, *, start: int = 0, said: int = 0) -> None:
    """Raise NotShown unless the rendered text shows all content of the messages and tools.

    A template may omit the reasoning before the user's last message if it shows the reasoning after it, as those of
    Qwen3 and GLM-4.5 do. It may omit the ids of calls if the results are in the order of their calls, and the tool
    name of a result.

    Args:
        render: gets the messages from `start` on.
        said: how many of the first messages were checked before; the model's own reasoning in them may be omitted.

    Raises:
        NotShown: something is not shown.
        ValueError: `render` raised it.
    """
    words = _Words()
    marked = [words.message(number, message) for number, message in enumerate(messages) if number >= start]
    marked_tools = [words.tool(index, tool) for index, tool in enumerate(tools)]
    text = render(marked, marked_tools)
    asked = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for word, place in words.places.items():
        if word in text:
            continue
        number = place.number
        if number is None:
            raise NotShown(f"the chat template does not show a tool: {place.got!r}", None, place.field)
        if place.field in _REASONING and (number < said or (number < asked and _shows(place.field, render, start))):
            continue
        if place.field == "name" and messages[number]["role"] == "tool" and place.got in _called(messages[:number]):
            continue
        raise _not_shown(messages, number, place.field, place.got)
    for number, message in enumerate(messages[start:], start):
        for name, value in message.items():
            if (
                isinstance(value, str)
                or value is False
                or value in (None, [], {})
                or name in ("role", "content", "tool_calls")
            ):
                continue
            without = [{**marked_message} for marked_message in marked]
            del without[number - start][name]
            if render(without, marked_tools) == text:
                raise _not_shown(messages, number, name, value)
    if not all(text.count(word) > 1 for word in words.ids.values()):
        _check_order(messages, start)


def _not_shown(messages: Chat, number: int, name: str, got: Any) -> NotShown:
    role = messages[number]["role"]
    text = f"the chat template does not show the {name} of message {number}, of role {role}: {str(got)[:60]!r}"
    return NotShown(text, number, name)


def _check_order(messages: Chat, start: int) -> None:
    """Raise NotShown for a result whose position implies another call than its id."""
    calls: list[Any] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            calls = [call.get("id") for call in message.get("tool_calls") or ()]
        elif calls and (name := message.get("tool_call_id")) is not None and name != calls.pop(0) and number >= start:
            text = (
                "the chat template does not show the ids of tool calls, so results must come in the order of their "
                f"calls. This one does not, the tool_call_id of message {number}: {str(name)[:60]!r}"
            )
            raise NotShown(text, number, "tool_call_id")


def _called(messages: Chat) -> set[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {str((call.get("function") or call).get("name")) for call in calls}


def _shows(name: str, render: Render, start: int) -> bool:
    """Return whether a template shows the reasoning of any message."""
    if start:
        return False  # an answer cannot follow an answer
    word = "zq0000000"
    call = {"id": "zx0000000", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    thought: Mapping[str, Any] = {"role": "assistant", "content": "b", name: word}
    result = {"role": "tool", "tool_call_id": "zx0000000", "content": "c"}
    chats: list[Chat] = [[_ASKS, {**thought, "tool_calls": [call]}, result], [_ASKS, thought], [_ASKS, thought, _ASKS]]
    for chat in chats:
        try:
            if word in render(chat, ()):
                return True
        except ValueError:  # the template does not support such a chat
            continue
    return False


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
