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
from sympy import Equality, Expr, FiniteSet, Intersection, UnevaluatedExpr, Union
from sympy.logic.boolalg import Boolean

from moe_rl.tasks.rewards import find_answer

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
_POWER = re.compile(r"\^\s*(-\d+)")  # LaTeX would raise the minus alone
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-z]))")
# Digits in groups of three, separated by spaces of text or LaTeX.
_GROUPS = re.compile(r"(?<![\d.,}])\d{1,3}(?:(?: |~|\\[ ,;:!]|\\thinspace *)\d{3})+(?!\s*[\d/])")
_BETWEEN = re.compile(r"~|\\thinspace *|\\?[ ,;:!]")
# A number with a power of ten. The power has at most three digits, so that no short text becomes a huge number.
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\/])(\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE]([+-]?\d{1,3})|\s*(?:\\times|\\cdot|\u00d7|\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d)))(?!\w|\.\d)"
)
_MIXED = re.compile(r"(?<![\w.,/])(\d{1,9}) +(\d{1,9})/([1-9]\d{0,8})(?![\w/]|\.\d)")
_CURRENCY = re.compile(r"(?:[\u20ac\u00a3\u00a5]|\\text\{\s*\\\$\s*\})\s*(?=\d)")
# A dash of text that is no range.
_MINUS = re.compile(r"(?<![\w\s.)}])\u2013(?=\d|\\frac|\.\d)")
_MONEY = re.compile(r"(?<=\d)\s+(?:dollars?|euros?|pounds?)\b")
_TAGGED = re.compile("<answer>(.*?)</answer>", re.DOTALL)
# What follows "the answer is", until its sentence or its line ends.
_CLAUSE = re.compile(
    r"\b(?:answers?|solutions?|correct\s+(?:option|choice))(?:\s+set)?(?:\s+(?:is|are)\b)?(?:\s+(?:option|choice)\b)?"
    r"[\s:*]*(?=\S)(.+?)(?=\.\**\s|\.?\**$)",
    re.IGNORECASE | re.MULTILINE,
)
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_LEAD = re.compile(r"(?:so|thus|hence|therefore|option|choice)\b[ ,:]*", re.IGNORECASE)
_SENTENCE = re.compile("[A-Za-z]+ +[A-Za-z]+")
_JOINS, _EITHER = re.compile(r" +(?:or|and) +"), re.compile("\\bor\\b|\\\\(?:lor|vee)\\b|\u2228")
_LONGEST_ANSWER = 200
# A choice as right answer, "B", "(B)" or "\text{B}", and at the start of a given one: "b", "(b) 12", "B because".
_BEFORE = r"\W*(?:\\(?:text|textbf|mathbf|mathrm)\{)?\W*"
_CHOICE = re.compile(_BEFORE + r"([A-Z])\W*")
_LABEL = re.compile(
    _BEFORE + r"([A-Za-z])(?![^\w,]*(?:,|and\b|or\b)\W*[A-Z]\b)(?:[).:!}]|\s*$|,?\s+(?:because|since)\b)"
)
_WORD = re.compile(r"(?:\\text\{ *)?([A-Za-z]{2,})(?: *\})?")
_INEQUALITY = re.compile("[<>\u2264\u2265]|\\\\[lg]eq?")
_OR, _AND = re.compile("\\\\(?:lor|vee)\\b|\u2228"), re.compile("\\\\(?:land|wedge)\\b|\u2227")
_PLUS_MINUS = re.compile("\\\\pm\\b|\u00b1")
_DOLLAR = re.compile(r"(?<!\\)\$")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")


def math_verify() -> Callable[..., float]:
    """Return the reward function."""
    return mathematically_equal


