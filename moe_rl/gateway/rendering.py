"""Turns messages into token ids and completions into messages, with the package `renderers`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from moe_rl.config.environment import DialogueKind
from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.errors import About, ConfigError
from moe_rl.gateway.answer_grammar import AnswerGrammar
from moe_rl.gateway.json_values import as_object, carried
from moe_rl.gateway.template_check import Chat, Difference, Message, difference, differences, kinds_of
from moe_rl.models.facts import ModelFacts
from moe_rl.tasks.shown_messages import check_shown
from moe_rl.tasks.special_tokens import SpecialTokens, Spelling
from moe_rl.tasks.tokenizer import TextCodec, transformers_tokenizer
from moe_rl.tasks.turn_end import endless_problem

# Texts that a renderer's tokenizer remembers, and the characters of the longest: 50 MB at most.
_TEXTS, _SHORT = 2048, 2048


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Holds a tool call by the model. arguments: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Holds a parsed completion.

    Attributes:
        content: its text, including the text of unreadable tool calls.
        reasoning: the reasoning before it; "" for none.
        uses: the readable tool calls.
        unreadable: number of unreadable tool calls.
    """

    content: str
    reasoning: str
    uses: tuple[ToolUse, ...]
    unreadable: int


class _EncodesOnce:
    """Is a renderer's tokenizer that remembers short texts: a chat that is rendered from its beginning consists of
    texts of earlier turns. It gives no character offsets, with which the renderer would encode each text twice."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._remembered = lru_cache(_TEXTS)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) > _SHORT or options != {"add_special_tokens": False}:
            return list(self._tokenizer.encode(text, **options))
        return list(self._remembered(text))

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


class ChatRenderer:
    """Renders the chats of one model.

    Attributes:
        stop_token_ids: tokens that end the model's turn.
        reads_tools: whether it finds tool calls in completions.
    """

    def __init__(
        self,
        model_path: Path,
        settings: Mapping[str, Any],
        differs_in: Collection[DialogueKind] = (),
        day: datetime.date | None = None,
    ):
        """Load the tokenizer and the renderer.

        Args:
            settings: the key gateway.renderer.
            differs_in: the key gateway.differs_in.
            day: the day that prompts tell, if they tell one; None: today. It does not change at midnight.

        Raises:
            ConfigError: there is no such renderer or setting, or it does not fit this model.
        """
        from renderers import create_renderer  # imported late: not every command needs it
        from renderers.configs import config_from_name

        name = str(settings.get("name", ""))
        where: About = {"key": "gateway.renderer", "folder": model_path}
        try:
            kind = config_from_name(name)
            if kind is None:
                raise ValueError("a name of the package `renderers` is needed, such as default or qwen3")
            today = day or datetime.date.today()
            dated = {"conversation_start_date": today.isoformat()} if hasattr(kind, "conversation_start_date") else {}
            config = type(kind).model_validate({**dated, **settings})
            self._load = lambda: _on_day(transformers_tokenizer(model_path), today)
            self._make = lambda tokenizer: create_renderer(_EncodesOnce(tokenizer), config)
            self._tokenizer = self._load()
            self._renderer = self._make(self._tokenizer)
            self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())
            self._differs_in = frozenset(differs_in)
            self._compared = name != "default" and self._tokenizer.chat_template is not None
            if self._compared:
                self._check_template()
        except Exception as error:  # both libraries raise arbitrary exceptions
            raise ConfigError(
                "the model's chats cannot be rendered", where=where, got=f"{name!r}: {error}", fault="renderer"
            ) from error
        self._special = SpecialTokens(self._tokenizer.backend_tokenizer)
        self.reads_tools = bool(getattr(self._renderer, "supports_tools", True))

    def refuse_endless(self, codec: TextCodec, facts: ModelFacts, rollout: RolloutConfig) -> None:
        """Raise ConfigError if a model that follows its chat format would never end its turn."""
        problem = endless_problem(
            lambda messages: str(self._tokenizer.decode(self._renderer.render_ids([*map(dict, messages)]))),
            codec,
            tuple(dict.fromkeys((*self.stop_token_ids, *facts.eos_token_ids))),
            rollout,
        )
        if problem is not None:
            raise ConfigError(problem)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, said: int = 0
    ) -> tuple[int, ...]:
        """Return the prompt of a chat from its beginning.

        Args:
            tools: as in OpenAI's requests: {"type": "function", "function": {...}}.
            said: how many of the first messages belong to an earlier turn and its answer, see `check_shown`.

        Raises:
            NotShown: the prompt does not show a part of the messages or tools.
            ValueError: the messages cannot be rendered. The text is for the client.
        """
        ids = self._written(messages, tools)
        compared = self._compared and not kinds_of(messages, tools) & self._differs_in
        if compared and (where := difference(ids, self._template(messages, tools))) is not None:
            raise ValueError(
                f"the gateway's renderer does not write what the chat template writes: {self._told(where)}"
            )
        check_shown(messages, tools, lambda some, specs: self._tokenizer.decode(self._written(some, specs)), said=said)
        hidden = self._special.hidden(messages, tools)
        if hidden is None:
            return ids
        renderer, spelling = self._with_stand_ins
        return spelling.spelt(self._written(*hidden, renderer=renderer))

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        start: int = 0,
    ) -> tuple[int, ...] | None:
        """Return the prompt of the next turn: the last prompt, its completion token by token, and new messages.

        Returns None if the template would now write the earlier turns differently, so that they must be rendered again.

        Args:
            start: index of the first new message.

        Raises:
            NotShown: the prompt does not show a part of the new messages.
        """
        earlier, new = (*prompt, *completion), messages[start:]
        ids = self._behind(prompt, completion, new, tools)
        if ids is None or ids[: len(earlier)] != earlier:
            return None
        check_shown(
            messages,
            (),
            lambda some, _: self._tokenizer.decode(self._behind(prompt, completion, some, tools) or ()),
            start=start,
            said=start,
        )
        if (hidden := self._special.hidden(new, tools)) is not None:
            renderer, spelling = self._with_stand_ins
            ids = self._behind(prompt, completion, *hidden, renderer=renderer)
            return None if ids is None else earlier + spelling.spelt(ids[len(earlier) :])
        return ids

    @cached_property
    def grammar(self) -> AnswerGrammar:
        """Writes the grammars of constrained answers."""
        user = [{"role": "user", "content": "?"}]

        def said(message: Message, tools: Chat) -> str | None:
            prompt, whole = self._written(user, tools), self._written([*user, message], tools, answers=False)
            return self._tokenizer.decode(whole[len(prompt) :]) if whole[: len(prompt)] == prompt else None

        def called(text: str, tools: Chat) -> list[str] | None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            answer = self.parse(self._written(user, tools), ids, tools)
            return None if answer.unreadable else [use.name for use in answer.uses]

        return AnswerGrammar(said, called, self._tokenizer.get_added_vocab(), self.stop_token_ids)

    def _written(self, messages: Chat, tools: Chat, *, answers: bool = True, renderer: Any = None) -> tuple[int, ...]:
        return self._refusing(
            lambda: (renderer or self._renderer).render_ids(
                _for_renderer(messages), tools=_listed(tools), add_generation_prompt=answers
            )
        )

    def _template(self, messages: Chat, tools: Chat, *, answers: bool = True) -> tuple[int, ...]:
        """Return what the model's own chat template writes, with the settings of the renderer."""
        config = self._renderer.config
        options = {key: getattr(config, key) for key in type(config).template_field_names()}
        return self._refusing(
            lambda: self._tokenizer.apply_chat_template(
                _for_renderer(messages),
                tools=_listed(tools),
                add_generation_prompt=answers,
                tokenize=True,
                return_dict=False,
                **options,
            )
        )

    def _behind(
        self, prompt: Sequence[int], completion: Sequence[int], messages: Chat, tools: Chat, *, renderer: Any = None
    ) -> tuple[int, ...] | None:
        bridge = (renderer or self._renderer).bridge_to_next_turn(
            list(prompt), list(completion), _for_renderer(messages), tools=_listed(tools)
        )
        return None if bridge is None else tuple(map(int, bridge.token_ids))

    @staticmethod
    def _refusing(write: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        try:
            return tuple(map(int, write()))
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    @cached_property
    def _with_stand_ins(self) -> tuple[Any, Spelling]:
        """Return a renderer that knows the stand-ins of special tokens. The main renderer must not know them, because
        it reads completions."""
        tokenizer = self._load()
        spelling = self._special.teach(tokenizer.backend_tokenizer)
        return self._make(tokenizer), spelling

    def parse(
        self, prompt: Sequence[int], completion: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedAnswer:
        """Parse a completion. Tokens are decoded to text; no text is tokenised."""
        try:
            answer = self._renderer.parse_response(list(completion), tools=_listed(tools), prompt_ids=list(prompt))
        except (ValueError, RecursionError):  # a tool call whose JSON Python cannot read
            ended = bool(completion) and completion[-1] in self.stop_token_ids
            text = self._tokenizer.decode(list(completion)[: len(completion) - ended], skip_special_tokens=False)
            return ParsedAnswer(text, "", (), 1)
        uses, unreadable = [], []
        for call in answer.tool_calls:
            if tools and call.status == "ok" and (use := _tool_use(call.name, call.arguments)) is not None:
                uses.append(use)
            else:
                unreadable.append(call.raw)
        content = "\n".join(text for text in (answer.content, *unreadable) if text)
        return ParsedAnswer(content, answer.reasoning_content or "", tuple(uses), len(unreadable))

    def _check_template(self) -> None:
        """Raise ValueError if the renderer writes other tokens than the model's own chat template."""
        dialogues = list(differences(self._written, self._template, self._behind, self.stop_token_ids))
        kinds = list(dict.fromkeys(kind for kind, _, _ in dialogues))
        for kind, messages, where in dialogues:
            if kind not in self._differs_in:
                dialogue = ", ".join(message["role"] for message in messages)
                raise ValueError(
                    f"it writes other tokens than the model's chat template in a dialogue of {dialogue}, "
                    f"{self._told(where)}. It differs in {', '.join(kinds)}: choose the renderer of this template, or "
                    f"default, or set gateway.differs_in: [{', '.join(kinds)}] if the difference is intended"
                )

    def _told(self, where: Difference) -> str:
        written, expected = (self._tokenizer.decode(list(ids)) for ids in (where.ours, where.theirs))
        return f"from token {where.at} on: {written!r} instead of {expected!r}"


def _on_day(tokenizer: Any, day: datetime.date) -> Any:
    """Return a tokenizer whose chat template takes this day for today."""
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=day.strftime)
    return tokenizer


def _listed(tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None


def _for_renderer(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as objects, as templates expect them."""
    converted = []
    for message in messages:
        copy = dict(message)
        if calls := copy.get("tool_calls"):
            copy["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"])}}
                for call in calls
            ]
        converted.append(copy)
    return converted


def _tool_use(name: Any, arguments: Any) -> ToolUse | None:
    """Return a tool call from a renderer, if it survives a JSON round trip."""
    try:
        text = arguments if isinstance(arguments, str) and arguments else json.dumps(arguments or {})
        carried(json.dumps(name))
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolUse(name, text) if isinstance(name, str) and name and as_object(text) is not None else None


def read_arguments(text: str) -> Any:
    """Return a tool call's arguments: an object if the text is a valid JSON object, otherwise the text."""
    arguments = as_object(text)
    return text if arguments is None else arguments
