"""Reads messages and tools from the columns of a row. Published data sets also store them as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from moe_rl.config.prompt_sources import ChatConfig
from moe_rl.tasks.rows import plain_json, value_at

# The beginning of messages in JSON and in Python's repr.
_MESSAGES = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|content|from|value|messages)["']\s*:""")
_OBJECT = re.compile(r"\s*(?:\[\s*)?\{")
_QUOTED = re.compile(r'\s*"\s*\[\s*\{\s*\\"')
_ROLE = re.compile(r"""["'](?:role|from)["']\s*:""")

_SYSTEM = ("system", "systemprompt", "systemmessage", "systeminstruction")
_READ = ("image", "images", "video", "videos", "audio", "audios", "history", "chat_template_kwargs")
# The prompt's column, and one that belongs to it: in Alpaca's rows and in requests of OpenAI's Responses API.
_BESIDE = {("instruction", "input"), ("input", "instructions")}


def stored_messages(prompt: str | list[Any]) -> str | list[Any]:
    """Return the messages that a text holds as JSON; any other prompt unchanged.

    Raises:
        ValueError: the text looks like messages but cannot be read as a list of them. The text is for the user.
    """
    if isinstance(prompt, str) and _QUOTED.match(prompt):  # JSON text of JSON text
        with suppress(ValueError):
            inner = stored_messages(plain_json(prompt))
            return inner if isinstance(inner, list) else prompt
    if not isinstance(prompt, str) or not _OBJECT.match(prompt) or not _ROLE.search(prompt):
        return prompt
    remedy = "give a list of messages, or JSON text of one"
    try:
        value = plain_json(prompt)
    except ValueError as error:
        if not _MESSAGES.match(prompt) or _begins_with_other_json(prompt):
            return prompt  # a text that begins with some JSON
        raise ValueError(f"the prompt looks like stored messages but is not JSON; {remedy}: {prompt[:60]!r}") from error
    if isinstance(value, list):
        return value if _are_messages(value) else prompt
    within = next((name for name, field in value.items() if isinstance(field, list) and _are_messages(field)), None)
    if within is not None:
        remedy = f"name the messages inside it with the key `prompt` of the source, as in prompt.{within}"
    elif "role" not in value or not _MESSAGES.match(prompt):
        return prompt
    raise ValueError(f"the prompt is JSON text of an object, not a list of messages; {remedy}: {prompt[:60]!r}")