def mathematically_equal(completion: str, answer: object) -> float:
    """Return 1.0 if the completion's answer equals the LaTeX text `answer`; else 0.0.

    `answer` may be between dollar signs, in a \\boxed{}, or without either. It may be a number.

    Raises:
        ValueError: the library finds no mathematics in `answer`.
    """
    right, expected = _read_answer(answer), str(answer)
    text, said = _final(completion)
    choice, label = _CHOICE.fullmatch(expected), _LABEL.match(said)
    if choice and label:
        return float(label[1].upper() == choice[1])
    words = [word[1] for word in map(_WORD.fullmatch, (expected.strip(), said)) if word]
    if len(words) == 2 and words[0][0].lower() == words[1][0].lower() and words[0][1:] == words[1][1:]:
        return 1.0
    given = parse(_spelt(text), parsing_timeout=None)
    if not (_inequalities(right) and _inequalities(given) and right[0].free_symbols != given[0].free_symbols):
        right, given = _solved(right, expected), _solved(given, said)
    equal = verify(
        right,
        given,
        float_rounding=_DECIMALS,
        numeric_precision=_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return float(equal and not _far_apart(right[0], given[0]))


def _final(completion: str) -> tuple[str, str]:
    """Return the text in which the library is to look for the answer, and the answer alone; "" if that is unknown.

    The answer is in the last answer tags and the last box, or follows "the answer is", or is all of one line. The
    library reads few things outside LaTeX, so an answer that is no sentence is put into a box.
    """
    tagged = _TAGGED.findall(completion)
    text = tagged[-1].strip() if tagged else completion.strip()
    if "\\boxed" in text:
        said = find_answer(text, "box") or ""
        return (_boxed(said), said) if _PLUS_MINUS.search(said) else (text, said)
    clauses = _CLAUSE.findall(text)
    said = _BOLD.sub(r"\1", clauses[-1] if clauses else text).strip("#`* ").rstrip(". *")
    said = _DELIMITER.sub("", _LEAD.sub("", said, count=1)).strip()
    if "\n" in said or len(said) > _LONGEST_ANSWER or (not tagged and not clauses and "\n" in text):
        return text, ""
    return (text, said) if _SENTENCE.search(_JOINS.sub(" , ", said)) else (_boxed(said), said)


def _boxed(said: str) -> str:
    """Return an answer in a box, with both values where it has one plus-minus sign."""
    both = [_PLUS_MINUS.sub(sign, said) for sign in "+-"] if len(_PLUS_MINUS.findall(said)) == 1 else [said]
    return f"\\boxed{{{', '.join(both)}}}"


def _read_answer(answer: object) -> list[Any]:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the column answer is {type(answer).__name__}, expected text or a number")
    text = str(answer)
    delimited = len(_DOLLAR.findall(text)) > 1 or any(mark in text for mark in ("\\boxed", "\\(", "\\["))
    text = _final(text)[0] if delimited else _boxed(_DOLLAR.sub("", text))
    right = parse(_spelt(text), parsing_timeout=None)
    if not right:
        raise ValueError(f"math-verify finds no mathematics in the column answer: {answer!r:.80}")
    return list(right)


def _inequalities(found: list[Any]) -> bool:
    """Return whether the library read a list of conditions on one variable, not all equations."""
    return (
        bool(found)
        and isinstance(found[0], FiniteSet)
        and len(found[0].free_symbols) == 1
        and any(isinstance(one, Boolean) and not isinstance(one, Equality) for one in found[0].args)
    )


def _solved(found: list[Any], text: str) -> list[Any]:
    """Replace a list of inequalities by the numbers that fulfil it: any of them for `or`, else all. All of them can be
    meant only if some number does."""
    if not _inequalities(found):
        return found
    try:
        parts = [one.as_set() for one in found[0].args]
        both, either = Intersection(*parts), Union(*parts)
    except (NotImplementedError, ValueError):
        return found
    return [either if _EITHER.search(text) or both.is_empty else both, *found[1:]]


def _spelt(text: str) -> str:
    """Rewrite a text in spellings that the library reads, in LaTeX and outside. Numbers with a power of ten become
    exact integers and fractions.
    """
    text = "".join(map(_sign, text))
    text = _POWER.sub(r"^{\1}", _SUPERSCRIPT.sub(_raised, text))
    text = _MONEY.sub("", _MINUS.sub("-", _CURRENCY.sub("", text)))
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = _GROUPS.sub(lambda found: _BETWEEN.sub("", found[0]), text)
    text = _MIXED.sub(lambda found: str(int(found[1]) + Fraction(int(found[2]), int(found[3]))), text)
    text = _SCIENTIFIC.sub(lambda found: str(Fraction(f"{found[1]}e{found[2] or found[3] or found[4]}")), text)
    return _OR.sub(" or ", _AND.sub(" and ", text)) if _INEQUALITY.search(text) else text


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
