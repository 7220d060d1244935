"""Which weights sampled a completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from moe_rl.errors import EngineError, describe


class VersionSpan(Protocol):
    """As vLLM reports it: sampled tokens [start, end) come from the weights called `version`."""

    version: str
    start: int
    end: int


def one_version(spans: Iterable[VersionSpan] | None, *, tokens: int, key: str) -> int:
    """The version of the weights that sampled all `tokens` tokens of request `key`. Raises EngineError if not one."""
    found = [(span.version, span.start, span.end) for span in spans or ()]
    if len(found) != 1 or found[0][1:] != (0, tokens):
        raise EngineError(
            describe("A completion was not sampled by one version", where=f"request {key}", got=found or "no version")
        )
    return int(found[0][0])
