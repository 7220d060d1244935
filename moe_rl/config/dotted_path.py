"""What can be said about `package.module.function` without running anybody's code."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util


def dotted_path_problem(dotted: str) -> str | None:
    """Why `package.module.function` names nothing, or None. Looks the module up and reads it; imports nothing."""
    parts = dotted.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return "not a dotted path such as package.module.function"
    if parts[0] == "__main__":
        return "__main__ is the command that runs, and not what a verifier process would import"
    spec = None
    for depth, name in enumerate(parts[:-1], start=1):
        module = ".".join(parts[:depth])
        if depth == 1:
            # importlib.util.find_spec would import the parents of a dotted name; of a plain one there are none.
            spec = importlib.util.find_spec(name)
        else:
            places = spec.submodule_search_locations
            spec = None if places is None else importlib.machinery.PathFinder.find_spec(module, list(places))
        if spec is None:
            return f"there is no module {module}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        with open(spec.origin, "rb") as stream:
            names = _top_level_names(ast.parse(stream.read()))
    except (OSError, SyntaxError, ValueError) as error:
        return f"module {'.'.join(parts[:-1])} cannot be read: {error}"
    if names is None or parts[-1] in names:
        return None
    close = difflib.get_close_matches(parts[-1], names, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    return f"module {'.'.join(parts[:-1])} has no {parts[-1]}{hint}"


def _top_level_names(module: ast.Module) -> set[str] | None:
    """Names a module may bind, or None when that cannot be told without running it."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return None
            names.add(node.asname or node.name.partition(".")[0])
    return None if "__getattr__" in names else names
