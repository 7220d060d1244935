"""Reads the JSON lines of other samplers, with a bound on the length of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from moe_rl.errors import About, TraceError

T = TypeVar("T")


def decoded_lines(
    path: Path, decoder: msgspec.json.Decoder[T], *, limit: int, wrong: str, expected: str
) -> Iterator[tuple[About, T]]:
    """Yield the place and the content of every line that is not blank.

    Args:
        limit: longest line, in bytes.
        wrong: what a message says of a line that the decoder refuses.
        expected: the form of a line, for that message.

    Raises:
        TraceError: The file cannot be read, or a line is too long or refused.
    """
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(limit + 1), b""), 1):
                where: About = {"file": path, "line": number}
                if len(text) > limit:
                    raise TraceError("line is too long", where=where, expected=f"at most {limit} bytes")
                if not text.strip():
                    continue
                try:
                    try:
                        line = decoder.decode(text)
                    except msgspec.ValidationError:
                        raise
                    except msgspec.DecodeError:  # Python writes NaN and Infinity, which JSON does not have
                        line = msgspec.convert(json.loads(text), decoder.type)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise TraceError(
                        wrong, where=where, got=str(error)[:200], expected=expected, fault="no import line"
                    ) from error
                yield where, line
    except OSError as error:
        raise TraceError("file cannot be read", where={"file": path}, got=error.strerror) from error
