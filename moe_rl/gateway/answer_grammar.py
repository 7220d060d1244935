"""Writes the grammar of an answer that a client constrains: a structural tag of xgrammar, as JSON text.

How a model writes its reasoning and its tool calls is taken from what its renderer writes for a message that has them:

    <think>\\nREASONING\\n</think>\\n\\n<tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call>

Reasoning stays free, and stays optional where the prompt does not begin it. Special tokens of the tokenizer are
required as such: their text spelt with other tokens would not be read as a tool call or as reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_rl.gateway.template_check import Message

type _Format = dict[str, Any]
type _Tools = Sequence[Mapping[str, Any]]

# What the example says, each once.
_THOUGHT, _TEXT, _NAMES, _VALUES = "moerlthought", "moerltext", ("moerlfirst", "moerlsecond"), ("moerlone", "moerltwo")
_ARGUMENTS = re.compile(r'\{\s*"key":\s*"(?:' + "|".join(_VALUES) + r')"\s*\}')


# Characters of whitespace between two parts of JSON. Models may fall into writing it without end.
_MOST_WHITESPACE = 32


@dataclass(frozen=True, slots=True)
class Constraint:
    """Says what an answer must be, after its reasoning.

    Attributes:
        schema: the JSON schema of its text; None: any text.
        tools: names and argument schemas of the tools that it may call instead, or after its text if that is free.
        forced: whether it must call one.
        single: whether it may call only one.
        barred: whether it may call none.
    """

    schema: Mapping[str, Any] | None
    tools: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    forced: bool = False
    single: bool = False
    barred: bool = False


class AnswerGrammar:
    """Writes grammars for the answers of one renderer.

    Args:
        said: returns what the renderer writes for an assistant's message after a user's; None if that does not begin
            with the prompt of such a message.
        called: returns the names of the tool calls that the renderer finds in a text; None if some are unreadable.
        markers: the tokenizer's added tokens, with their ids.
        stops: tokens that end an answer.
    """

    def __init__(
        self,
        said: Callable[[Message, _Tools], str | None],
        called: Callable[[str, _Tools], Sequence[str] | None],
        markers: Mapping[str, int],
        stops: Collection[int],
    ):
        self._said, self._called, self._markers, self._stops = said, called, markers, list(stops)
        self._split = re.compile("(" + "|".join(sorted(map(re.escape, markers), key=len, reverse=True)) + ")")

    def of(self, constraint: Constraint) -> str:
        """Return the grammar. Raises ValueError if the renderer's format is not known well enough."""
        body: list[_Format] = []
        if constraint.schema is not None:
            body = [_json(constraint.schema)]
        if constraint.tools:
            calls = self._calls(constraint)
            if constraint.forced:
                body = calls
            elif body:
                body = [{"type": "or", "elements": [*body, _sequence(calls)]}]
            else:
                body = [self._free(calls[0]["elements"][0])]
                body += [] if constraint.barred else [{"type": "optional", "content": _sequence(calls)}]
        return json.dumps({"type": "structural_tag", "format": _sequence([*self._reasoning(), *body])})

    def _free(self, choice: _Format) -> _Format:
        """Return any text before tool calls. choice: how a call begins."""
        begin = choice["elements"][0] if choice["type"] == "sequence" else choice
        if begin["type"] != "token":
            raise ValueError("this renderer's tool calls begin with no special token, so text before them is not free")
        return {"type": "any_tokens", "exclude_tokens": [begin["token"], *self._stops]}

    def _reasoning(self) -> list[_Format]:
        if self._thought is None:
            return []
        begin, end = map(self._pieces, self._thought)
        if not end or end[0]["type"] != "token" or (begin and begin[0]["type"] != "token"):
            raise ValueError("this renderer's reasoning is not between special tokens")
        free = {"type": "any_tokens", "exclude_tokens": [end[0]["token"], *self._stops]}
        # Whitespace after the opening token is a part of the reasoning.
        reasoning = [*begin, free, *end]
        return [{"type": "optional", "content": _sequence(reasoning)}] if begin else reasoning

    def _calls(self, constraint: Constraint) -> list[_Format]:
        first, further, end = self._written_calls

        def choice(before: tuple[str, str]) -> _Format:
            calls = [
                _sequence([*self._pieces(before[0] + _escaped(name) + before[1]), _json(schema)])
                for name, schema in constraint.tools
            ]
            return calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}

        more = [] if constraint.single else [{"type": "star", "content": choice(further)}]
        return [choice(first), *more, *self._pieces(end)]

    @cached_property
    def _thought(self) -> tuple[str, str] | None:
        """Return the texts before and after reasoning; None if the model has none."""
        said = {"role": "assistant", "content": _TEXT}
        text = self._said(said | {"reasoning_content": _THOUGHT}, ()) or ""
        begin, thought, rest = text.partition(_THOUGHT)
        if thought:
            return begin.rstrip(), rest.partition(_TEXT)[0].lstrip()
        if not (self._said(said, ()) or "").startswith(_TEXT):
            raise ValueError(
                "this renderer's prompts do not end where an answer begins, so answers cannot be constrained"
            )
        return None

    @cached_property
    def _written_calls(self) -> tuple[tuple[str, str], tuple[str, str], str]:
        """Return the text around the name of the first tool call, of each further one, and the text after the last."""
        schema = {"type": "object", "properties": {"key": {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in _NAMES]
        calls = [
            {
                "id": f"call_{name}",  # a format that writes ids has the name twice, and is refused
                "type": "function",
                "function": {"name": name, "arguments": json.dumps({"key": value})},
            }
            for name, value in zip(_NAMES, _VALUES, strict=True)
        ]
        thought = {} if self._thought is None else {"reasoning_content": _THOUGHT}
        text = self._said({"role": "assistant", "content": "", "tool_calls": calls, **thought}, tools) or ""
        if self._thought is not None:
            text = text.partition(_THOUGHT)[2].lstrip().removeprefix(self._thought[1])
        first, *others = _ARGUMENTS.split(text)
        parts = [before.partition(name) for before, name in zip((first, *others), _NAMES, strict=False)]
        around = [(before, after) for before, name, after in parts if name and name not in after]
        if len(others) != 2 or len(around) != 2:
            raise ValueError(
                "this renderer's tool calls do not write their arguments as JSON, so they cannot be forced"
            )
        end = others[1]
        for marker, token in self._markers.items():
            end = end.partition(marker)[0] if token in self._stops else end
        written = "".join(f"{before}{name}{after}{{}}" for (before, after), name in zip(around, _NAMES, strict=True))
        if self._called(written + end, tools) != list(_NAMES):
            raise ValueError("this renderer does not read tool calls as it writes them, so they cannot be forced")
        return around[0], around[1], end

    def _pieces(self, text: str) -> list[_Format]:
        """Return the tokens and texts that a text consists of."""
        return [
            {"type": "token", "token": self._markers[part]}
            if part in self._markers
            else {"type": "const_string", "value": part}
            for part in self._split.split(text)
            if part
        ]


def markers_of(grammar: str) -> set[int]:
    """Return the special tokens that a grammar requires somewhere."""
    markers, parts = set[int](), [json.loads(grammar)["format"]]
    while parts:
        part = parts.pop()
        markers |= {part["token"]} if part["type"] == "token" else set()
        parts += part.get("elements", [])
        parts += [part["content"]] if "content" in part else []
    return markers


def _sequence(elements: list[_Format]) -> _Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _json(schema: Mapping[str, Any]) -> _Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE}


def _escaped(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]
