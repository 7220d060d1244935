"""Reads prompt files, turns text into token ids and back, and orders prompts as a pure function of a cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from moe_rl.errors import DataError, Problem, describe
from moe_rl.types import Prompt

_FIELDS = ("id", "prompt", "answer", "level")
_MAX_PROBLEMS = 20
# Shown for a sampled id that the tokenizer does not know. Such ids exist because models pad their vocabulary.
_UNKNOWN = "\ufffd"


def _read_tokenizer(file: Path | str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every fault
        raise DataError(
            describe("not a readable tokenizer", where={"file": file}, got=error, fault="tokenizer")
        ) from error
    # A tokenizer.json may carry either; both would change prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


class TextCodec:
    """Converts text to token ids and back with a Hugging Face tokenizer.json. Adds no tokens and hides none."""

    def __init__(self, tokenizer_file: Path | str, stop_token_ids: Iterable[int]):
        """Load the tokenizer.

        Raises:
            DataError: the file is no tokenizer, or does not know one of the model's `stop_token_ids`.
        """
        self._tokenizer = _read_tokenizer(tokenizer_file)
        self._known = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if unknown := [token for token in stop_token_ids if token not in self._known]:
            raise DataError(
                describe(
                    "a token that ends completions is not in the tokenizer",
                    where={"file": tokenizer_file},
                    got=", ".join(map(str, unknown)),
                    do="use the model's tokenizer, or correct eos_token_id in config.json and generation_config.json",
                )
            )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of the text, without a template or begin-of-sequence. Special tokens in the text are
        recognised.
        """
        return _encode(self._tokenizer, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of all ids. Special tokens are spelt out, and unknown ids become U+FFFD.

        A verifier must see exactly what the policy wrote. If special tokens were dropped, a completion with one inside
        its answer would look well-formed. The caller leaves out the stop token (see `Completion.text_token_ids`).
        """
        spans: list[list[int]] = [[]]
        for token in ids:
            if token in self._known:
                spans[-1].append(token)
            else:
                spans.append([])
        return _UNKNOWN.join(self._tokenizer.decode(span, skip_special_tokens=False) if span else "" for span in spans)


def load_prompts(path: Path | str, tokenizer_file: Path | str, *, max_prompt_tokens: int) -> list[Prompt]:
    """Read a JSONL file of prompts. Each line is an object with exactly the strings id, prompt, answer and level.

    Prompts are tokenised with `TextCodec.encode`.

    Raises:
        DataError: naming file and line of every problem, up to 20.
    """
    path = Path(path)
    tokenizer = _read_tokenizer(tokenizer_file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            describe("cannot read the prompts", where={"file": path}, got=error.strerror, fault="unreadable")
        ) from error
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    line_of: dict[str, int] = {}
    # splitlines() would also split at U+2028 and similar characters, which JSON strings may contain.
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse(line)
            if record["id"] in line_of:
                raise ValueError(f"duplicate id {record['id']!r}, first on line {line_of[record['id']]}")
            line_of[record["id"]] = number
            token_ids = _encode(tokenizer, record["prompt"])
            if not 0 < len(token_ids) <= max_prompt_tokens:
                raise ValueError(
                    f"prompt of {len(token_ids)} tokens, expected 1 to rollout.max_prompt_tokens = {max_prompt_tokens}"
                )
        except ValueError as error:
            problems.append(describe(str(error), where={"file": path, "line": number}))
        else:
            prompts.append(Prompt(record["id"], record["prompt"], token_ids, record, level=record["level"]))
    if problems:
        rest = len(problems) - _MAX_PROBLEMS
        raise DataError(problems[:_MAX_PROBLEMS] + ([f"{path}: and {rest} more"] if rest > 0 else []))
    if not prompts:
        raise DataError(
            describe(
                "no prompts",
                where={"file": path},
                got="an empty file",
                expected="one JSON object a line",
                fault="empty",
            )
        )
    return prompts


def _parse(line: bytes) -> dict[str, str]:
    """Parse one line. Raises ValueError with a message for the user."""
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not an object: got {type(record).__name__}")
    missing = [name for name in _FIELDS if name not in record]
    unknown = [name for name in record if name not in _FIELDS]
    if missing or unknown:
        wrong = [f"lacks {name}" for name in missing] + [f"has unknown {name!r}" for name in unknown]
        raise ValueError(f"{', '.join(wrong)}: expected exactly {', '.join(_FIELDS)}")
    for name, value in record.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a string: got {type(value).__name__}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name} contains half of a surrogate pair, which is not valid text")
    if not record["id"]:
        raise ValueError("id is empty")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key occurs twice")
    return record


class PromptSource:
    """Yields prompts in an endless order. Every epoch is a new permutation, so no prompt repeats within an epoch.

    The order is a pure function of (prompts, seed, position). `cursor`, the number of prompts taken, is the whole
    state. A run that seeks to a stored cursor continues exactly where it was.
    """

    def __init__(self, prompts: list[Prompt], seed: int):
        if not prompts:
            raise DataError("a prompt source needs at least one prompt")
        self._prompts = list(prompts)
        self._seed = seed
        self._cursor = 0
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    @property
    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        if cursor < 0:
            raise ValueError(
                describe("counts prompts taken", where={"argument": "cursor"}, got=cursor, expected="0 or more")
            )
        self._cursor = cursor

    def take(self, count: int) -> list[Prompt]:
        """Take the next `count` prompts, possibly from two epochs."""
        prompts = self.peek(self._cursor, count)
        self._cursor += count
        return prompts

    def peek(self, cursor: int, count: int) -> list[Prompt]:
        """Return the `count` prompts at `cursor` without taking them."""
        if cursor < 0 or count < 0:
            raise ValueError(describe("no such prompts", got=f"cursor {cursor}, count {count}", expected="0 or more"))
        return [self._at(position) for position in range(cursor, cursor + count)]

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            # This sorts raw words of the bit generator instead of calling Generator.permutation. A resumed run needs
            # the same order, and numpy guarantees the streams of Philox and SeedSequence, but not the methods of
            # Generator.
            seed = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
            words = np.random.Philox(seed).random_raw(len(self._prompts))
            self._order, self._epoch = np.argsort(words, kind="stable"), epoch
        return self._prompts[self._order[place]]
