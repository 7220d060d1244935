"""Provides the reward kind `math_verify`: mathematical answers, compared by the library math-verify.

The library's own time limit is not used. It is a signal, which works only in a main thread, may interrupt SymPy while
it changes its caches, and turns an interrupted comparison into a wrong answer. Here the pool kills a verifier process
that takes too long, and the verification counts as failed.

Its defaults round numbers to 6 decimals, and it misreads some spellings. A few rules here correct both in part.
tests/tasks/test_math_reward.py has a table of answers with the right verdicts, and of those that stay wrong.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from math_verify import parse, verify
from sympy import Expr, UnevaluatedExpr

# It warns that without its time limit the caller must set one. The pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Decimals for comparing floats, and digits for evaluating expressions. A float has 15 digits.
_DECIMALS, _DIGITS = 15, 40
# Numbers with a larger relative difference are not equal. It is far above the rounding of floats.
_RELATIVE = 1e-13

# Unicode mathematics that the library does not read, or reads only partly.
_SIGNS = {
    "\u2212": "-",
    "\u221e": "\\infty ",
    "\u22c5": "\\cdot ",
    "\u00b7": "\\cdot ",
    "\u00b0": "^\\circ ",
    "\u2208": "\\in ",
    "\u222a": "\\cup ",
    "\u2044": "/",
}
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-z]))")
# Digits in groups of three, separated by spaces of text or LaTeX.
_GROUPS = re.compile(r"(?<![\d.,}])\d{1,3}(?:(?: |~|\\[ ,;:!]|\\thinspace *)\d{3})+(?!\s*[\d/])")
_BETWEEN = re.compile(r"~|\\thinspace *|\\?[ ,;:!]")
# A number with a power of ten. The power has at most three digits, so that no short text becomes a huge number.
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\/])(\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE]([+-]?\d{1,3})|\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(-\d{1,3}|\d)))(?!\w|\.\d)"
)
_MIXED = re.compile(r"(?<![\w.,/])(\d{1,9}) +(\d{1,9})/([1-9]\d{0,8})(?![\w/]|\.\d)")
_CURRENCY = re.compile(r"(?:[\u20ac\u00a3\u00a5]|\\text\{\s*\\\$\s*\})\s*(?=\d)")
# A dash of text that is no range.
_MINUS = re.compile(r"(?<![\w\s.)}])\u2013(?=\d|\\frac|\.\d)")
_MONEY = re.compile(r"(?<=\d)\s+(?:dollars?|euros?|pounds?)\b")
# "The answer is (B).", "the answer is b) 12": a letter for a choice, at the end of a clause or as a label.
_CHOICE = re.compile(
    r"((?i:answer|correct\s+(?:option|choice))(?:\s+is)?(?:\s+(?i:option|choice))?\s*:?\s*)\**"
    r"\(?([A-Za-z])(?:\)\**|\**(?=\s*(?:[.,;:!]|\n|$)|\s+(?:because|since)\b))"
)
_TAGGED = re.compile("<answer>(.*?)</answer>", re.DOTALL)
_SENTENCE = re.compile("[A-Za-z]+ +[A-Za-z]+")
_DOLLAR = re.compile(r"(?<!\\)\$")


def math_verify() -> Callable[..., float]:
    """Return the reward function."""
    return mathematically_equal


def mathematically_equal(completion: str, answer: object) -> float:
    """Return 1.0 if the completion's answer equals the LaTeX text `answer`; else 0.0.

    `answer` may be between dollar signs, in a \\boxed{}, or without either. It may be a number.

    Raises:
        ValueError: the library finds no mathematics in `answer`.
    """
    right = _read_answer(answer)
    given = parse(_spelt(_final(completion)), parsing_timeout=None)
    equal = verify(
        right,
        given,
        float_rounding=_DECIMALS,
        numeric_precision=_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return float(equal and not _far_apart(right[0], given[0]))


def _final(completion: str) -> str:
    """Return the last text between answer tags, as a whole answer where it is no sentence; else the completion."""
    tagged = _TAGGED.findall(completion)
    if not tagged:
        return completion
    text = tagged[-1].strip()
    return text if _delimited(text) or _SENTENCE.search(text) else f"\\boxed{{{text}}}"


def _delimited(text: str) -> bool:
    return len(_DOLLAR.findall(text)) > 1 or any(mark in text for mark in ("\\boxed", "\\(", "\\["))


def _read_answer(answer: object) -> list[Any]:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the column answer is {type(answer).__name__}, expected text or a number")
    text = _spelt(str(answer))
    right = parse(text if _delimited(text) else f"\\boxed{{{_DOLLAR.sub('', text)}}}", parsing_timeout=None)
    if not right:
        raise ValueError(f"math-verify finds no mathematics in the column answer: {answer!r:.80}")
    return list(right)


def _spelt(text: str) -> str:
    """Rewrite a text in spellings that the library reads, in LaTeX and outside. Numbers with a power of ten become
    exact integers and fractions.
    """
    text = "".join(map(_sign, text))
    text = _SUPERSCRIPT.sub(_raised, text)
    text = _MONEY.sub("", _MINUS.sub("-", _CURRENCY.sub("", text)))
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = _GROUPS.sub(lambda found: _BETWEEN.sub("", found[0]), text)
    text = _MIXED.sub(lambda found: str(int(found[1]) + Fraction(int(found[2]), int(found[3]))), text)
    text = _SCIENTIFIC.sub(lambda found: str(Fraction(f"{found[1]}e{found[2] or found[3] or found[4]}")), text)
    begin, end = ("$", "$") if "\\boxed" in text else ("\\boxed{", "}")
    return _CHOICE.sub(lambda found: f"{found[1]}{begin}{found[2]}{end}", text)


def _raised(found: re.Match[str]) -> str:
    power = unicodedata.normalize("NFKC", found[0]).replace("\u2212", "-")
    return f"^{{{power}}}"


def _sign(sign: str) -> str:
    """Return a character, or a replacement that the library reads."""
    if sign.isascii():
        return sign
    if sign in _SIGNS:
        return _SIGNS[sign]
    if (digit := unicodedata.decimal(sign, None)) is not None:
        return str(digit)
    if unicodedata.category(sign) == "Zs":
        return " "
    plain = unicodedata.normalize("NFKC", sign)
    if unicodedata.decomposition(sign).startswith("<fraction>"):
        over, _, under = plain.partition("\u2044")
        return f"\\frac{{{over}}}{{{under}}}"
    return plain if "\uff01" <= sign <= "\uff5e" else sign


def _far_apart(right: Any, given: Any) -> bool:
    """Return whether two expressions are numbers with a large relative difference.

    The library compares only decimals, so it would take all tiny numbers for equal. Percentages are not evaluated: one
    equals the number with and without the sign.
    """
    if not all(isinstance(one, Expr) and one.is_number and not one.has(UnevaluatedExpr) for one in (right, given)):
        return False
    try:
        ours, theirs = (one.doit().evalf(30) for one in (right, given))
        return bool(abs(ours - theirs) > _RELATIVE * max(abs(ours), abs(theirs)))
    except TypeError:  # not ordered numbers, such as nan
        return False
