"""Provides what the tests of adapters name in rows: players of games. Episodes import them."""

from __future__ import annotations

import re


def last_free(told: str) -> str:
    """Return a move of Tic Tac Toe: the last free square."""
    return "[" + re.findall(r"'\[(\d)\]'", told)[-1] + "]"


async def facts(session, row) -> float:
    """Return 1 if the episode runs with another interpreter and finds its packages."""
    import sys

    import only_there

    return float(sys.prefix == row["prefix"] and only_there.HERE and row["not_there"] not in sys.path)
