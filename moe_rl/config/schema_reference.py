"""Writes the reference of all config keys, docs/generated/config.md, from the schema. `make generated` calls it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moe_rl.config.objective import LOSSES, ObjectiveConfig
from moe_rl.config.reward_kinds import KINDS, RewardConfig
from moe_rl.config.schema import Config

_HEAD = """\
<!-- `make generated` writes this page from moe_rl/config. Change the text there. -->

# Config keys

A config is a YAML file with the sections below. Unknown keys are errors. On the command line `section.key=value`
replaces a value. A file may say `extends: FILE`, with a path relative to itself, and then holds only the differences:
sections are merged key by key, and lists are replaced. All other paths are relative to the working directory; a path
`configs/...` or `assets/...` that is not there means the file that ships with moe_rl. Unless the table says otherwise,
whole numbers are below 2^31 and other numbers at most 1e30.
"""
_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    date: "day, as YYYY-MM-DD",
    NoneType: "null",
    Any: "any value",
}
_EVERYWHERE = (2**31 - 1, 1e30)  # the default limit, which the head of the page states
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}  # names used by annotated_types


def reference() -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        parts.append(f"## {name}\n")
        if name == "objective":
            parts += _objective()
        else:
            parts += _section(name, field)
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, field: FieldInfo, like: str = "", known: Iterable[str] = ()) -> Iterator[str]:
    """Yield the table of a section, then the tables of the sections in it.

    like, known: a section above it on the page, and the keys that both have.
    """
    section, inside = _inner(field.annotation, path)
    left_out = " The section may be left out." if not field.is_required() else ""
    shared = f" Further keys are those of {like}: {', '.join(f'`{key}`' for key in known)}." if like else ""
    yield f"{_text(section)}{left_out}{shared}\n"
    yield _table({key: inner_field for key, inner_field in section.model_fields.items() if key not in known})
    above: dict[type[BaseModel], str] = {}
    for name, inner_field in section.model_fields.items():
        child, deeper = _inner(inner_field.annotation, f"{inside}.{name}")
        if child is not None:
            yield f"### {deeper}\n"
            base = child.__base__
            more = (above[base], base.model_fields) if base in above else ()
            yield from _rewards() if name == "rewards" else _section(f"{inside}.{name}", inner_field, *more)
            if base.model_fields:
                above[base] = deeper


def _objective() -> Iterator[str]:
    default = Config.model_fields["objective"].default.name
    yield f"""\
The policy loss and its settings. `name` chooses the loss; the default is `{default}`. A key of another loss is refused,
unless it is null. docs/concepts/objectives.md gives formulas and denominators.
"""
    shared = {key: field for key, field in ObjectiveConfig.model_fields.items() if key != "name"}
    yield _table(shared)
    corrections = shared["corrections"]
    yield f"### {_inner(corrections.annotation, 'objective.corrections')[1]}\n"
    yield from _section("objective.corrections", corrections)
    yield "### Losses\n"
    rows = ["| name | loss | its keys |", "|---|---|---|"]
    meanings: dict[str, None] = {}  # each once, in order
    for name, loss in LOSSES.items():
        keys = {key: loss.model_fields[key] for key in loss.__annotations__ if key != "name"}
        rows.append(
            f"| `{name}` | {_text(loss)} | {'; '.join(f'`{key}` {_in_line(field)}' for key, field in keys.items())} |"
        )
        for key, field in keys.items():
            meanings[f"| `{key}` | {_type(field.annotation, field.metadata)} | {_meaning(field)} |"] = None
    yield "\n".join(rows) + "\n"
    yield "\n".join(["| key of a loss | value | meaning |", "|---|---|---|", *meanings]) + "\n"


def _rewards() -> Iterator[str]:
    yield _table(RewardConfig.model_fields)
    for name, kind in KINDS.items():
        yield f"#### kind: {name}\n"
        yield f"{_text(kind)}\n"
        fields = {key: field for key, field in kind.model_fields.items() if key not in RewardConfig.model_fields}
        if fields:
            yield _table(fields)


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in fields.items():
        rows.append(f"| `{key}` | {_type(field.annotation, field.metadata)} | {_default(field)} | {_meaning(field)} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return f"required; usual: `{field.examples[0]}`" if field.examples else "required"
    return f"`{_value(field.default)}`"


def _in_line(field: FieldInfo) -> str:
    return _default(field).replace("; usual:", ", usually")


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _value(default: Any) -> str:
    return default if isinstance(default, str) else json.dumps(default, default=str)


def _inner(annotation: Any, path: str = "") -> tuple[Any, str]:
    """Return the section that a key holds (None for a plain value), and its path, with NAME or N for variable parts."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, path
    many = {dict: "NAME", tuple: "N"}.get(get_origin(annotation))
    for argument in () if get_origin(annotation) is Literal else get_args(annotation):
        section, inside = _inner(argument, f"{path}.{many}" if many else path)
        if section is not None:
            return section, inside
    return None, path


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe in words which values a type accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*metadata, *_constraints(annotation.__metadata__)])
    known = ((word, getattr(constraint, name, None)) for constraint in metadata for name, word in _BOUNDS.items())
    bounds = [f"{word} {bound}" for word, bound in known if bound is not None and bound not in _EVERYWHERE]
    if origin is Literal:
        words = " or ".join(f"`{_value(argument)}`" for argument in arguments)
    elif origin is tuple and Ellipsis not in arguments:
        words = f"list of {len(arguments)}: {_type(arguments[0])}"
    elif origin is tuple:
        words = f"list of: {_type(arguments[0])}"
    elif origin is dict:
        words = f"names, each with: {_type(arguments[1])}"
    elif arguments:
        words = ", or ".join(dict.fromkeys(map(_type, arguments)))
    elif issubclass(annotation, BaseModel):
        words = "section"
    else:
        words = _WORDS[annotation]
    return " ".join([words, *(bounds if not origin else ())])


def _constraints(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _text(section: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


if __name__ == "__main__":
    print(reference(), end="")
