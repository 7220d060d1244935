"""Turns text into token ids and back with the model's tokenizer, and chat messages into text with its template."""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moe_rl.config.prompt_sources import ChatConfig
from moe_rl.config.schema import Config
from moe_rl.errors import About, DataError
from moe_rl.models.facts import ModelFacts
from moe_rl.tasks.rows import plain_json
from moe_rl.tasks.shown_messages import shown_whole
from moe_rl.tasks.special_tokens import SpecialTokens, Spelling
from moe_rl.types import Completion

# Shown for a sampled id that is unknown to the tokenizer. Such ids exist because models pad their vocabulary.
_UNKNOWN = "\ufffd"
# Byte-level vocabularies, like GPT-2's, write a token with one letter per byte: bytes that are printable in Latin-1 as
# themselves, all others with the letters from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): bytes([byte]) for byte in _PRINTED} | {
    chr(0x100 + offset): bytes([byte]) for offset, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTED)))
}
_LETTERS = {byte[0]: letter for letter, byte in _BYTES.items()}
# A single-byte token in a character vocabulary.
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def stop_tokens(config: Config, facts: ModelFacts) -> tuple[int, ...]:
    """Return the tokens that end a completion: the model's, then those of the config."""
    return tuple(dict.fromkeys((*facts.eos_token_ids, *config.rollout.stop_token_ids)))


# Types of parts that are texts.
_TEXTS = {"text", "input_text", "output_text"}
# What all templates know.
_ROLES = {"system", "user", "assistant", "tool"}


