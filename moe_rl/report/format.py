"""Formats numbers for people, in the same way on the console and on every page."""

from __future__ import annotations

import math


def percent(value: float | None, digits: int = 1) -> str:
    """Format a fraction. NaN means a fraction of nothing, for example if no completion could be verified."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}%"


def points(change: float | None) -> str:
    """Format a change of a fraction in percentage points, as in +43.6 points."""
    return "-" if change is None or math.isnan(change) else f"{100 * change:+.1f} points"


def scientific(value: float | None) -> str:
    """Format with two significant digits, as in 1.2e-03. An exact zero is 0."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def count(value: float | None) -> str:
    """Format an integer with thousands separators."""
    return "-" if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Format with three or four significant digits."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and size < 1e-3:
        return f"{value:.2e}"
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if size >= 100 else f"{value:.4g}"


def binary(value: float | None) -> str:
    """Format bytes with a binary unit."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def duration(value: float | None) -> str:
    """Format seconds as 45s, 5m12s or 2h07m."""
    if value is None:
        return "-"
    whole = int(round(value))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"
