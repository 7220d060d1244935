"""Fills the templates of pages: one file each that needs no network and no script.

What a template gets is escaped; only a plot's SVG, which `figures.py` makes, is taken as it is.
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


def _plain(value: object) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


_TEMPLATES.filters |= {name: getattr(numbers, name) for name in FILTERS} | {"plain": _plain}


@dataclass(frozen=True, slots=True)
class Tile:
    """One number at the head of a page. under: what it is of. to: what `value` has become, where it moved."""

    name: str
    value: str
    under: str
    to: str = ""


def render(template: str, **values: Any) -> str:
    """A whole page. values: those of the template, and of base.html: title, kicker, heading, facts, tiles; optional
    source (a line below the facts) and warnings. Raises jinja2.UndefinedError for a value that is not given."""
    return _TEMPLATES.get_template(template).render({"source": "", "warnings": ()} | values)