def _begins_with_other_json(text: str) -> bool:
    """Return whether a text goes on after a whole value of JSON that is no list of messages."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text.strip())
    except ValueError:
        return False
    return not (isinstance(value, list) and _are_messages(value))


def _are_messages(value: list[Any]) -> bool:
    """Return whether all have a role, and what it says or calls."""
    return bool(value) and all(
        isinstance(item, dict) and {"role", "from"} & item.keys() and {"content", "value", "tool_calls"} & item.keys()
        for item in value
    )


def listed_tools(row: dict[str, Any], column: str) -> list[Mapping[str, Any]]:
    """Return the tools of a row. Its column holds a list of JSON schemas, or JSON text of the list or of each schema.

    Raises:
        ValueError: the column holds something else. The text is for the user.
    """
    stored = _stored(value_at(row, column), column) or []
    tools = [_stored(tool, column) for tool in stored] if isinstance(stored, list) else []
    if not isinstance(stored, list) or not all(map(_is_tool, tools)):
        raise _no_tools(column, stored)
    return tools


def refuse_unread(
    row: dict[str, Any],
    column: str,
    prompt: str | list[Any],
    chat: ChatConfig,
    *,
    tools_unknown: bool,
    left_out: Collection[str] = (),
) -> None:
    """Refuse a row whose columns say what the prompt does not show: tools under another name, settings of the template,
    a system message, earlier turns, images. Columns beside the prompt inside of an object count too.

    Args:
        column: name of the prompt's column.
        chat: the settings `task.chat`.
        tools_unknown: whether the row may have tools in a column that nobody named.
        left_out: columns without a JSON value.

    Raises:
        ValueError: there is such a column. The text is for the user.
    """
    others = {name: value for name, value in row.items() if name != column}
    if tools_unknown and (unshown := next(_tool_lists(others), None)):
        raise ValueError(
            f"the column {unshown[0]} has tools that the prompt does not show; name it with tools={unshown[0]} in the "
            f"source, or set tools=null: {len(unshown[1])} tools"
        )
    first = prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], Mapping) else {}
    has_system = chat.system is not None or first.get("role") in ("system", "developer")
    _, _, asks = column.rpartition(".")
    for place, stored in [*_beside(row, column), *((name, "no JSON value") for name in left_out)]:
        _, _, name = place.rpartition(".")
        is_system = name.lower().replace("_", "") in _SYSTEM and not isinstance(stored, int | float)
        if not (is_system or name in _READ or (asks, name) in _BESIDE):
            continue
        value = _value(stored)
        if not value or (is_system and has_system):
            continue
        if isinstance(prompt, str) and isinstance(value, str) and value in prompt:
            continue
        if name == "history" and not (isinstance(value, list) and all(isinstance(turn, list | dict) for turn in value)):
            continue
        if name != "chat_template_kwargs":
            raise ValueError(
                f"the row has a column {place} that the prompt does not show; put it into the prompt's messages, or "
                f"leave it out or rename it if the prompt is to be without it: {str(value)[:60]!r}"
            )
        if isinstance(value, Mapping) and any(chat.template_kwargs.get(key) != option for key, option in value.items()):
            raise ValueError(
                f"the row has {place}, which are not read; set task.chat.template_kwargs for all rows, or leave the "
                f"column out: {value}"
            )


def _beside(row: dict[str, Any], column: str) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row but the prompt's, and the fields of the objects that the prompt is in."""
    inside = column.split(".") if column not in row else [column]
    for depth in range(len(inside)):
        outer = ".".join(inside[:depth])
        held = _value(value_at(row, outer)) if depth else row
        for name, value in held.items() if isinstance(held, Mapping) else ():
            if name != inside[depth]:
                yield f"{outer}.{name}".lstrip("."), value


def _value(value: Any) -> Any:
    """Return the value of JSON text of a list or object; anything else unchanged."""
    if isinstance(value, str) and re.match(r"\s*[\[{]", value):
        with suppress(ValueError):
            return plain_json(value)
    return value


def says_nothing(prompt: str | list[Any]) -> bool:
    """Return whether a prompt has no text, call or other content."""
    if isinstance(prompt, str):
        return prompt.strip() in ("", "[]")
    return all(
        isinstance(message, Mapping)
        and "role" in message
        and not (message.keys() - {"role", "content"} or str(message.get("content") or "").strip())
        for message in prompt
    )


def _tool_lists(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield (dotted name, tools) for each list of schemas inside a row, or inside JSON text in it."""
    if isinstance(value, str) and _OBJECT.match(value):
        value = _value(value)
    if isinstance(value, list) and value and all(map(_is_schema, value)):
        yield name, value
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _tool_lists(inner, f"{name}.{key}".lstrip("."))


def _is_schema(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    kinds = {"parameters", "input_schema", "inputSchema"}
    return _is_tool(value) and isinstance(inner, Mapping) and any(isinstance(inner.get(key), Mapping) for key in kinds)


def _stored(value: Any, column: str) -> Any:
    try:
        return plain_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise _no_tools(column, value) from error


def _is_tool(tool: Any) -> bool:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str)


def _no_tools(column: str, value: Any) -> ValueError:
    return ValueError(
        f"the column {column} is not a list of tools with names, nor JSON text of one; give one, or set tools=null in "
        f"the source if the column is for something else: {str(value)[:60]!r}"
    )
