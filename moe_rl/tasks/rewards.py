"""Provides reward functions: those of the arithmetic demo, and the config's reward kinds `exact` and `numeric`.

The demo's functions are named in its config as `moe_rl.tasks.rewards.exact_match`. A kind's function takes its config
keys and returns the reward function. docs/howto/own_task.md describes how to write your own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Context, Decimal

# Only ASCII digits, without plus sign, leading zero or "-0". Each integer then has one spelling, so the policy earns no
# reward for an answer that a plain string comparison would reject.
_CLOSED = "</answer>"
_ANSWER = re.compile(r"<answer>(0|-?[1-9][0-9]*)</answer>")
# A number, and a unit that begins with a letter or a sign such as %. "1/2", "1,23" and "1.2.3" do not match.
_QUANTITY = re.compile(
    r"([+-]?)([$\u20ac\u00a3\u00a5]?)\s*"
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,6}(?![\w.]))?"
    r"\s*((?:[^\W\d_]|[%\u00b0$\u20ac\u00a3\u00a5]).*)?",
    re.IGNORECASE | re.DOTALL,
)
# Spellings of LaTeX, and the minus sign of Unicode.
_SPELLINGS = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("\u2212", "-"))
# Without traps, a difference beyond the largest exponent is infinite.
_ARITHMETIC = Context(prec=50, traps=[])

RewardCall = Callable[..., float]


def exact_match(completion: str, answer: str) -> float:
    """Return 1.0 if the completion, without outer whitespace, is `<answer>INT</answer>` with the hidden answer; else
    0.0.
    """
    return float(_answer_in(completion) == answer.strip())


def answer_format(completion: str) -> float:
    """Return 1.0 if the completion, without outer whitespace, is `<answer>INT</answer>` with any integer; else 0.0."""
    return float(_answer_in(completion) is not None)


def _answer_in(completion: str) -> str | None:
    match = _ANSWER.fullmatch(completion.strip())
    return match.group(1) if match else None


def find_answer(completion: str, answer_in: str, stop_string: str | None = None) -> str | None:
    """Return the answer of a completion, without outer whitespace; None if it has none.

    Args:
        stop_string: the text that ended the completion and is not part of it. `</answer>` closes the last tag.
        answer_in: "completion", "tags" for `<answer>...</answer>`, or "box" for \\boxed{...}. The last tag or box
            counts, even if it is never closed; then the completion has no answer.
    """
    if answer_in == "completion":
        return completion.strip()
    if answer_in == "tags":
        completion += _CLOSED if stop_string == _CLOSED else ""
        _, opened, rest = completion.rpartition("<answer>")
        text, closed, _ = rest.partition(_CLOSED)
        return text.strip() if opened and closed else None
    _, opened, rest = completion.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if opened else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place].strip()
    return None


def exact(*, answer_in: str) -> RewardCall:
    """Return the reward function of the kind `exact`."""

    def exact_answer(completion: str, answer: object, stop_string: str | None = None) -> float:
        """Return 1.0 if the completion's answer is the text `answer`; else 0.0."""
        if not isinstance(answer, str):
            raise ValueError(f"the column answer is {type(answer).__name__}, expected text")
        return float(find_answer(completion, answer_in, stop_string) == answer.strip())

    return exact_answer


def numeric(*, answer_in: str, tolerance: float, relative_tolerance: float) -> RewardCall:
    """Return the reward function of the kind `numeric`."""
    absolute, relative = Decimal(str(tolerance)), Decimal(str(relative_tolerance))

    def numeric_answer(completion: str, answer: object, stop_string: str | None = None) -> float:
        """Return 1.0 if the completion's answer is the number `answer`, with the same unit; else 0.0."""
        right = _quantity(str(answer)) if isinstance(answer, str | int | float) else None
        if right is None or isinstance(answer, bool):
            raise ValueError(f"the column answer is not a number: {answer!r:.80}")
        given = _quantity(find_answer(completion, answer_in, stop_string) or "")
        if given is None or given[1] != right[1]:
            return 0.0
        difference = _ARITHMETIC.abs(_ARITHMETIC.subtract(given[0], right[0]))
        allowed = _ARITHMETIC.multiply(relative, _ARITHMETIC.abs(right[0]))
        return float(difference <= max(absolute, allowed))

    return numeric_answer


def _quantity(text: str) -> tuple[Decimal, str] | None:
    """Read a number and its unit, with the currency sign first; None for any other text."""
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    sign, currency, digits, exponent, unit = match.groups(default="")
    return Decimal(f"{sign}{digits.replace(',', '')}{exponent}"), currency + "".join(unit.split())
