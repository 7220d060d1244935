"""Turns a YAML file and `a.b=c` overrides into a `Config`, or into a message with every reason why that fails.

A file may say `extends: FILE`, with a path relative to itself. Sections are merged key by key, and lists are replaced.
Relative paths in a config (`model.path`, `run.runs_dir`, the data of prompt sources, ...) are relative to the working
directory of the command, never to the config file. Only files that moe_rl ships, `configs/...` and `assets/...`, are
found from any directory.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moe_rl.config import strict_yaml
from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES, ObjectiveConfig, without_nulls
from moe_rl.config.prompt_sources import PromptSourceConfig
from moe_rl.config.reward_kinds import KINDS
from moe_rl.config.schema import Config
from moe_rl.config.section import members
from moe_rl.errors import About, ConfigError, Problem, describe, did_you_mean
from moe_rl.shipped import shipped

SHIPPED = shipped("configs")

Sources = dict[strict_yaml.Path, About]
"""Source of each key: the file and line, or the override."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a config file.

    Text, numbers and booleans are never converted into each other. Problems between keys are left to `check.problems`,
    which reports all of them together.

    Args:
        path: a YAML file, or the name of a shipped one such as qwen3_30b_a3b.
        overrides: texts `a.b=c`, applied in order on top of the file. c is read as YAML.

    Raises:
        ConfigError: listing every problem with its key, its line, the value and what was expected.
    """
    data, sources = _read(find_config(path))
    problems = [problem for text in overrides if (problem := _override(data, text, sources))]
    try:
        config = config_of(data, sources)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def config_of(data: dict[str, Any], sources: Sources) -> Config:
    """Return the config with these sections. Raises ConfigError, listing every problem."""
    if "objective" in data:
        data = {**data, "objective": without_nulls(data["objective"])}
    broken: list[Problem] = []
    try:
        return Config.model_validate_json(json.dumps(data), strict=True, context=broken)
    except ValidationError as error:
        messages = [_message(item, sources) for item in error.errors(include_url=False)]
        raise ConfigError(messages + broken) from None


def find_config(name: str | Path, beside: Path = Path(), where: About = MappingProxyType({})) -> Path:
    """Find a config file by its path, relative to the folder `beside`, or by the name of a shipped one.

    where: names the source of the request in messages. Raises ConfigError if there is no such file.
    """
    name, path = Path(name), beside / name
    by_name = [SHIPPED / name, SHIPPED / f"{name}.yaml"] if name.parent == Path() else []
    from_top = [SHIPPED.parent / name] if name.parts[:1] == (SHIPPED.name,) else []
    places = [path, *from_top, *by_name]
    try:
        if existing := next((place for place in places if place.exists() and not place.is_dir()), None):
            return existing
    except OSError as error:
        raise ConfigError(
            "cannot read the config file", where={"file": path, **where}, got=error, fault="unreadable"
        ) from None
    known = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
    hint = did_you_mean(name.stem, known) or f"give the path of a YAML file, or one of {', '.join(known)}"
    raise ConfigError("there is no config file", where={"file": path, **where}, got=path, do=hint, fault="absent")


def _read(file: Path, extending: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Sources]:
    """Return the merged content of a file and of the files that it extends, and the source of each key.

    extending: the files that lead to this one.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read the config file", where={"file": file}, got=error, fault="unreadable") from None
    data, lines = strict_yaml.parse(text, {"file": file})
    if not isinstance(data, dict):
        got = "an empty file" if data is None else _shown(data)
        raise ConfigError("a config is a mapping of sections", where={"file": file}, got=got, fault="no mapping")
    sources: Sources = {key: {"file": file, "line": line} for key, line in lines.items()}
    if "extends" not in data:
        return data, sources
    name, where = data.pop("extends"), sources.pop(("extends",))
    if not isinstance(name, str):
        raise ConfigError(
            "wrong value", where={"key": "extends", **where}, got=_shown(name), expected="the path of a config file"
        )
    base, chain = find_config(name, file.parent, where), (*extending, file)
    if base.resolve() in [config_file.resolve() for config_file in chain]:
        got = " -> ".join(map(str, (*chain, base)))
        raise ConfigError(
            "the files extend each other in a circle",
            where={"key": "extends", **where},
            got=got,
            do="take one of them out",
        )
    their_data, their_sources = _read(base, chain)
    return _merged(their_data, data), their_sources | sources


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge `own` over `base`: mappings key by key; everything else, lists included, is replaced."""
    merged = dict(base)
    for key, value in own.items():
        theirs = merged.get(key)
        merged[key] = _merged(theirs, value) if isinstance(theirs, dict) and isinstance(value, dict) else value
    return merged


def anchored[T](value: T) -> T:
    """Return a config, or a part of one, with absolute paths: they mean the same in every working directory."""
    if isinstance(value, Path):
        return cast(T, value.absolute())
    if isinstance(value, BaseModel):
        fields = {name: anchored(getattr(value, name)) for name in type(value).model_fields}
        if isinstance(value, PromptSourceConfig) and (path := Path(value.data)).exists():
            fields["data"] = str(path.absolute())
        return value.model_copy(update=fields)
    if isinstance(value, tuple):
        return cast(T, tuple(map(anchored, value)))
    if isinstance(value, dict):
        return cast(T, {name: anchored(part) for name, part in value.items()})
    return value


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML, with every field and default. `load_config` reads an equal Config from it."""
    return strict_yaml.dump(config.model_dump(mode="json"))


