"""Turns messages into token ids and completions into messages, with the package `renderers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.errors import About, ConfigError, describe
from moe_rl.gateway.json_values import as_object, carried
from moe_rl.models.facts import ModelFacts
from moe_rl.tasks.tokenizer import TextCodec, transformers_tokenizer
from moe_rl.tasks.turn_end import endless_problem

Message = Mapping[str, Any]
"""A chat message in OpenAI's form: role, content as text, and perhaps tool_calls, tool_call_id, reasoning_content."""

_PROBE = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, you."}]
_PROBED_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Holds a call of a tool that the model made. arguments: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Holds what the model said.

    Attributes:
        content: its text, with the text of tool calls that cannot be read.
        reasoning: what it thought before; "" for nothing.
        uses: the tool calls that can be read.
        unreadable: how many tool calls cannot.
    """

    content: str
    reasoning: str
    uses: tuple[ToolUse, ...]
    unreadable: int


class ChatRenderer:
    """Renders the chats of one model.

    Attributes:
        stop_token_ids: tokens that end the model's turn.
        reads_tools: whether it finds tool calls in completions.
    """

    def __init__(self, model_path: Path, settings: Mapping[str, Any]):
        """Load the tokenizer and the renderer. settings: the key gateway.renderer.

        Raises:
            ConfigError: there is no such renderer or setting, or it is not one for this model.
        """
        from renderers import create_renderer  # imported late, as in all rooms that not every command needs
        from renderers.configs import config_from_name

        name = str(settings.get("name", ""))
        where: About = {"key": "gateway.renderer", "folder": model_path}
        try:
            kind = config_from_name(name)
            if kind is None:
                raise ValueError("a name of the package `renderers` is needed, such as default or qwen3")
            self._tokenizer = transformers_tokenizer(model_path)
            self._renderer = create_renderer(self._tokenizer, type(kind).model_validate(dict(settings)))
            self._check_template(name)
        except Exception as error:  # both libraries raise errors of every kind
            raise ConfigError(
                describe(
                    "the model's chats cannot be rendered", where=where, got=f"{name!r}: {error}", fault="renderer"
                )
            ) from error
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())
        self.reads_tools = bool(getattr(self._renderer, "supports_tools", True))

    def refuse_endless(self, codec: TextCodec, facts: ModelFacts, rollout: RolloutConfig) -> None:
        """Raise ConfigError where a model that answers as its chats show would never end its turn."""
        problem = endless_problem(
            lambda messages: str(self._tokenizer.decode(self._renderer.render_ids([*map(dict, messages)]))),
            codec,
            tuple(dict.fromkeys((*self.stop_token_ids, *facts.eos_token_ids))),
            rollout,
        )
        if problem is not None:
            raise ConfigError(problem)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the prompt of a chat from its beginning.

        Args:
            tools: as in OpenAI's requests: {"type": "function", "function": {...}}.

        Raises:
            ValueError: the messages cannot be rendered. The text is for the client.
        """
        try:
            ids = self._renderer.render_ids(_for_renderer(messages), tools=_listed(tools), add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return tuple(map(int, ids))

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...] | None:
        """Return the prompt of the next turn: that of the last one, its completion token by token, and new messages.

        Returns None where the template would write the earlier turns otherwise now, so that they must be rendered
        anew.
        """
        bridge = self._renderer.bridge_to_next_turn(
            list(prompt), list(completion), _for_renderer(messages), tools=_listed(tools)
        )
        if bridge is None:
            return None
        ids, earlier = tuple(map(int, bridge.token_ids)), (*prompt, *completion)
        return ids if ids[: len(earlier)] == earlier else None

    def parse(
        self, prompt: Sequence[int], completion: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedAnswer:
        """Return what the model said. Text is tokens turned into text, and nothing is turned back."""
        try:
            found = self._renderer.parse_response(list(completion), tools=_listed(tools), prompt_ids=list(prompt))
        except (ValueError, RecursionError):  # a call beyond what Python reads of JSON
            ended = bool(completion) and completion[-1] in self.stop_token_ids
            text = self._tokenizer.decode(list(completion)[: len(completion) - ended], skip_special_tokens=False)
            return ParsedAnswer(text, "", (), 1)
        uses, unreadable = [], []
        for call in found.tool_calls:
            if tools and call.status == "ok" and (use := _tool_use(call.name, call.arguments)) is not None:
                uses.append(use)
            else:
                unreadable.append(call.raw)
        content = "\n".join(text for text in (found.content, *unreadable) if text)
        return ParsedAnswer(content, found.reasoning_content or "", tuple(uses), len(unreadable))

    def _check_template(self, name: str) -> None:
        """Raise ValueError where a renderer writes other tokens than the model's own chat template, if it has one."""
        template = self._tokenizer.chat_template
        if name == "default" or template is None:
            return
        config = self._renderer.config
        options = {key: getattr(config, key) for key in type(config).template_field_names()}
        for tools in (None, [_PROBED_TOOL])[: 1 + ("tools" in str(template))]:
            ours = list(self._renderer.render_ids(_PROBE, tools=tools, add_generation_prompt=True))
            theirs = list(
                self._tokenizer.apply_chat_template(
                    _PROBE, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **options
                )
            )
            if ours != theirs:
                at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
                raise ValueError(
                    f"it writes other tokens than the model's chat template, from token {at} on: "
                    f"{self._tokenizer.decode(ours[at : at + 8])!r} instead of "
                    f"{self._tokenizer.decode(theirs[at : at + 8])!r}"
                )


def _listed(tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None


def _for_renderer(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as objects, as templates expect them."""
    found = []
    for message in messages:
        one = dict(message)
        if calls := one.get("tool_calls"):
            one["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"])}}
                for call in calls
            ]
        found.append(one)
    return found


def _tool_use(name: Any, arguments: Any) -> ToolUse | None:
    """Return the call of a tool that a renderer has read, if JSON carries it both ways."""
    try:
        text = arguments if isinstance(arguments, str) and arguments else json.dumps(arguments or {})
        carried(json.dumps(name))
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolUse(name, text) if isinstance(name, str) and name and as_object(text) is not None else None


def read_arguments(text: str) -> Any:
    """Return the arguments of a tool call: an object if the text is one that JSON carries, otherwise the text."""
    found = as_object(text)
    return text if found is None else found
