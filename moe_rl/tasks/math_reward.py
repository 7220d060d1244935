"""Provides the kind `math_verify` of a reward: mathematical answers, which the library math-verify compares.

The library's own time limit is not used. It is a signal, which works in a main thread only, may interrupt SymPy in the
middle of a change to its caches, and makes an interrupted comparison a wrong answer. Here the pool kills a verifier
process that takes too long, and the verification counts as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from math_verify import parse, verify

# It warns that without its time limit somebody else must set one. The pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify() -> Callable[..., float]:
    """Return the reward function."""
    return mathematically_equal


def mathematically_equal(completion: str, answer: str) -> float:
    """Return 1.0 if the completion's answer equals the LaTeX text `answer`; else 0.0.

    `answer` may stand between dollar signs, in a \\boxed{}, or without either.

    Raises:
        ValueError: the library reads nothing in `answer`.
    """
    delimited = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    right = parse(answer if delimited else f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not right:
        raise ValueError(f"math-verify reads nothing in the column answer: {answer!r:.80}")
    return float(verify(right, parse(completion, parsing_timeout=None), timeout_seconds=None))
