"""Reads the units of answers, and writes two answers in the same unit, for the reward kind `math_verify`.

The library drops units, so it takes 5 cm for 5 m, and 2m, a product of a number and a symbol, for 2.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

# The names of a unit, and its size in other units. A unit without a size has its own dimension.
_UNITS = {
    "m meter metre": "",
    "g gram gm": "",
    "s sec second": "",
    "A ampere amp": "",
    "K kelvin": "",
    "mol mole": "",
    "rad radian": "",
    "month mo": "",
    "year yr": "12 month",
    "min minute": "60 s",
    "h hr hour": "60 min",
    "day": "24 h",
    "week wk": "7 day",
    "in inch": "0.0254 m",
    "ft foot feet": "12 in",
    "yd yard": "3 ft",
    "mi mile": "5280 ft",
    "L l liter litre": "0.001 m^3",
    "cc": "0.000001 m^3",
    "hectare ha": "10000 m^2",
    "acre": "43560 ft^2",
    "gallon gal": "231 in^3",
    "quart qt": "0.25 gal",
    "pint pt": "0.125 gal",
    "cup": "0.0625 gal",
    "lb pound": "453.59237 g",
    "oz ounce": "0.0625 lb",
    "ton": "",
    "tonne": "1000000 g",
    "mph": "mi/h",
    "kmh kph kmph": "1000 m/h",
    "N newton": "1000 g m/s^2",
    "J joule": "N m",
    "W watt": "J/s",
    "V volt": "W/A",
    "ohm \u03a9": "V/A",
    "Hz hertz": "s^-1",
    "Pa pascal": "N/m^2",
    "atm": "101325 Pa",
    "bar": "100000 Pa",
    "eV": "",
    "cal calorie": "",
    "$ dollar USD": "",
    "cent \u00a2": "0.01 $",
    "\u20ac euro EUR": "",
    "\u00a3 GBP": "",
    "\u20b9 rupee Rs INR": "",
    "\u00a5 yen JPY": "",
    "\u20a9 won KRW": "",
    "degC celsius": "",
    "degF fahrenheit": "",
    "deg degree \u00b0": "",
    "arcmin": "1/60 deg",
    "% percent percentage pct": "",
}
_NAMES = {name: names.split()[0] for names in _UNITS for name in names.split()}
_SIZES = {names.split()[0]: size for names, size in _UNITS.items()}
_PREFIXES = {
    "n nano": Fraction(1, 10**9),
    "\u03bc \u00b5 u micro": Fraction(1, 10**6),
    "m milli": Fraction(1, 1000),
    "c centi": Fraction(1, 100),
    "d deci": Fraction(1, 10),
    "k K kilo": Fraction(1000),
    "M mega": Fraction(10**6),
    "G giga": Fraction(10**9),
}
_PREFIXED = {"m", "g", "s", "A", "mol", "L", "N", "J", "W", "V", "ohm", "Hz", "Pa", "eV", "cal", "bar"}
_SCALE = "thousand|million|billion|trillion|dozen|hundred"
_CURRENCIES = "$\u20ac\u00a3\u20b9\u00a5\u20a9"

_LONGEST = 200  # a longer text is no number with a unit
# Stands before a unit that the answer marks as text.
_MARK = "\x01"
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|mathrm|mathbf|mbox|rm|operatorname)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(rf"\\[dt]?frac\{{[ {_MARK}]*([A-Za-z^\d]+)[ ]*\}}\{{[ {_MARK}]*([A-Za-z][A-Za-z^\d]*)[ ]*\}}$")
_REWRITTEN = {
    re.compile(old): new
    for old, new in {
        r"\\([$%])": r"\1",
        r"\\pounds\b": "\u00a3",
        r"\\euro\b": "\u20ac",
        r"\\Omega\b": "\u03a9",
        r"\\mu\b[ \x01]*": "\x01\u03bc",
        r"(?:\^ *(?:\\circ(?![A-Za-z])|\{ *(?:\\circ|\x01o) *\})|\\degree(?![A-Za-z])|\u00b0)": "\u00b0",
        r"(?:\u00b0|\bdeg(?:ree)?s?\b)[ \x01]*(?:C\b|[Cc]elsius\b)|\u2103": " \x01degC",
        r"(?:\u00b0|\bdeg(?:ree)?s?\b)[ \x01]*(?:F\b|[Ff]ahrenheit\b)|\u2109": " \x01degF",
        r"\\!": "",
        r"\bper cent\b": "percent",
        r"\\[ ,;:]|~|\\q?quad\b|\\thinspace\b": " ",
        r"\^ *(?:\\prime\b|\{ *\\prime *\})|\u2032": "'",
        r"(\d)\u00b0 *(\d+)'": r"\1 deg \2 arcmin",
        r"^(\d+)' *(\d+)(?:\"|'')$": r"\1 ft \2 in",
        r"\bmetric tons?\b": "tonne",
    }.items()
}
_BEFORE = re.compile(
    rf"(-?)[ {_MARK}]*(?:US)?([{_CURRENCIES}]|\b(?:USD|EUR|GBP|INR|JPY|KRW)\b|Rs\.?)[ {_MARK}]*(?=-?[\d.])(.*)",
    re.DOTALL,
)
_NAMED = re.compile(r"(?:m?\\angle *)?[A-Za-z]\w* *=(?!.*=) *(?=.*\d)")
# One unit with its power, after a sign or a word that divides.
_LETTER = f"[A-Za-z\u03bc\u00b5\u03a9{_CURRENCIES}\u00a2\u00b0%]"
_FACTOR = re.compile(
    r"[ \x01.*\u00b7]*(?:\\cdot\b *)?(/|per\b)?[ \x01]*(square|sq\b\.?|cubic|cu\b\.?)?[ \x01]*"
    rf"([A-Za-z\u03bc\u00b5\u03a9]+|{_LETTER})\.?[ \x01]*"
    r"(squared|cubed|\$?\^ *\{? *-?\d *\}?\$?)?"
)
# The start of a unit, after a number. Where only symbols of mathematics end a number, a letter is a symbol.
_START = re.compile(rf"(?<=[\d}})\].%A-Za-z {_MARK}])(?<![A-Za-z\\])[ {_MARK}]*(?={_LETTER})")
_LETTERS = re.compile(r"\\[A-Za-z]+|(?<=\d)[eE]-?\d+|\b(?:SCALE)s?\b".replace("SCALE", _SCALE))
_UNMARKED = re.compile(rf"{_MARK} *(?=[\d$.%-]|(?:{_SCALE})s?\b)")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)\b")
_PARTS = re.compile(r"(\d+(?:\.\d+)?)[ \x01]*([A-Za-z]+)\.?")
_JOINED = re.compile(r"[ \x01,]*(?:\band\b)?[ \x01,]*")
_THOUSANDS = re.compile(r"\{,\}|(?<=\d),(?=\d{3})")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_DECIMALS = re.compile(rf"[(\[{{\\]*{_DECIMAL.pattern}(?: *, *{_DECIMAL.pattern})*[ )\]}}\\]*")
# The unit of an item in a list: 3 cm, 5 cm.
_OF_ITEM = re.compile(rf"(?<=[\d}}])[ {_MARK}]*{_LETTER}[^,;)\]]*?(?=[ {_MARK}]*(?:[,;)\]]|\\\}}|\b(?:and|or)\b|$))")
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "squared": 2, "cubic": 3, "cu": 3, "cu.": 3, "cubed": 3}
# The last symbol of a product. The library would drop it as a unit.
_SYMBOL = re.compile(r"(?<=\d)([a-z]{0,2})([a-z])$|(?<=[})])( *)([a-z])$|(?<=[a-z\d}] )()([a-z])$")
# Letters right after a number that are symbols, perhaps with a power: 2m, 9m^2.
_PRODUCT = re.compile(r"(?:[A-Za-z]|nm|ms)(?:\^ *\{? *-?\d *\}?)?")
_ENDS = re.compile(r"(?:1st|2nd|3rd|\dth|pi)$")

# Words after a number that are no unit: 12 students.
_WORDS = re.compile(
    r"(?<=[\d}])((?: (?:SCALE)s?)?)(?: +WORD\.?| *(?:\\[ ,;] *)?\\(?:text|mathrm|mbox)\{ *WORD\.? *\})$".replace(
        "WORD", r"(?!(?:and|or|mod|SCALE)s?\b|inf)[a-z]{3,}(?: [a-z]{2,}){0,4}"
    ).replace("SCALE", _SCALE)
)
_ALL_TEXT = re.compile(r"\\text\{([^{}]*\d[^{}]*)\}")

Unit = tuple[Fraction, tuple[tuple[str, int], ...]]
_DEGREE, _RADIAN, _CELSIUS, _FAHRENHEIT, _PERCENT = (((name, 1),) for name in ("deg", "rad", "degC", "degF", "%"))


def in_one_unit(expected: str, said: str) -> list[tuple[str, str]]:
    """Return two answers without their units, in the same unit; nothing if their units measure different things.

    An answer without a unit is taken to have the other's. A number may equal a percentage or a hundredth of it; for
    this there are two pairs, one of which must be equal. Texts without units stay as they are.
    """
    if re.search(r"\u00a3|\\pounds|GBP", expected + said):
        expected, said = (re.sub(r"(?<!\\)\bpounds?\b", "GBP", text) for text in (expected, said))
    expected_quantity, said_quantity = _quantity(expected), _quantity(said)
    expected_quantity = expected_quantity or (said_quantity and _quantity(expected, loose=True))
    said_quantity = said_quantity or (expected_quantity and _quantity(said, loose=True))
    if expected_quantity and said_quantity:
        (right, unit), (given, other) = expected_quantity, said_quantity
        if {unit[1], other[1]} == {_DEGREE, _RADIAN}:
            return [(_radians(*expected_quantity), _radians(*said_quantity))]
        if {unit[1], other[1]} == {_CELSIUS, _FAHRENHEIT}:
            return [(_celsius(*expected_quantity), _celsius(*said_quantity))]
        if unit[1] != other[1]:
            return []
        return [(right, given) if unit[0] == other[0] else (_times(right, unit[0]), _times(given, other[0]))]
    expected, said = (_WORDS.sub(r"\1", _ALL_TEXT.sub(r"\1", text)) for text in (expected, said))
    if expected_quantity:
        return [(number, said) for number in _bare(expected_quantity, said)]
    return [(expected, number) for number in _bare(said_quantity, expected)] if said_quantity else [(expected, said)]


def _bare(quantity: tuple[str, Unit], other: str) -> list[str]:
    """Return what an answer without a unit may mean: a number of this unit, of radians, or a part of 1."""
    number, unit = quantity
    if unit[1] == _PERCENT:
        return [number, _times(number, Fraction(1, 100))]
    if unit[1] == _DEGREE and re.search(r"\\pi|\u03c0", other):
        return [_radians(number, unit)]
    return [number]


def keep_symbol(text: str) -> str:
    """Write the last letter of a product so that the library does not drop it as a unit: 2m."""
    match = _SYMBOL.search(text)
    if match is None or "\\text" in text or _ENDS.search(text) or re.search("(?<!\\\\)[A-Za-z]{4}", text):
        return text
    if match[1] and _unit(match[1] + match[2]):
        return text
    return f"{text[:-1]}{{{text[-1]}}}"


def _radians(number: str, unit: Unit) -> str:
    return number if unit[1] == _RADIAN else rf"({number})\cdot\frac{{\pi}}{{180}}"


def _celsius(number: str, unit: Unit) -> str:
    return number if unit[1] == _CELSIUS else rf"(({number})-32)\cdot\frac{{5}}{{9}}"


def _times(number: str, size: Fraction) -> str:
    plain = _THOUSANDS.sub("", number)
    if _DECIMALS.fullmatch(plain):
        return _DECIMAL.sub(lambda match: str(Fraction(match[0]) * size), plain)
    return rf"({number})\cdot\frac{{{size.numerator}}}{{{size.denominator}}}"


def _quantity(text: str, *, loose: bool = False) -> tuple[str, Unit] | None:
    """Return the number of an answer and its unit. loose: a letter next to a number is a unit, as in 5m."""
    if len(text) > _LONGEST:
        return None
    text = _TEXT.sub(rf" {_MARK}\1", text)
    for old, new in _REWRITTEN.items():
        text = old.sub(new, text)
    text = _UNMARKED.sub("", text)
    text = re.sub(" +", " ", text)
    text = _FRACTION.sub(rf" {_MARK}\1/\2", text)
    text = "".join(f"^{unicodedata.normalize('NFKC', glyph)}" if glyph in "\u00b2\u00b3" else glyph for glyph in text)
    text = _NAMED.sub("", text.strip(), count=1) if text.count("=") == 1 else text.strip()
    if currency := _BEFORE.fullmatch(text):
        sign, name, rest = currency.groups()
        scale = re.sub(r"\s+[$\u20ac]?(?:dollars?|euros?)\s*$", "", rest)
        return (sign + scale).replace(_MARK, "").strip(), _unit(name.rstrip("."))  # type: ignore[return-value]
    if parts := _parts(text):
        return parts
    units = _OF_ITEM.findall(text)
    if len(units) > 1 and len(set(units)) == 1:
        text = re.sub(r"[ ,\x01]*\b(?:and|or)\b", ",", _OF_ITEM.sub("", text)) + units[0]
    for place in _START.finditer(text):
        number, rest = text[: place.start()], text[place.start() :]
        if (unit := _unit(rest)) is None:
            continue
        bare = _MARK not in rest
        if re.search(f"[{_MARK}A-Za-z]" if bare else _MARK, _LETTERS.sub("", number)):
            continue
        if bare and not loose and _PRODUCT.fullmatch(rest):
            continue
        if _FUNCTION.search(number):
            return None
        if re.search(r"\d|\\pi|[\u03c0\u00bc-\u00be]", number):
            return number.strip(), unit
    return None


def _parts(text: str) -> tuple[str, Unit] | None:
    """Return the sum of several numbers with units of one dimension: 1 hour 30 minutes."""
    total, last, end, dimension, count = Fraction(0), Fraction(0), 0, None, 0
    while (match := _PARTS.match(text, end)) is not None:
        unit = _unit(match[2])
        if unit is None or (dimension is not None and (unit[1] != dimension or unit[0] >= last)):
            return None
        last, dimension = unit
        total, count = total + Fraction(match[1]) * last, count + 1
        end = _JOINED.match(text, match.end()).end()  # type: ignore[union-attr]
    if count < 2 or end < len(text) or dimension is None:
        return None
    return str(total), (Fraction(1), dimension)


@lru_cache(maxsize=1000)
def _unit(text: str) -> Unit | None:
    """Return the size of a unit in units without a size, and their powers; None if the text is no unit."""
    size, powers, end = Fraction(1), dict[str, int](), 0
    text = text.strip(f" {_MARK}.")
    while end < len(text):
        match = _FACTOR.match(text, end)
        if match is None or (single := _single(match[3])) is None:
            return None
        word = match[2] or match[4] or ""
        power = _POWERS.get(word) or int(re.sub(r"[^-\d]", "", word) or 1)
        power = -power if match[1] else power
        size *= single[0] ** power
        for base, times in single[1]:
            powers[base] = powers.get(base, 0) + times * power
        end = match.end()
    return (size, tuple(sorted((base, power) for base, power in powers.items() if power))) if powers else None


def _single(word: str) -> Unit | None:
    """Return one unit: a name, a plural, or either after a prefix."""
    spellings = [word, word.removesuffix("s"), word.removesuffix("es")] if len(word) > 2 else [word]
    for name in [*spellings, *(spelling.lower() for spelling in spellings if len(spelling) > 3)]:
        if name in _NAMES:
            return _defined(_NAMES[name])
        for names, times in _PREFIXES.items():
            for prefix in names.split():
                rest = name.removeprefix(prefix)
                if rest != name and _NAMES.get(rest) in _PREFIXED and (len(prefix) > 2) == (len(rest) > 3):
                    size, powers = _defined(_NAMES[rest])
                    return times * size, powers
    return None


def _defined(name: str) -> Unit:
    definition = _SIZES[name]
    number, _, rest = definition.partition(" ") if definition[:1].isdigit() else ("1", "", definition)
    size, powers = _unit(rest) if rest else (Fraction(1), ((name, 1),))  # type: ignore[misc]
    return Fraction(number) * size, powers
