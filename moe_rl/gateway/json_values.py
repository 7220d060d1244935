"""Says which JSON is carried both ways: every reader gets the same value from it, and it can be written again.

What a model says and what a client sends passes through several readers and writers: of the client's package, of the
chat template, of this gateway. Python's own reader takes more than the others: NaN, halves of surrogate pairs, numbers
beyond any bound; and deep nesting ends in an error somewhere behind.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_DEEPEST = 100
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(b"(%b(?!%b)|(?<!%b)%b)" % (_HIGH, _LOW, _HIGH, _LOW))


def carried(text: str | bytes) -> Any:
    """Return the value of JSON text. Where an object has a name twice, the last one counts.

    Raises:
        ValueError: it is none that is carried both ways. The text is for the client.
    """
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_DEEPEST}") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        content = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        if half := _HALF.search(content):
            raise ValueError(f"a text has half a surrogate pair, {half[1].decode()}, which is no character") from None
        raise ValueError(str(error)) from None
    if _depth(value) > _DEEPEST:
        raise ValueError(f"it is nested deeper than {_DEEPEST}")
    return value


def as_object(text: str) -> dict[str, Any] | None:
    """Return the arguments of a tool call that are an object and are carried both ways; None for others."""
    try:
        value = carried(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [inner for one in level for inner in _inner(one)]:
        depth += 1
    return depth


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
