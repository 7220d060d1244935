"""Reads messages and tools from the columns of a row. Published data sets also store them as JSON text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from moe_rl.config.prompt_sources import ChatConfig
from moe_rl.tasks.rows import plain_json, value_at

# The beginning of messages in JSON and in Python's repr.
_MESSAGES = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|content|from|value|messages)["']\s*:""")
_OBJECT = re.compile(r"\s*(?:\[\s*)?\{")
_QUOTED = re.compile(r'\s*"\s*\[\s*\{\s*\\"')
_ROLE = re.compile(r"""["'](?:role|from)["']\s*:""")

_SYSTEM, _MEDIA = ("system", "system_prompt", "system_message"), ("images", "videos", "audios")


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
        if not _MESSAGES.match(prompt):
            return prompt  # a text that begins with some JSON
        raise ValueError(f"the prompt looks like stored messages but is not JSON; {remedy}: {prompt[:60]!r}") from error
    if isinstance(value, list):
        return value if _are_messages(value) else prompt
    within = next((name for name, one in value.items() if isinstance(one, list) and _are_messages(one)), None)
    if within is not None:
        remedy = f"name the messages inside it with the key `prompt` of the source, as in prompt.{within}"
    elif "role" not in value or not _MESSAGES.match(prompt):
        return prompt
    raise ValueError(f"the prompt is JSON text of an object, not a list of messages; {remedy}: {prompt[:60]!r}")


def _are_messages(value: list[Any]) -> bool:
    """Return whether all have a role, and what it says or calls."""
    return bool(value) and all(
        isinstance(one, dict) and {"role", "from"} & one.keys() and {"content", "value", "tool_calls"} & one.keys()
        for one in value
    )


def listed_tools(row: dict[str, Any], column: str) -> list[Mapping[str, Any]]:
    """Return the tools of a row. Its column holds a list of JSON schemas, or JSON text of the list or of each schema.

    Raises:
        ValueError: the column holds something else. The text is for the user.
    """
    found = _stored(value_at(row, column), column) or []
    tools = [_stored(tool, column) for tool in found] if isinstance(found, list) else []
    if not isinstance(found, list) or not all(map(_is_tool, tools)):
        raise _no_tools(column, found)
    return tools


def refuse_unread(
    row: dict[str, Any], column: str, prompt: str | list[Any], chat: ChatConfig, *, tools_unknown: bool
) -> None:
    """Refuse a row of a chat whose columns say what the prompt does not show: tools under another name, settings of the
    template, a system message, earlier turns, images.

    Args:
        column: name of the prompt's column.
        chat: the settings `task.chat`.
        tools_unknown: whether the row may have tools in a column that nobody named.

    Raises:
        ValueError: there is such a column. The text is for the user.
    """
    row = {name: value for name, value in row.items() if name != column}
    if tools_unknown and (found := next(_tool_lists(row), None)):
        raise ValueError(
            f"the column {found[0]} has tools that the prompt does not show; name it with tools={found[0]} in the "
            f"source, or set tools=null: {len(found[1])} tools"
        )
    own = row.get("chat_template_kwargs")
    if isinstance(own, Mapping) and any(chat.template_kwargs.get(name) != value for name, value in own.items()):
        raise ValueError(
            f"the row has chat_template_kwargs, which are not read; set task.chat.template_kwargs for all rows, or "
            f"leave the column out: {own}"
        )
    unread = [name for name in _MEDIA if isinstance(row.get(name), list)]
    unread += ["history"] if isinstance(row.get("history"), list) else []
    first = prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], Mapping) else {}
    if chat.system is None and first.get("role") not in ("system", "developer"):
        unread += [name for name in _SYSTEM if isinstance(row.get(name), str)]
    if column == "instruction" and isinstance(row.get("input"), str):  # as in Alpaca
        unread += ["input"]
    for name in unread:
        if row[name] and not (name == "history" and not all(isinstance(one, list | dict) for one in row[name])):
            raise ValueError(
                f"the row has a column {name} that the prompt does not show; put it into the prompt's messages, or "
                f"leave it out or rename it if the prompt is to be without it: {str(row[name])[:60]!r}"
            )


def _tool_lists(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield (dotted name, tools) for each list of schemas inside a row, or inside JSON text in it."""
    if isinstance(value, str) and _OBJECT.match(value):
        with suppress(ValueError):
            value = plain_json(value)
    if isinstance(value, list) and value and all(map(_is_schema, value)):
        yield name, value
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _tool_lists(inner, f"{name}.{key}".lstrip("."))


def _is_schema(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    kinds = {"parameters", "input_schema", "inputSchema"}
    return _is_tool(value) and isinstance(inner, Mapping) and any(isinstance(inner.get(one), Mapping) for one in kinds)


def _stored(value: Any, column: str) -> Any:
    try:
        return plain_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise _no_tools(column, value) from error


def _is_tool(tool: Any) -> bool:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str)


def _no_tools(column: str, found: Any) -> ValueError:
    return ValueError(
        f"the column {column} is not a list of tools with names, nor JSON text of one; give one, or set tools=null in "
        f"the source if the column is for something else: {str(found)[:60]!r}"
    )
