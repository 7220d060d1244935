"""Finds the files that ship with the code: configs/, assets/ and patches/ of the repository."""

from __future__ import annotations

from pathlib import Path


def shipped(folder: str) -> Path:
    """Return the path of "configs", "assets" or "patches": inside the installed package, or at the top of a
    checkout."""
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def find(path: Path) -> Path:
    """Return the shipped file for a path `configs/...` or `assets/...` that the working directory lacks. Return any
    other path unchanged."""
    if path.parts[:1] in (("configs",), ("assets",)) and not path.exists():
        file = shipped(path.parts[0]).joinpath(*path.parts[1:])
        return file if file.exists() else path
    return path
