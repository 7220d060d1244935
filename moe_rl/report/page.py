"""Fills the templates of pages. Each page is one file that needs no network and no script.

Values are escaped. Only the SVG of a plot, made by `figures.py`, is inserted unescaped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from moe_rl.report import format as numbers

FILTERS = ("binary", "count", "percent", "points", "scientific", "short")

_TEMPLATES = Environment(
    loader=PackageLoader("moe_rl.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


_TEMPLATES.filters |= {name: getattr(numbers, name) for name in FILTERS}
_TEMPLATES.filters["plain"] = lambda value: value if isinstance(value, str) else json.dumps(value, default=str)


@dataclass(frozen=True, slots=True)
class Tile:
    """Holds one number at the head of a page. under: a line that explains it. to: the new value, if `value` has
    changed.
    """

    name: str
    value: str
    under: str
    to: str = ""


def render(template: str, **values: Any) -> str:
    """Render a whole page.

    Args:
        values: the variables of the template and of base.html: title, kicker, heading, facts, tiles; optional source (a
            line below the facts) and warnings.

    Raises:
        jinja2.UndefinedError: a value is missing.
    """
    return _TEMPLATES.get_template(template).render({"source": "", "warnings": ()} | values)