class TextCodec:
    """Converts text to token ids and back with the tokenizer of a checkpoint. Adds no tokens and hides none."""

    def __init__(self, model_path: Path | str, stop_token_ids: Iterable[int], stop: Sequence[str] = ()):
        """Load the tokenizer of the checkpoint folder `model_path`: tokenizer.json, or else a sentencepiece or tiktoken
        file converted by `transformers`.

        Raises:
            DataError: there is no tokenizer, it lacks one of the `stop_token_ids`, or no tokens decode to one of the
                `stop` strings.
        """
        self._tokenizer = _read_tokenizer(Path(model_path))
        self._added = self._tokenizer.get_added_tokens_decoder()
        decoder = self._tokenizer.decoder
        self._names_bytes = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._known = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if unknown := [token for token in stop_token_ids if token not in self._known]:
            raise DataError(
                "a token that ends completions is not in the tokenizer",
                where={"key": "model.path", "folder": model_path},
                got=", ".join(map(str, unknown)),
                do="use the model's tokenizer, or correct rollout.stop_token_ids, or eos_token_id in config.json "
                "and generation_config.json",
            )

        for index, text in enumerate(stop):
            if text.strip() not in self.decode(self.encode(text)):
                raise DataError(
                    "no tokens of the tokenizer decode to this text, so it would never end a completion",
                    where={"key": f"rollout.stop.{index}", "folder": model_path},
                    got=repr(text),
                    expected=f"a text like {self.decode(self.encode(text))!r}",
                    do="correct it, or use the model's tokenizer",
                )

    @property
    def control_tokens(self) -> frozenset[int]:
        """Return the ids of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, added_token in added.items() if added_token.special)

    @property
    def vocabulary(self) -> int:
        """Return the tokenizer's largest id plus 1."""
        return max(self._known) + 1

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of the text, without a template or begin-of-sequence. Special tokens in the text are
        recognised.
        """
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens of the tokenizer."""
        return SpecialTokens(self._tokenizer)

    def encode_hidden(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text with stand-ins, see SpecialTokens. Raises ValueError as Spelling does."""
        taught, spelling = self._taught
        return spelling.spelt(taught.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _taught(self) -> tuple[Tokenizer, Spelling]:
        taught = Tokenizer.from_str(self._tokenizer.to_str())
        return taught, self.special_tokens.teach(taught)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of all ids. Special tokens are spelt out, and unknown ids become U+FFFD.

        A verifier must see exactly what the policy wrote. If special tokens were dropped, a completion with a special
        token inside its answer would look well-formed. The caller leaves out the stop token (see
        `Completion.text_token_ids`).
        """
        spans: list[list[int]] = [[]]
        for token in ids:
            if token in self._known:
                spans[-1].append(token)
            else:
                spans.append([])
        return _UNKNOWN.join(self._tokenizer.decode(span, skip_special_tokens=False) if span else "" for span in spans)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. Joined, they are the UTF-8 of `decode`'s text, except that a part of a
        character keeps its bytes where the text has U+FFFD."""
        pieces, text = [self._bytes(token) for token in ids], self.decode(ids)
        whole = b"".join(pieces)
        spaces = len(whole) - len(whole.lstrip(b" "))
        if spaces > len(text) - len(text.lstrip(" ")):  # some tokenizers drop a space at the start
            pieces[0] = pieces[0][1:]
        return pieces

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._added:
            return (name or _UNKNOWN).encode()
        if self._names_bytes:
            return b"".join(_BYTES.get(letter) or letter.encode() for letter in name)
        if byte := _FALLBACK.fullmatch(name):
            return bytes([int(byte[1], 16)])
        decoder = self._tokenizer.decoder  # it may drop a space at the start
        return name.encode() if decoder is None else decoder.decode(["x", name]).removeprefix("x").encode()

    def text(self, completion: Completion) -> str:
        """Return the text of a completion, without the stop token or stop string that ended it.

        Raises:
            DataError: the tokens do not decode to the stop string that the sampler found.
        """
        text, stop = self.decode(completion.text_token_ids), completion.stop_string
        if stop is None:
            return text
        # The sampler skips ids that are unknown to the tokenizer, and keeps a space at the start that some tokenizers
        # drop.
        pattern = re.compile(f"{_UNKNOWN}*".join(map(re.escape, stop)))
        if (match := pattern.search(text)) is not None:
            return text[: match.start()]
        if pattern.match(f" {text}"):
            return ""
        raise DataError(
            "the tokens of a completion do not decode to the stop string that ended it",
            where={"request": completion.key},
            got=repr(text[-200:]),
            expected=repr(stop),
            do="give sampler and trainer the same tokenizer",
        )

    def before_stop(self, completion: Completion) -> tuple[int, ...]:
        """Return the tokens of `text`, with tokens of single bytes for the text before a stop string that begins within
        a token. Raises DataError as `text` does."""
        ids = completion.text_token_ids
        if completion.stop_string is None:
            return ids
        text = self.text(completion)
        least = max(0, len(ids) - len(self.decode(ids)[len(text) :].encode()))  # each token has at least one byte
        lengths = range(len(ids) + 1)
        whole = bisect_right(lengths, len(text), least, key=lambda length: len(self.decode(ids[:length]))) - 1
        while not text.startswith(said := self.decode(ids[:whole])):
            whole -= 1  # the last of these tokens ends within a character
        return ids[:whole] + self._spelt(text.removeprefix(said))

    def _spelt(self, text: str) -> tuple[int, ...]:
        """Return tokens of a text that goes on after others: `encode` may begin it with a space."""
        names = [_LETTERS[byte] if self._names_bytes else f"<0x{byte:02X}>" for byte in text.encode()]
        ids = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        return tuple(ids) if len(ids) == len(names) else self.encode(text)


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _convert(folder)
    except DataError:
        raise
    except Exception as error:  # the libraries raise bare Exception for every fault
        raise DataError(
            "not a readable tokenizer",
            where={"key": "model.path", "folder": folder},
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fault="tokenizer",
        ) from error
    # A tokenizer.json may enable either; both would silently change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _convert(folder: Path) -> Tokenizer:
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in json.loads(settings.read_bytes()):
        raise DataError(
            "this tokenizer needs its own Python code, which is never run",
            where={"key": "model.path", "folder": folder},
            got="auto_map in tokenizer_config.json, and no tokenizer.json",
            do=f"make a tokenizer.json once: moe-rl export --tokenizer {folder} --out tokenizer (--help says more)",
            fault="tokenizer code",
        )
    return transformers_tokenizer(folder).backend_tokenizer


def transformers_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a checkpoint folder with `transformers`."""
    from transformers import AutoTokenizer  # imported late: this takes seconds, and most runs do not need it

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


class ChatTemplate:
    """Renders chat messages with the model's own template."""

    def __init__(self, model_path: Path | str, chat: ChatConfig | None, day: datetime.date | None = None):
        """Load the template of the checkpoint folder `model_path`.

        Args:
            chat: the settings `task.chat`.
            day: what the template takes for today; None: today.

        Raises:
            DataError: the model has no template, or the template ignores one of the settings.
        """
        self._chat = chat or ChatConfig()
        self._today = {} if day is None else {"strftime_now": day.strftime}
        where: About = {"key": "task.chat", "folder": model_path}
        try:
            self._tokenizer = transformers_tokenizer(Path(model_path))
            self._template = template = self._tokenizer.get_chat_template(tools=list(self._chat.tools) or None)
        except Exception as error:  # the library raises arbitrary exceptions
            raise DataError(
                "the model has no usable chat template, but a prompt is a chat",
                where=where,
                got=str(error).partition("\n")[0],
                do="put the template into chat_template.jinja in the folder, or give prompts as text",
                fault="no template",
            ) from error
        unused = [name for name in self._chat.template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]
        if unused or (self._chat.tools and not re.search(r"\btools\b", template)):
            raise DataError(
                "the model's chat template does not use a setting",
                where={**where, "key": "task.chat.template_kwargs" if unused else "task.chat.tools"},
                got=", ".join(unused) if unused else f"{len(self._chat.tools)} tools",
                do="remove it, or correct its name",
                fault="unused",
            )

    def messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return the messages of a prompt: the system message of the settings, and the prompt's own.

        Raises:
            ValueError: a model cannot answer the prompt as a chat. The text is for the user.
        """
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_message(item) for item in prompt]
        for role in {message["role"] for message in chat} - _ROLES:
            if not role or not re.search(rf"['\"]{re.escape(role)}['\"]", self._template):
                raise ValueError(
                    f"the chat template knows no such role; rename it to one of {sorted(_ROLES)}: {role!r}"
                )
        if not chat:
            raise ValueError("the prompt has no message")
        if chat[-1]["role"] == "assistant":
            raise ValueError("the last message is the assistant's, so there is nothing to answer")
        if self._chat.system is None:
            return tuple(chat)
        if chat[0]["role"] == "system":
            raise ValueError("the prompt has its own system message, but task.chat.system sets another")
        return ({"role": "system", "content": self._chat.system}, *chat)

    def history(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of messages without the beginning of an answer, with the settings' system message and tools.
        The template may raise."""
        system = () if self._chat.system is None else ({"role": "system", "content": self._chat.system},)
        return self._applied((*system, *messages), self._chat.tools, answers=False)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text that the model continues with its answer. tools: the prompt's tools; () for those of the
        settings.

        Raises:
            NotShown: the text does not show a part of the messages or the tools.
            ValueError: the template refuses the messages, or the settings set other tools. The text is for the user.
        """
        return shown_whole(messages, self._tools(tools), self._text)[1]

    def tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], codec: TextCodec
    ) -> tuple[str, tuple[int, ...], bool]:
        """Return the text from `render`, its tokens, and whether messages or tools spell special tokens.

        Spelt special tokens become ordinary text tokens. Only the template's own are control tokens.

        Raises:
            ValueError: see `render`.
        """
        offered = self._tools(tools)
        spelt, text = shown_whole(messages, offered, self._text)
        hidden = codec.special_tokens.hidden(spelt, offered)
        if hidden is None:
            return text, codec.encode(text), False
        return text, codec.encode_hidden(self._text(*hidden)), True

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the tools of a prompt: its own, or those of the settings."""
        if tools and self._chat.tools:
            raise ValueError("the row has its own tools, but task.chat.tools sets others")
        if tools and not re.search(r"\btools\b", self._tokenizer.get_chat_template(tools=list(tools))):
            raise ValueError(
                "the model's chat template shows no tools, but the row has some; set tools=null in the source to "
                f"train without them: {len(tools)} tools"
            )
        return tools or self._chat.tools

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._applied(messages, tools, answers=True)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _applied(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, answers: bool
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=answers,
            **self._today,
            **self._chat.template_kwargs,
        )
        return text


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        got = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise ValueError(f"a message is not an object with a role and a content; rename or convert its keys: {got}")
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if not all(map(_is_text, parts)):
        raise ValueError("a message holds something other than text")
    calls = _calls(message.get("tool_calls"))
    if not isinstance(content, str | list) and not calls:
        raise ValueError(f"a message has no content that is a text: {', '.join(message)}")
    # Many templates would print parts as a list in Python.
    flat = {"content": "".join(part["text"] for part in parts)} if isinstance(content, list) else {}
    made = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**made, **flat, **({"tool_calls": calls} if calls else {})}


def _is_text(part: Any) -> bool:
    """Return whether a part of a message is a text and nothing else."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    more = {name for name, value in part.items() if value not in (None, "", [], {})} - {"type", "text", "cache_control"}
    return part.get("type", "text") in _TEXTS and not more


def _calls(stored: Any) -> list[Any]:
    """Return the tool calls of a message, which may be stored as JSON text, the whole list or each call. A call without
    arguments has none.

    Raises:
        ValueError: they are something else. The text is for the user.
    """
    if not stored or stored == "null":
        return []
    try:
        value = plain_json(stored) if isinstance(stored, str) else stored
        calls = [plain_json(call) if isinstance(call, str) else call for call in value or ()]
        return [_call(call) for call in calls]
    except (ValueError, TypeError) as error:
        text = "the tool_calls of a message are not a list of calls with a name and arguments, nor JSON text of one"
        raise ValueError(f"{text}: {str(stored)[:60]!r}") from error


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call. Raises TypeError if it is something else."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise TypeError
    if (arguments := inner.get("arguments")) is not None and str(arguments).strip():
        return dict(call)
    if "parameters" in inner or "input" in inner:
        raise TypeError
    made = {**inner, "arguments": {}}
    return {**call, "function": made} if "function" in call else made
