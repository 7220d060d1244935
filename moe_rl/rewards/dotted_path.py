"""Reward functions by dotted path: what can be said without importing them, and, in the worker only, the import.

A reward function is a plain callable. It names any of `prompt`, `completion`, `answer` as parameters and is given those
and nothing else; a parameter of another name must have a default.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
from collections.abc import Callable

ARGUMENTS = ("prompt", "completion", "answer")


def dotted_path_problem(path: str) -> str | None:
    """What is wrong with a dotted path as far as can be told without running any of its code; None if nothing is.

    Checks the syntax and that the module is there. `importlib.util.find_spec("a.b")` would import `a`, so only the
    top-level package is looked up with it and the rest is found in the packages' folders.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return f"not a dotted path: got {path!r}, expected module.function"
    package = parts[0]
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, such as __main__: the worker could not import it either
        spec = None
    for part in parts[1:-1]:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return f"{package} is a module, not a package: it holds no module {part!r}"
        package = f"{package}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(package, spec.submodule_search_locations)
    if spec is None:
        return f"no module {package} (for {path!r}). Install it, or put its folder on PYTHONPATH"
    return None


def resolve(path: str) -> tuple[Callable[..., object], list[str]]:
    """Import a reward function; return it with the subset of `ARGUMENTS` that it names. Called in the worker only.

    Raises ValueError with a sentence for the user, or whatever importing the module raises.
    """
    module_name, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module_name), name, None)
    if function is None:
        raise ValueError(f"module {module_name} has no {name!r}")
    if not callable(function):
        raise ValueError(f"{path} is not callable: got {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{path} is a coroutine function. Make it a plain function")
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"{path} has the parameter {parameter.name!r}: expected only {', '.join(ARGUMENTS)}, given by name. "
                "Rename it or give it a default"
            )
    return function, wanted
