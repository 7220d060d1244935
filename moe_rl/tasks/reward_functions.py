"""Reward functions: what they may ask for, and their import, which happens in the worker only.

A reward function is a plain callable. It names any of `prompt`, `completion`, `answer` as parameters and is given those
and nothing else; a parameter of another name must have a default.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

ARGUMENTS = ("prompt", "completion", "answer")


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