def _override(data: dict[str, Any], text: str, sources: Sources) -> Problem | None:
    """Apply one override in place, and note its keys in `sources`. Return the problem with it, or None."""
    key, equals, raw = text.partition("=")
    keys: strict_yaml.Path = tuple(key.split("."))
    if not equals or not all(part and part == part.strip() for part in key.split(".")):
        return describe("an override is not of the form a.b=c", where={"override": repr(text)})
    origin: About = {"override": repr(text)}
    try:
        value, _ = strict_yaml.parse(raw, origin)
    except ConfigError as error:
        return error.message
    node: Any = data
    part: str | int
    for depth, part in enumerate(keys):
        if isinstance(node, list):
            index = int(part) if str(part).isdecimal() else len(node)
            if index >= len(node):
                return describe(
                    "an override names a place that the list does not have",
                    where={"key": ".".join(map(str, keys[:depth])), **origin},
                    got=part,
                    expected=f"0 to {len(node) - 1}",
                )
            part = index
            keys = (*keys[:depth], index, *keys[depth + 1 :])
        if depth == len(keys) - 1:
            break
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
            sources[keys[: depth + 1]] = origin
        if not isinstance(node[part], dict | list):
            return describe(
                "an override goes through a key that is not a section",
                where={"key": ".".join(map(str, keys[: depth + 1])), **origin},
                got=node[part],
            )
        node = node[part]
    for known in [known for known in sources if known[: len(keys)] == keys]:
        del sources[known]
    node[keys[-1]] = value
    sources[keys] = origin
    return None


