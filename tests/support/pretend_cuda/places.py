"""Says where in the code something happened."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType

_OURS = ("/moe_rl/", "/megatron/core/", "/benchmarks/", "/tests/")
_SELF = str(Path(__file__).parent)


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_SELF):
            yield frame
        frame = frame.f_back


def place() -> str:
    """Return file and line of the innermost code of moe_rl, Megatron, the benchmarks or the tests."""
    for frame in _frames():
        # A checkout may be called moe_rl too, and its environment lies in it.
        name = "/" + frame.f_code.co_filename.rpartition("/site-packages/")[2]
        for part in _OURS:
            before, found, after = name.rpartition(part)
            if found:
                return f"{part.strip('/')}/{after}:{frame.f_lineno}"
    return "elsewhere"


def level_of(levels: Mapping[CodeType, str]) -> str:
    """Return the level of the innermost function in the stack that has one, else "step"."""
    return next((levels[frame.f_code] for frame in _frames() if frame.f_code in levels), "step")


def formula_of_autograd() -> bool:
    """Return whether autograd itself runs this operation, and no Python code of a backward pass."""
    frame = next(one for one in _frames() if "/torch/_" not in one.f_code.co_filename)
    return frame.f_code.co_name == "_engine_run_backward"
