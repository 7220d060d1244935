"""Rewards of the arithmetic task: the whole completion must be `<answer>INT</answer>`."""

from __future__ import annotations

import re

# ASCII digits only, no plus sign, no leading zero, no "-0": one spelling per integer, so that the policy cannot be paid
# for an answer that a plain string comparison with the hidden one would refuse.
_ANSWER = re.compile(r"<answer>(0|-?[1-9][0-9]*)</answer>")


def _answer_in(completion: str) -> str | None:
    match = _ANSWER.fullmatch(completion.strip())
    return match.group(1) if match else None


def exact_match(completion: str, answer: str) -> float:
    """1.0 iff the completion, stripped of whitespace, is `<answer>INT</answer>` with the hidden answer; else 0.0."""
    return float(_answer_in(completion) == answer.strip())


def answer_format(completion: str) -> float:
    """1.0 iff the completion, stripped of whitespace, is `<answer>INT</answer>`, whatever the integer; else 0.0."""
    return float(_answer_in(completion) is not None)
