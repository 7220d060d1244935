"""Finds the files that ship with the code: configs/ and patches/ of the repository."""

from __future__ import annotations

from pathlib import Path


def shipped(folder: str) -> Path:
    """Return the path of "configs" or "patches": inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder
