"""Asserts what an error is about: its type and its data, never its wording."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from moe_rl.errors import Problem


def tells(told: str | BaseException, *pieces: str, **facts: object) -> Problem:
    """Assert that an error or a message carries these facts, and return the message.

    facts: parts of its `about`, or `fault`, `got` and `expected`. A tuple gives texts that
    the part must contain, a set those of which it must be one.
    pieces: numbers, keys and names that the text must contain; not prose.
    """
    message = getattr(told, "message", None) or (
        told.args[0] if isinstance(told, BaseException) and told.args else told
    )
    assert isinstance(message, Problem), f"a plain text: {message!r}"
    parts: Mapping = {**message.about, **{part: getattr(message, part) for part in ("fault", "got", "expected")}}
    for name, value in facts.items():
        found = str(parts.get(name, f"no {name}"))
        if isinstance(value, tuple):
            held = all(str(piece) in found for piece in value)
        else:
            held = found in value if isinstance(value, set) else found == str(value)
        assert held, f"{name}: {found!r} instead of {value!r} in: {message}"
    for piece in pieces:
        assert str(piece) in message, f"no {piece!r} in: {message}"
    return message


@contextmanager
def refused(kind: type[BaseException] | tuple[type[BaseException], ...], *pieces: str, **facts: object) -> Iterator:
    """Expect an error of this type that `tells` these facts."""
    with pytest.raises(kind) as caught:
        yield caught
    tells(caught.value, *pieces, **facts)
