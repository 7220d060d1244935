"""Rewards of tasks whose answer is an integer in the last \\boxed{...} of the completion, as in contests."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\{\s*(-?[0-9][0-9,]*)\s*\}")


def integer_match(completion: str, answer: str) -> float:
    """1.0 iff the last box with an integer holds the hidden one, thousands' commas and leading zeros aside; else 0.0.

    A later box with anything else in it is an answer too, and a wrong one. Raises ValueError when `answer` is none.
    """
    wanted = int(answer.replace(",", ""))
    start = completion.rfind("\\boxed")
    match = _BOX.match(completion, start) if start >= 0 else None
    return float(match is not None and int(match.group(1).replace(",", "")) == wanted)