def _message(error: ErrorDetails, sources: Sources) -> Problem:
    (loc, holder), value = _place(error["loc"]), error["input"]
    expected = error["msg"].removeprefix("Input should be ").replace("object", "mapping")
    if error["type"].startswith("union_tag_"):  # there is no loss with this name, or no such kind of reward
        leaf, known_names = ("name", LOSSES) if loc == ("objective",) else ("kind", KINDS)
        named = isinstance(value, dict)
        loc, value = ((*loc, leaf), value[leaf]) if named else (loc, value)
        expected = f"one of {', '.join(known_names)}" if named else "a mapping"
    known = loc
    while known and known not in sources:
        known = known[:-1]
    key, leaf = ".".join(str(part) for part in loc), str(loc[-1])
    where: About = {"key": key, **sources.get(known, {})}
    if loss := _tag(holder, LOSSES):
        where = {**where, "given": f"objective.name is {loss}"}
    elif kind := _tag(holder, KINDS):
        where = {**where, "given": f"kind is {kind}"}
    if error["type"] == "extra_forbidden":
        others = [name for name, keys in LOSS_PARAMETERS.items() if leaf in keys]
        if loss and others:
            return describe(
                "the loss does not take it",
                where=where,
                got=_shown(value),
                expected=f"only {', '.join(f'objective.{name}' for name in LOSS_PARAMETERS[loss])}",
                do=f"it belongs to {', '.join(others)}: remove it, or set it to null",
            )
        return describe("unknown key", where=where, do=_suggestion(loc, holder))
    field = getattr(holder, "model_fields", {}).get(leaf)
    meaning = (field.description or "") if field is not None else ""
    if error["type"] == "missing":
        usual = f"Published or usual: {leaf} {field.examples[0]}." if field is not None and field.examples else ""
        return describe("required, but missing", where=where, do=" ".join(["add it.", meaning, usual]).strip())
    loss_key = loss and leaf in holder.__annotations__ and leaf in ObjectiveConfig.model_fields
    out_of_range = error["type"].startswith(("less_than", "greater_than"))  # the meaning says why there is a range
    return describe(
        "wrong value", where=where, got=_shown(value), expected=expected, do=meaning if loss_key or out_of_range else ""
    )


def _shown(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _place(loc: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], Any]:
    """Return the key of a pydantic error, and its class. After a union, pydantic's place names the member, which is
    left out.
    """
    holder: Any = Config
    known: dict[str, type[BaseModel]] = {}
    key: list[str | int] = []
    for depth, part in enumerate(loc):
        if part in known:
            holder, known = known[str(part)], {}
            continue
        key.append(part)
        if depth < len(loc) - 1 and holder is not None:
            if get_origin(holder) in (dict, tuple):
                annotation = get_args(holder)[1 if get_origin(holder) is dict else 0]
            else:
                annotation = _names(holder).get(str(part))
            holder, known = _section(annotation), members(annotation)
    return tuple(key), holder


def _tag(holder: Any, sections: Mapping[str, type[BaseModel]]) -> str:
    """Return the name that a class has among sections; "" for any other class."""
    return next((name for name, section in sections.items() if section is holder), "")


def _section(annotation: Any) -> Any:
    """Return the section class that a field, mapping or list holds. None for a plain value."""
    if get_origin(annotation) in (UnionType, Union):  # an optional section, or a union of sections
        return next(filter(None, map(_section, get_args(annotation))), None)
    if get_origin(annotation) is Annotated:
        return _section(get_args(annotation)[0])
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    if get_origin(annotation) is tuple:
        return annotation if _section(get_args(annotation)[0]) is not None else None
    return annotation if get_origin(annotation) is dict else None


def _names(section: Any) -> dict[str, Any]:
    return {name: field.annotation for name, field in getattr(section, "model_fields", {}).items()}


def _all_keys(section: Any = Config, prefix: str = "") -> Iterator[str]:
    for name, annotation in _names(section).items():
        yield prefix + name
        inner = LOSSES.values() if name == "objective" else [_section(annotation)]
        for inner_section in inner:
            yield from _all_keys(inner_section, f"{prefix}{name}.")


def _suggestion(loc: Sequence[str | int], holder: Any) -> str:
    """Suggest keys for an unknown key: a sibling, or a key with the same or a similar name elsewhere."""
    key, prefix = str(loc[-1]), "".join(f"{part}." for part in loc[:-1])
    siblings = list(_names(holder))
    close = [prefix + name for name in difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)]
    by_leaf: dict[str, list[str]] = {}
    for name in dict.fromkeys(_all_keys()):
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    exact = by_leaf.get(key, [])
    elsewhere = [name for leaf in difflib.get_close_matches(key, by_leaf, n=1, cutoff=0.75) for name in by_leaf[leaf]]
    suggestions = exact or close or elsewhere
    if suggestions:
        return f"did you mean {' or '.join(suggestions)}?"
    return f"the keys here are {', '.join(siblings)}" if siblings else "remove it"
