"""Finds the source files of a function that a config names, without importing them."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path

_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))


def code_of(function: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Find the code of a dotted path.

    It is the module, its packages, and everything that these import anywhere in their text, also from the folder of the
    importing file, which a script may add to sys.path. Installed packages and the standard library are not searched.
    Imports by a computed name, and files read as data, are not found.

    Returns:
        The files by module name, and the versions of the installed packages that they import, by name.
    """
    files: dict[str, Path] = {}
    packages: dict[str, str] = {}
    root = function.rpartition(".")[0]
    todo: list[tuple[str, list[str] | None]] = [(root, None)]
    while todo:
        name, beside = todo.pop()
        top = name.partition(".")[0]
        if name in files or top in sys.stdlib_module_names or (top == "moe_rl" and name != root):
            continue
        spec = _find(name) or (_find(name, beside) if beside else None)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        file = Path(spec.origin).resolve()
        if any(file.is_relative_to(folder) for folder in _INSTALLED):
            packages |= {provider: importlib.metadata.version(provider) for provider in _distributions().get(top, ())}
            continue
        files[name] = file
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        parts = name.split(".")
        todo += [(".".join(parts[:end]), beside) for end in range(1, len(parts))]
        todo += [(module, [str(file.parent)]) for module in _imported(file, package)]
    return files, packages


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Map each module to the installed packages that have it. Takes a second."""
    return importlib.metadata.packages_distributions()


def _find(name: str, path: list[str] | None = None) -> ModuleSpec | None:
    """Return where a module is, without importing its packages. path: the folders to search; None: sys.path."""
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for end, name in enumerate(parts, start=1):
        whole = ".".join(parts[:end])
        # Given its full name, PathFinder looks up the parent of a folder without __init__.py, which is not imported.
        specs = (finder.find_spec(name if finder is PathFinder else whole, path) for finder in sys.meta_path)
        if (spec := next(filter(None, specs), None)) is None:
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if path is None and end < len(parts):
            return None
    return spec


def _imported(file: Path, package: str) -> Iterator[str]:
    """Yield the names that a file may import as modules. package: the base of its relative imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # importing it will report the fault
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".") if node.level else []
            base = base[: len(base) - node.level + 1] if node.level else base
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
            yield module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            with suppress(ImportError):  # relative without a package
                yield from (resolve_name(name, package) for name in names)
