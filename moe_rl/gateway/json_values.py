"""Accepts only JSON that survives a round trip: every reader gets the same value from it, and it can be written again.

The JSON from models and clients passes through several readers and writers: those of the client's package, of the chat
template and of this gateway. Python's own reader accepts more than the others do: NaN, halves of surrogate pairs,
numbers of any size; and deep nesting causes an error in some later reader.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Deepest nesting of a body, and of a call's arguments, which come back inside of a body.
_DEEPEST, _DEEPEST_ARGUMENTS = 100, 80
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(b"(%b(?!%b)|(?<!%b)%b)" % (_HIGH, _LOW, _HIGH, _LOW))


def carried(text: str | bytes, deepest: int = _DEEPEST) -> Any:
    """Return the value of JSON text. If an object repeats a name, the last value counts.

    Raises:
        ValueError: it does not survive a round trip. The text is for the client.
    """
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {deepest}") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        content = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        if half := _HALF.search(content):
            raise ValueError(f"a text has half a surrogate pair, {half[1].decode()}, which is no character") from None
        raise ValueError(str(error)) from None
    if _depth(value) > deepest:
        raise ValueError(f"it is nested deeper than {deepest}")
    return value


def as_object(text: str) -> dict[str, Any] | None:
    """Return a tool call's arguments if they are an object that survives a round trip, otherwise None."""
    try:
        value = carried(text, _DEEPEST_ARGUMENTS)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _inner(outer)]:
        depth += 1
    return depth


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
