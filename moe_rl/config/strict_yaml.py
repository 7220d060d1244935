"""Reads YAML without implicit conversions, so that the run gets exactly what the config file says.

Only the scalars of YAML 1.2's core schema are known. `true` and `false` are the only booleans (`no`, `off` and `yes`
are text), `1e-6` is a number, `010` is ten, `12:30` and `2026-01-02` are text. Duplicate keys, aliases, merge keys and
tags are errors that name the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from moe_rl.errors import About, ConfigError

Path = tuple[str | int, ...]
"""Locates a value: keys and list positions from the top of the document."""

MAX_BYTES = 1 << 20

_SCALARS: dict[str, tuple[re.Pattern[str] | None, Callable[[str], Any]]] = {
    "tag:yaml.org,2002:null": (re.compile(r"^(?:~|null|Null|NULL|)$"), lambda text: None),
    "tag:yaml.org,2002:bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), lambda text: text[0] in "tT"),
    "tag:yaml.org,2002:int": (re.compile(r"^[-+]?[0-9]+$"), int),
    "tag:yaml.org,2002:float": (
        re.compile(
            r"^[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
        ),
        lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),
    ),
    "tag:yaml.org,2002:str": (None, str),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise _Refused(
                self.peek_event().start_mark, "an alias is not allowed in a config", do="write the value out"
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this reader, or a YAML 1.1 reader, would take for another type."""

    yaml_implicit_resolvers = {first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _) in _SCALARS.items():
    if _pattern is not None:
        _Loader.add_implicit_resolver(_tag, _pattern, None)
        _Dumper.add_implicit_resolver(_tag, _pattern, None)


class _Refused(Exception):
    """Describes a problem at a place in the document; `parse` adds the document's name."""

    def __init__(self, mark: yaml.Mark, what: str, key: str = "", do: str = ""):
        super().__init__(what)
        self.line, self.key, self.do = mark.line + 1, key, do


def parse(text: str, where: About) -> tuple[Any, dict[Path, int]]:
    """Read one YAML document.

    text: the document. where: its file, or another name for messages.
    Returns its value and, for each key and list item, its 1-based line. Raises ConfigError.
    """
    if len(text) > MAX_BYTES:
        got, expected = f"{len(text)} characters", f"at most {MAX_BYTES}"
        raise ConfigError("this is not a config file", where=where, got=got, expected=expected)
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[Path, int] = {}
        return (None if node is None else _value(node, (), lines)), lines
    except _Refused as error:
        key: About = {"key": error.key} if error.key else {}
        raise ConfigError(str(error), where={**key, **where, "line": error.line}, do=error.do) from None
    except yaml.MarkedYAMLError as error:
        line: About = {"line": error.problem_mark.line + 1} if error.problem_mark else {}
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError("not valid YAML", where={**where, **line}, got=reason) from None
    except yaml.YAMLError as error:
        raise ConfigError("not valid YAML", where=where, got=" ".join(str(error).split())) from None
    except RecursionError:
        raise ConfigError("nested too deeply for a config", where=where) from None
    finally:
        if loader is not None:
            loader.dispose()


def dump(value: Any) -> str:
    """Return block-style YAML that `parse` reads back as an equal value. Key order is kept."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _value(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    _refuse_half_characters(node)
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _key(key_node)
            here = (*path, key)
            if key in mapping:
                what = f"given twice, also on line {lines[here]}"
                raise _Refused(key_node.start_mark, what, _dotted(here), do="keep one")
            lines[here] = key_node.start_mark.line + 1
            mapping[key] = _value(value_node, here, lines)
        return mapping
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_value(item, (*path, index), lines) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        pattern, convert = _SCALARS[node.tag]
        if pattern is not None and not pattern.match(node.value):
            raise _Refused(node.start_mark, f"{node.value!r} does not fit its tag {node.tag}", do="leave the tag out")
        try:
            return convert(node.value)
        except ValueError:  # an integer past the interpreter's digit limit
            raise _Refused(node.start_mark, f"a number of {len(node.value)} digits") from None
    raise _Refused(node.start_mark, f"the tag {node.tag!r} is not allowed in a config", do="leave the tag out")


def _key(node: yaml.Node) -> str:
    _refuse_half_characters(node)
    if isinstance(node, yaml.ScalarNode):
        return node.value
    raise _Refused(node.start_mark, "a key must be plain text")


def _refuse_half_characters(node: yaml.Node) -> None:
    """Refuse a lone surrogate, which YAML can escape, but file names and JSON cannot hold."""
    if isinstance(node, yaml.ScalarNode) and any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _Refused(node.start_mark, f"{node.value[:40]!a} holds half a character", do="write the whole character")


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)
