"""Keeps special tokens that are spelt out in a chat's texts from becoming control tokens.

Only the chat template may write control tokens: a tool's result that contains <|im_end|> must not end its message. In a
copy of the chat a stand-in replaces each spelt token. The tokenizer knows the stand-ins, so one token marks the place,
and is then replaced by the ordinary tokens of the spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

# Some tokenizers do not mark their own <|...|> as special.
_LOOKS_SPECIAL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)

Chat = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Spelling:
    """Maps each stand-in's id to its special token, and to the ordinary tokens that spell it; () if none do."""

    tokens: Mapping[int, tuple[str, tuple[int, ...]]]

    def spelt(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Return tokens with the stand-ins replaced by the spellings.

        Raises:
            ValueError: ordinary tokens cannot spell one. The text is for the user.
        """
        tokens: list[int] = []
        for token in ids:
            text, ordinary = self.tokens.get(token, ("", (token,)))
            if not ordinary:
                raise ValueError(f"a text has a special token that no other tokens spell: {text!r}")
            tokens += ordinary
        return tuple(tokens)


class SpecialTokens:
    """Holds the special tokens of a tokenizer: those that it marks as special, and all that look like <|name|>."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._texts = sorted(
            (token.content for token in added.values() if token.special or _LOOKS_SPECIAL.fullmatch(token.content)),
            key=len,
            reverse=True,
        )
        self._ids = {number for number, token in added.items() if token.content in set(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None

    @cached_property
    def _stand_ins(self) -> Mapping[str, str]:
        return {text: f"zs{number:07d}" for number, text in enumerate(self._texts)}

    def hidden(self, messages: Chat, tools: Chat) -> tuple[Chat, Chat] | None:
        """Return copies of messages and tools with a stand-in for each special token that they spell, in names and
        arguments too; None if they spell none."""
        texts: list[str] = []
        made = [self._replaced(message, texts) for message in messages], [self._replaced(tool, texts) for tool in tools]
        return made if texts else None

    def _replaced(self, value: Any, texts: list[str]) -> Any:
        if isinstance(value, str) and self._pattern is not None:
            spelt = self._pattern.findall(value)
            texts += spelt
            return self._pattern.sub(lambda match: self._stand_ins[match[0]], value) if spelt else value
        if isinstance(value, Mapping):
            return {
                self._replaced(name, texts): item if name == "role" else self._replaced(item, texts)
                for name, item in value.items()
            }
        return [self._replaced(item, texts) for item in value] if isinstance(value, list | tuple) else value

    def teach(self, tokenizer: Tokenizer) -> Spelling:
        """Add the stand-ins to another instance of the tokenizer."""
        words = self._stand_ins
        tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words.values()])
        tokens = {}
        for text, word in words.items():
            number = tokenizer.token_to_id(word)
            assert number is not None, "it was added"
            ids = self._ordinary(text)
            tokens[number] = text, () if self._ids.intersection(ids) else ids
        return Spelling(tokens)

    @cached_property
    def _without(self) -> Tokenizer:
        described = json.loads(self._tokenizer.to_str()) | {"added_tokens": [], "post_processor": None}
        return Tokenizer.from_str(json.dumps(described))

    def _ordinary(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text inside a longer one. Some tokenizers put a space before the very first."""
        before = self._without.encode("\n", add_special_tokens=False).ids
        ids = self._without.encode("\n" + text, add_special_tokens=False).ids
        if ids[: len(before)] == before:
            return tuple(ids[len(before) :])
        return tuple(self._without.encode(text, add_special_tokens=False).ids)
