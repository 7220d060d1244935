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
from contextlib import suppress
from fractions import Fraction
from typing import Any

from math_verify import parse, verify
from sympy import And, Basic, Equality, Expr, FiniteSet, I, Intersection, Symbol, Tuple, UnevaluatedExpr, Union
from sympy.logic.boolalg import Boolean

from moe_rl.tasks.rewards import find_answer
from moe_rl.tasks.units import in_one_unit, keep_symbol

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
    "\ufe63": "-",
    "\u2010": "-",
    "\u2011": "-",
    "\u2205": "\\emptyset ",
}
# What the library misreads, and what it reads instead.
_COMMANDS = {
    re.compile(spelling): instead
    for spelling, instead in {
        r"\\degree\b": r"^\\circ ",
        r"\\varnothing\b": r"\\emptyset ",
        r"\\lg\b": r"\\log_{10}",
        r"\\(?:mathbf|boldsymbol|bm)\{([A-Za-z])\}": r"\1",
        r"\\(?:text)?color\{\w+\}": "",
        r"\\(?:SI|qty)\{([^{}]*)\}\{[^{}]*\}": r"\1",
        r"(?<=\d)(?:\^\{)?\\(?:text|mathrm)\{ *[snrt][tdh]\}\}?|(?<=\d)\^\{[snrt][tdh]\}": "",
        r"\\text\{ *([-\d.,/]+)\b *(?:[A-Za-z][^{}\d]*)?\}": r"\1",
        r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
        r"\\equiv\b": "=",
        r"\\boxed\{(-?\d+(?:[./]\d+)?) *= *([A-Za-z])\}": r"\\boxed{\2=\1}",
        r"\\boxed\{\\\((.{1,200})\\\)\}": r"\\boxed{\1}",
        r"\\([dt]?frac)(\\[a-z]+) *(\d)": r"\\\1{\2}{\3}",
        r"\\(sin|cos|tan)( *\(? *)(\d+(?:\.\d+)?) *\^ *(?:\\circ\b|\{ *\\circ *\})": r"\\\1\2\\frac{\3\\pi}{180}",
        r"\\\{ *[a-z](?: *\\in *\\mathbb\{?R\}?)? *(?:\\mid|:|\|)(.{0,200})\\\}": r"\1",
        r"[,;] *[a-z] *\\in *\\mathbb\{?[NZ]\}?": "",
        r"\\begin\{cases\}([^&]{0,100})\\\\([^&]{0,100})\\end\{cases\}": r"\1,\2",
        r"\\boxed\{\]([^][]+)[,;]([^][]+)\[\}": r"\\boxed{(\1,\2)}",
        r"\\boxed\{\]([^][]+)[,;]([^][]+)\]\}": r"\\boxed{(\1,\2]}",
        r"\\boxed\{\[([^][]+)[,;]([^][]+)\[\}": r"\\boxed{[\1,\2)}",
    }.items()
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(
    r"(?<=\d)(?: |~|\\[ ,])*(?:\\text\{ *(WORD)s? *\}|(?<=[ ,~])(WORD)s?\b)".replace("WORD", "|".join(_SCALES))
)
# 1.234.567 and 1.234,5
_DOTTED = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+)(?:,(\d+)|(?<=\.\d{3}\.\d{3}))(?![\d.,])")
# 0.1666... with a line or a dot over the digits that repeat
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d{0,30}?)(?:\\overline\{(\d+)\}|\\dot\{(\d)\}|(\d)\5+(?:\.\.\.|\\l?dots\b|\u2026))"
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_POWER = re.compile(r"\^\s*(-\d+)")  # LaTeX would raise the minus alone
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-z]))")
# Digits in groups of three, separated by spaces of text or LaTeX.
_GROUPS = re.compile(r"(?<![\d.,}])\d{1,3}(?:(?:[ _~'\u2019]|\\[ ,;:!]|\\thinspace *)\d{3})+(?!\s*[\d/])")
_BETWEEN = re.compile(r"[_~'\u2019]|\\thinspace *|\\?[ ,;:!]")
# A number with a power of ten. The power has at most three digits, so that no short text becomes a huge number.
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\/])(\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE]([+-]?\d{1,3})|\s*(?:\\times|\\cdot|\u00d7|\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d)))(?!\w|\.\d)"
)
_MIXED = re.compile(r"(?<![\w.,/])(\d{1,9}) +(\d{1,9})/([1-9]\d{0,8})(?![\w/]|\.\d)")
_CURRENCY = re.compile(
    r"(?:(?:US)?\\\$|[\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd]|\b(?:USD|EUR|GBP|INR)\b|\\text\{\s*\\\$\s*\})\s*(?=-?\.?\d)"
)
# A dash of text that is no range.
_MINUS = re.compile(r"(?<![\w\s.)}])\u2013(?=\d|\\frac|\.\d)")
_MONEY = re.compile(
    r"(?<=\d)\s*(?:[\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd]|\s(?:dollars?|euros?|pounds?|USD|EUR|GBP|INR)\b)"
)
# Ends of a thought, which is no answer, and its beginnings: the model's own, or the last text of the prompt.
_THOUGHT = re.compile(
    "</(?:seed:)?think(?:ing)?>|</reasoning>|\u25c1/think\u25b7|\\[/THINK]|<\\|channel\\|>final<\\|message\\|>"
)
_BEGINNING = (
    "<(?:seed:)?think(?:ing)?>|<reasoning>|\u25c1think\u25b7|\\[THINK]"
    "|<\\|channel\\|>(?:analysis|commentary)(?:<\\|message\\|>)?"
)
_UNFINISHED, _BEGUN = re.compile(rf"\s*(?:{_BEGINNING})"), re.compile(rf"(?:{_BEGINNING})\s*\Z")
_TAGGED = re.compile("<answer>(.*?)</answer>", re.DOTALL)
# What follows "the answer is", until its sentence or its line ends.
_CLAUSE = re.compile(
    r"(?:\b(?:answers?|solutions?|correct\s+(?:option|choice))(?:\s+set)?(?:\s+(?:is|are)\b)?(?:\s+(?:option|choice)\b)?"
    "|\u7b54\u6848[\u662f\u4e3a]?)"
    r"[\s:*]*(?=\S)(.+?)(?=\.\**\s|\.?\**$|\u3002)",
    re.IGNORECASE | re.MULTILINE,
)
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_LEAD = re.compile(r"(?:so|thus|hence|therefore|option|choice)\b[ ,:]*", re.IGNORECASE)
_SENTENCE = re.compile("[A-Za-z]+ +[A-Za-z]+|[A-Za-z]'[a-z]+ ")
_JOINS, _EITHER = re.compile(r" +(?:or|and) +"), re.compile("\\bor\\b|\\\\(?:lor|vee)\\b|\u2228")
_LONGEST_ANSWER = 200
# A choice as right answer, "B", "(B)" or "\text{B}", and at the start of a given one: "b", "(b) 12", "B because".
_BEFORE = r"\W*(?:[Oo]ption|[Cc]hoice)?\W*(?:\\(?:text|textbf|mathbf|mathrm)\{)?\W*"
_CHOICE = re.compile(_BEFORE + r"([A-Z])\W*")
_LABEL = re.compile(
    _BEFORE + r"([A-Za-z])(?![^\w,]*(?:,|and\b|or\b)\W*[A-Z]\b)(?:[).:!}\]\"]|\*\*|\s*$|,?\s+(?:because|since)\b)"
)
# A right answer with its label and its value: "(B) 12".
_LABELLED = re.compile(_BEFORE + r"([A-H])(?:\)|\. )[\s}\\$]*(.*\w.*)")
# Several choices, a word or words of prose, a date, a number with its base, a time before or after noon.
_CHOICES = re.compile(r"[A-H](?:(?:[,;\s]|and)*[A-H])+")
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\{([^{}]*)\}")
_PROSE = re.compile(r"[\w ,.'-]*[A-Za-z]{2}[\w ,.'-]*")
_SPACE = re.compile(r"(?:\\[ ,;!]|~|\s)+")
_NAME = re.compile(r"[A-Za-z]{5,}|[IVXLCDM]{2,}|[A-Za-z]+(?: (?!and\b|or\b)[A-Za-z]+)+")
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}")
_BASED = re.compile(r"([\dA-F]+)_\{?(\d{1,2})\}?")
_CLOCK = re.compile(r"(\d{1,2})(?: ?: ?(\d\d))?(?: *([ap])\.? ?m\.?)?", re.IGNORECASE)
# Numbers with a word between them, such as "2 hours 30 minutes": the library would read the first number alone. The
# letters of algebra are no words: they have operators, brackets or a digit next to them.
_UNITS = re.compile(r"(?!.*[-+*/=<>^_(){}\\]).*\d\D*(?<=[ ~])(?!and\b|or\b)[A-Za-z]{2,}.*\d", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_INITIAL = re.compile(r"(?<![A-Za-z])(?!and\b|or\b)[A-Za-z]")
# A right number, and another spelling of it: 1.5 and 1,5; 1234567 and 12,34,567.
_POINT, _COMMA = re.compile(r"-?\d+\.\d+"), re.compile(r"-?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))")
_WHOLE, _LAKHS = re.compile(r"-?\d+"), re.compile(r"-?\d{1,2}(?:,\d{2})+,\d{3}")
_INEQUALITY = re.compile("[<>\u2264\u2265]|\\\\[lg]eq?")
_OR, _AND = re.compile("\\\\(?:lor|vee)\\b|\u2228"), re.compile("\\\\(?:land|wedge)\\b|\u2227")
_BOX_PERCENT = re.compile(r"\\boxed\{([^{}]*)\}\s*\\?%")
# What stands before an answer in some columns: a whole solution of GSM8K, a tag, "Answer:".
_PREAMBLE = re.compile(r"^(?:.*\n#### |\s*<answer>|\W*(?:final )?answer\s*:)", re.DOTALL | re.IGNORECASE)
# Punctuation after an answer; what joins two boxes.
_END = re.compile(r"(?<![\\.])[.,;]\s*$")
_JOINT = re.compile(r"\}[\s$]*(?:,|;|,?\s*(?:\\text\{)?\s*\b(?:and|or)\b\s*\}?)[\s$]*$")
_PLUS_MINUS = re.compile("\\\\pm\\b|\u00b1")
_DOLLAR = re.compile(r"(?<!\\)\$")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")


def math_verify() -> Callable[..., float]:
    """Return the reward function."""
    return mathematically_equal


def mathematically_equal(completion: str, answer: object, stop_string: str | None = None, prompt: str = "") -> float:
    """Return 1.0 if the completion's answer equals the LaTeX text `answer`; else 0.0.

    `answer` may be between dollar signs, in a \\boxed{}, or without either. It may be a number. A thought that does not
    end has no answer. Some chat templates begin the thought at the end of `prompt`.

    Raises:
        ValueError: the library finds no mathematics in `answer`.
    """
    begun = _BEGUN.search(prompt)
    said = (begun[0] if begun else "") + completion + (stop_string if stop_string == "</answer>" else "")
    text, said = _final(said)
    if isinstance(answer, str) and (labelled := _LABELLED.fullmatch(answer)):
        answer = labelled[1] if _LABEL.match(said) else labelled[2]
    right, expected = _read_answer(answer)
    if (_POINT.fullmatch(expected) and _COMMA.fullmatch(said)) or (
        _WHOLE.fullmatch(expected) and _LAKHS.fullmatch(said)
    ):
        said = said.replace(",", "." if "." in expected else "")
        text = _boxed(said)
    return float(any(_equal(right, expected, text, said, *texts) for texts in in_one_unit(expected, said)))


def _equal(right: list[Any], expected: str, text: str, said: str, right_text: str, given_text: str) -> bool:
    """Compare two answers, which `right_text` and `given_text` hold without units."""
    verdict = _equal_texts(right_text, given_text)
    if verdict is not None:
        return verdict
    right_text, given_text = keep_symbol(right_text), keep_symbol(given_text)
    if right_text != expected:
        right = parse(_spelt(_boxed(right_text)), parsing_timeout=None)
    if given_text != said:
        text = _boxed(given_text)
    given = parse(_spelt(text), parsing_timeout=None)
    if not (_inequalities(right) and _inequalities(given) and right[0].free_symbols != given[0].free_symbols):
        right, given = _solved(right, right_text), _solved(given, given_text)
    if isinstance(given[0] if given else None, Tuple) and _assignments(right):
        right = [Tuple(*(equation.rhs for equation in right[0]._unsorted_args))]
    if _symbols(right) == _symbols(given) != {"?"} and all(isinstance(side[0], And) for side in (right, given)):
        right, given = map(_as_set, (right, given))
    if _symbols(right) | _symbols(given) == {"i"}:
        right, given = _complex(right), _complex(given)
    equal = verify(
        right,
        given,
        float_rounding=_DECIMALS,
        numeric_precision=_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return bool(equal and not _far_apart(right[0], given[0]))


def _final(completion: str) -> tuple[str, str]:
    """Return the text in which the library is to look for the answer, and the answer alone; "" if that is unknown.

    The answer is in the last answer tags and the last box, or follows "the answer is", or is all of one line. The
    library reads few things outside LaTeX, so an answer that is no sentence is put into a box.
    """
    completion = _THOUGHT.split(completion)[-1]
    if _UNFINISHED.match(completion):
        return "", ""
    tagged = _TAGGED.findall(completion)
    text = tagged[-1].strip() if tagged else completion.strip()
    if "\\boxed" in text:
        answer = _END.sub("", _boxes(text))
        return (_boxed(answer), answer) if answer else (text, "")
    clauses = _CLAUSE.findall(text)
    answer = _BOLD.sub(r"\1", clauses[-1] if clauses else text).strip("#`* ").rstrip(". *")
    answer = _DELIMITER.sub("", _LEAD.sub("", answer, count=1)).strip()
    if "\n" in answer or len(answer) > _LONGEST_ANSWER or (not tagged and not clauses and "\n" in text):
        return text, ""
    return (text, answer) if _SENTENCE.search(_JOINS.sub(" , ", answer)) else (_boxed(answer), answer)


def _boxes(text: str) -> str:
    """Return what the last box holds, after the boxes before it that only a comma, `and` or `or` separates; "" if it is
    not closed."""
    text = _BOX_PERCENT.sub(r"\\boxed{\1\\%}", text)
    boxes: list[str] = []
    while (box := find_answer(text, "box")) is not None:
        # A box that ends earlier in the text is not next to the others.
        if boxes and find_answer(text[:-1], "box") is not None:
            break
        boxes.insert(0, box)
        text = text.rpartition("\\boxed{")[0]
        joint = _JOINT.search(text)
        text = text[: joint.start() + 1] if joint else ""
    return ", ".join(boxes)


def _boxed(answer: str) -> str:
    """Return an answer in a box, with both values where it has one plus-minus sign."""
    values = [_PLUS_MINUS.sub(sign, answer) for sign in "+-"] if len(_PLUS_MINUS.findall(answer)) == 1 else [answer]
    return f"\\boxed{{{', '.join(values)}}}"


def _read_answer(answer: object) -> tuple[list[Any], str]:
    """Return the column `answer` as the library reads it, and its text."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the column answer is {type(answer).__name__}, expected text or a number")
    text = _PREAMBLE.sub("", str(answer)).removesuffix("</answer>").strip("* \n")
    text = _END.sub("", text)
    delimited = len(_DOLLAR.findall(text)) > 1 or any(mark in text for mark in ("\\boxed", "\\(", "\\["))
    read, bare = _final(text) if delimited else (_boxed(_DOLLAR.sub("", text)), text)
    right = parse(_spelt(read), parsing_timeout=None)
    if not right:
        raise ValueError(f"math-verify finds no mathematics in the column answer: {answer!r:.80}")
    return list(right), bare or text


def _equal_texts(expected: str, said: str) -> bool | None:
    """Compare two answers that are no mathematics: choices, words, dates, times, units; None if they are."""
    choice, label = _CHOICE.fullmatch(expected), _LABEL.match(said)
    if choice and label:
        return label[1].upper() == choice[1]
    right, given = (_SPACE.sub(" ", _WRAPPED.sub(r"\1", text)).strip() for text in (expected, said))
    if right == given != "" or (
        _PROSE.fullmatch(right) and right.casefold().rstrip(".") == given.casefold().rstrip(".")
    ):
        return True
    if _CHOICES.fullmatch(right) and _CHOICES.fullmatch(given):
        return sorted(re.findall("[A-H]", right)) == sorted(re.findall("[A-H]", given)) or None
    if _DATE.fullmatch(right) or (_NAME.fullmatch(right) and _NAME.fullmatch(given)):
        return (
            [int(part) for part in re.findall(r"\d+", right)] == [int(part) for part in re.findall(r"\d+", given)] != []
        )
    based, clocks = ([pattern.fullmatch(text) for text in (right, given)] for pattern in (_BASED, _CLOCK))
    if based[0] and based[1] and based[0].groups() != based[1].groups():
        return False
    if clocks[0] and clocks[1] and (clocks[0][3] or clocks[1][3]):
        return bool(_minutes(clocks[0]) & _minutes(clocks[1]))
    if _UNITS.match(right):
        return all(
            re.findall(pattern, right.lower()) == re.findall(pattern, given.lower()) for pattern in (_NUMBER, _INITIAL)
        )
    return None


def _minutes(clock: re.Match[str]) -> set[int]:
    """Return the minutes of the day at which a clock shows this; two if it does not say a.m. or p.m."""
    hour, minute, half = int(clock[1]), int(clock[2] or 0), (clock[3] or "").lower()
    hours = {hour % 12 + 12 * (half == "p")} if half else {hour, hour + 12} if hour < 12 else {hour % 24, hour - 12}
    return {60 * day_hour + minute for day_hour in hours}


def _symbols(parsed: list[Any]) -> set[str]:
    return {symbol.name for symbol in parsed[0].free_symbols} if parsed and isinstance(parsed[0], Basic) else {"?"}


def _complex(parsed: list[Any]) -> list[Any]:
    """Replace the symbol i by the imaginary unit, except in inequalities."""
    with suppress(TypeError):
        return [parsed[0].xreplace(dict.fromkeys(parsed[0].free_symbols, I)), *parsed[1:]]
    return parsed


def _as_set(parsed: list[Any]) -> list[Any]:
    """Replace conditions on one variable by the set of its values, unless the library cannot find it."""
    if len(parsed[0].free_symbols) == 1:
        with suppress(NotImplementedError, ValueError, TypeError):
            return [parsed[0].as_set()]
    return parsed


def _assignments(parsed: list[Any]) -> bool:
    """Return whether the library read a list of values, each of another symbol: x=1, y=2."""
    if not isinstance(parsed[0], FiniteSet) or not all(isinstance(equation, Equality) for equation in parsed[0].args):
        return False
    return len({equation.lhs for equation in parsed[0].args if isinstance(equation.lhs, Symbol)}) == len(parsed[0].args)


def _inequalities(parsed: list[Any]) -> bool:
    """Return whether the library read a list of conditions on one variable, not all equations."""
    return (
        bool(parsed)
        and isinstance(parsed[0], FiniteSet)
        and len(parsed[0].free_symbols) == 1
        and all(isinstance(condition, Boolean) and not isinstance(condition, Symbol) for condition in parsed[0].args)
        and not all(isinstance(condition, Equality) for condition in parsed[0].args)
    )


def _solved(parsed: list[Any], text: str) -> list[Any]:
    """Replace a list of inequalities by the numbers that fulfil it: any of them for `or`, else all. All of them can be
    meant only if some number does."""
    if not _inequalities(parsed):
        return parsed
    try:
        parts = [condition.as_set() for condition in parsed[0].args]
        both, either = Intersection(*parts), Union(*parts)
    except (NotImplementedError, ValueError):
        return parsed
    return [either if _EITHER.search(text) or both.is_empty else both, *parsed[1:]]


def _spelt(text: str) -> str:
    """Rewrite a text in spellings that the library reads, in LaTeX and outside. Numbers with a power of ten become
    exact integers and fractions.
    """
    text = "".join(map(_sign, text))
    for spelling, instead in _COMMANDS.items():
        text = spelling.sub(instead, text)
    text = _SCALED.sub(lambda match: f"\\times {_SCALES[match[1] or match[2]]} ", text)
    text = _DOTTED.sub(lambda match: match[1].replace(".", "") + (f".{match[2]}" if match[2] else ""), text)
    text = _REPEATING.sub(_periodic, text)
    text = _POWER.sub(r"^{\1}", _SUPERSCRIPT.sub(_raised, text))
    text = _MONEY.sub("", _MINUS.sub("-", _CURRENCY.sub("", text)))
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = _GROUPS.sub(lambda match: _BETWEEN.sub("", match[0]), text)
    text = _MIXED.sub(lambda match: str(int(match[1]) + Fraction(int(match[2]), int(match[3]))), text)
    text = _SCIENTIFIC.sub(lambda match: str(Fraction(f"{match[1]}e{match[2] or match[3] or match[4]}")), text)
    return _OR.sub(" or ", _AND.sub(" and ", text)) if _INEQUALITY.search(text) else text


def _periodic(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    before, decimals = match[1] or "0", match[2]
    period = match[3] or match[4] or match[5]
    rest = Fraction(int(period), 10 ** len(decimals) * (10 ** len(period) - 1))
    return str(Fraction(f"{before}.{decimals or 0}") + rest)


def _raised(match: re.Match[str]) -> str:
    power = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
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
    if not all(isinstance(side, Expr) and side.is_number and not side.has(UnevaluatedExpr) for side in (right, given)):
        return False
    try:
        first, second = (side.doit().evalf(30) for side in (right, given))
        return bool(abs(first - second) > _RELATIVE * max(abs(first), abs(second)))
    except TypeError:  # not ordered numbers, such as nan
        return False
