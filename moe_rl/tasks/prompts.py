"""Makes the prompts of a task from the rows of its sources, and orders them as a pure function of a cursor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from moe_rl.config.check_files import number_problems
from moe_rl.config.prompt_sources import ChatConfig, HeldoutSourceConfig, PromptSourceConfig, TrainSourceConfig
from moe_rl.config.schema import Config
from moe_rl.errors import About, DataError, DiskError, Problem, describe, first_of
from moe_rl.tasks.chat_columns import listed_tools, refuse_unread, says_nothing, stored_messages
from moe_rl.tasks.prompt_file import PromptFile, PromptWriter
from moe_rl.tasks.reward_arguments import Columns
from moe_rl.tasks.rows import open_generator, read_rows, value_at
from moe_rl.tasks.tokenizer import ChatTemplate, TextCodec
from moe_rl.types import Prompt

# How many items of a generator are made and checked before a run starts.
_TRIED = 64
# How often a left-out item of a generator may be redrawn.
_REDRAWS = 64


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Holds the prompts of one source.

    Attributes:
        prompts: all prompts of a finite source; the first ones of an endless source.
        make: makes prompt n of an endless source; None for a finite one.
        named: the columns of the prompts and of the answers.
        weight: relative share of the set in a run's prompts.
        left_out: columns without a JSON value.
        notes: notes for the user, such as how many rows were left out.
    """

    name: str
    prompts: Sequence[Prompt] = ()
    make: Callable[[int], Prompt] | None = None
    named: tuple[str | None, ...] = ()
    weight: float = 1.0
    left_out: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int | None:
        """Return the number of prompts; None for an endless source."""
        return None if self.make is not None else len(self.prompts)

    def item(self, n: int) -> Prompt:
        """Return prompt n of the source, in the source's own order."""
        return self.make(n) if self.make is not None else self.prompts[n]


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """Holds all prompts of a task, and the tokenizer that made them. told: findings from trying out the rewards."""

    codec: TextCodec
    train: tuple[PromptSet, ...]
    heldout: tuple[PromptSet, ...]
    told: tuple[str, ...] = ()

    @property
    def count(self) -> int | None:
        """Return the number of training prompts; None if a source is endless."""
        counts = [prompt_set.count for prompt_set in self.train]
        return None if None in counts else sum(count or 0 for count in counts)

    def _sets(self) -> Iterator[tuple[str, PromptSet]]:
        """Yield each set of prompts together with its config key."""
        yield from (("task.train", prompt_set) for prompt_set in self.train)
        yield from (("task.heldout", prompt_set) for prompt_set in self.heldout)

    def columns(self) -> dict[str, Columns]:
        """Return the columns of each source; for an endless source those of its first items."""
        return {
            f"source {prompt_set.name} of {key}": Columns.of(prompt_set.prompts, prompt_set.named, prompt_set.left_out)
            for key, prompt_set in self._sets()
        }

    @property
    def has_chats(self) -> bool:
        """Return whether a prompt went through the model's chat template."""
        return any(prompt.messages is not None for _, prompt_set in self._sets() for prompt in prompt_set.prompts)

    def first(self, each: int) -> list[Prompt]:
        """Return the first `each` prompts of every set."""
        return [prompt for _, prompt_set in self._sets() for prompt in prompt_set.prompts[:each]]

    def notes(self) -> list[str]:
        """Return a line about each source, then the other notes."""
        sources = [
            f"{key} {prompt_set.name}: " + "; ".join([f"{prompt_set.count or 'endless'} prompts", *prompt_set.notes])
            for key, prompt_set in self._sets()
        ]
        return [*sources, *self.told]

    def evaluated(self, config: Config) -> list[tuple[HeldoutSourceConfig, Prompt]]:
        """Return the prompts that every evaluation uses, each with its source, chosen by the seed of the run."""
        chosen = []
        for source, prompt_set in zip(config.task.heldout, self.heldout, strict=True):
            count, limit = prompt_set.count, config.eval.prompts if source.prompts is None else source.prompts
            order = range(limit) if count is None else np.random.default_rng(config.run.seed).permutation(count)[:limit]
            chosen += [(source, prompt_set.item(index)) for index in order]
        return chosen


def load_task(config: Config, codec: TextCodec) -> TaskPrompts:
    """Read all sources of a task and tokenise their prompts.

    Raises:
        DataError: with every problem; equal problems of a source are merged, with their count.
    """
    maker, problems, sets = _PromptMaker(config, codec), list[Problem](), dict[str, list[PromptSet]]()
    for key, sources in (("train", config.task.train), ("heldout", config.task.heldout)):
        sets[key] = []
        for index, source in enumerate(sources):
            try:
                sets[key].append(maker.read(source, f"task.{key}.{index}"))
            except DataError as error:
                problems += error.problems
    if problems:
        raise DataError(list(dict.fromkeys(problems)))
    task = TaskPrompts(codec, tuple(sets["train"]), tuple(sets["heldout"]))
    if problems := list(number_problems(config, task.count, [prompt_set.count for prompt_set in task.heldout])):
        raise DataError(problems)
    return task


class _Unfit(ValueError):
    """Explains why a row is not a prompt. kind: its name in `drop`; "" if it cannot be left out."""

    def __init__(self, what: str, got: object = None, *, kind: str = "", expected: object = None):
        super().__init__(what)
        self.what, self.got, self.expected, self.kind = what, got, expected, kind

    def problem(self, where: About, correct: str, others: str = "") -> Problem:
        """Return the message.

        Args:
            correct: advice for a row that could also be left out.
            others: text about how many more rows have this fault.
        """
        do = f"{correct}, or leave such rows out with drop: [{self.kind}]" if self.kind else ""
        do += ". " if do and others else ""
        return describe(
            self.what, where=where, got=self.got, expected=self.expected, do=do + others, fault=self.kind or "row"
        )


def _unfit(error: ValueError) -> _Unfit:
    what, _, got = str(error).partition(": ")
    return _Unfit(what, got or None)


@dataclass
class _Faults:
    """Collects the faults of a source's rows: one message per kind, with the number of rows."""

    found: dict[str, tuple[_Unfit, list[About]]] = field(default_factory=dict)

    def add(self, fault: _Unfit, where: About) -> None:
        self.found.setdefault(fault.what, (fault, []))[1].append(where)

    def problems(self) -> Iterator[Problem]:
        for fault, places in self.found.values():
            rest = [_position(place) for place in places[1:]]
            others = f"{len(rest)} more have this fault: {first_of(rest, separator=', ')}" if rest else ""
            yield fault.problem(places[0], "correct it", others)


def _position(where: About) -> str:
    return f"line {where['line']}" if "line" in where else f"row {where['row']}"


class _PromptMaker:
    """Makes prompts from rows with one tokenizer, one chat template and one limit."""

    def __init__(self, config: Config, codec: TextCodec):
        self._config, self._codec = config, codec
        self._limit = config.rollout.max_prompt_tokens
        self._spelling = 0

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._config.model.path, self._config.task.chat, self._config.run.date)

    def read(self, source: PromptSourceConfig, key: str) -> PromptSet:
        """Read one source. key: the source's config key, for messages. Raises DataError with every problem."""
        weight = source.weight if isinstance(source, TrainSourceConfig) else 1.0
        if source.kind == "generator":
            return self._endless(source, key, weight)
        if (file := PromptFile.of(source, self._config)) is None:
            return self._finite(source, key, weight, [])
        if (kept := file.read()) is not None:
            prompts, kept_notes = kept
            left_out, notes = frozenset(kept_notes["left_out"]), tuple(kept_notes["notes"])
            return PromptSet(source.name, prompts, None, (source.prompt, source.answer), weight, left_out, notes)
        try:
            with closing(PromptWriter(file)) as writer:
                return self._finite(source, key, weight, writer)
        except DiskError as error:
            read = self._finite(source, key, weight, [])
            return replace(read, notes=(*read.notes, f"read again at each start: {error}"))

    def _finite(
        self, source: PromptSourceConfig, key: str, weight: float, prompts: list[Prompt] | PromptWriter
    ) -> PromptSet:
        """Read all rows of a source. prompts: takes the prompts."""
        self._spelling, count = 0, 0
        faults, dropped, left_out, first = _Faults(), Counter[str](), set[str](), dict[str, str]()
        for number, (where, row) in enumerate(read_rows(source, key, left_out)):
            try:
                if isinstance(row, ValueError):
                    raise _unfit(row)
                prompt = self._prompt(source, row, number, left_out)
                place = _position(where)
                if (earlier := first.setdefault(prompt.id, place)) != place:
                    got = f"{value_at(row, source.id or '')!r}, as {earlier} has"
                    raise _Unfit("an earlier row has the same id", got, kind="duplicate")
                prompts.append(prompt)
                count += 1
            except _Unfit as fault:
                if fault.kind in source.drop:
                    dropped[fault.kind] += 1
                else:
                    faults.add(fault, where)
        if faults.found:
            raise DataError(list(faults.problems()))
        if not count:
            got = f"{dropped.total()} rows, all left out" if dropped else "no row"
            raise DataError("no prompts", where={"key": key, "file": source.data}, got=got, fault="empty")
        notes = [f"left out {count} {kind.replace('_', ' ')}" for kind, count in sorted(dropped.items())]
        notes += [f"columns without a JSON value, left out: {', '.join(sorted(left_out))}"] if left_out else []
        notes += [f"{self._spelling} spell special tokens, which count as text there"] if self._spelling else []
        if isinstance(prompts, PromptWriter):
            notes += [f"kept for the next start in {source.data}.{source.name}.prompts"]
            finished: Sequence[Prompt] = prompts.finish({"left_out": sorted(left_out), "notes": notes})
        else:
            finished = prompts
        named = (source.prompt, source.answer)
        return PromptSet(source.name, finished, None, named, weight, frozenset(left_out), tuple(notes))

    def _endless(self, source: PromptSourceConfig, key: str, weight: float) -> PromptSet:
        item = open_generator(source, key)
        places = 1 << 24  # number of prompts after which redrawn items would collide with others

        def make(n: int) -> Prompt:
            """Make prompt n. A left-out item is replaced by one from a place that no other prompt uses."""
            for draw in range(_REDRAWS):
                try:
                    return self._prompt(source, item(n + draw * places), n)
                except _Unfit as fault:
                    if fault.kind not in source.drop:
                        raise DataError(fault.problem({"key": key, "row": n}, "make the task easier")) from fault
            raise DataError(
                f"{_REDRAWS} items in a row are left out",
                where={"key": key, "row": n},
                got=f"drop: {', '.join(source.drop)}",
                do="make the task easier with options, or raise rollout.max_prompt_tokens",
                fault="redraws",
            )

        return PromptSet(source.name, [make(n) for n in range(_TRIED)], make, (source.prompt, source.answer), weight)

    def _prompt(
        self, source: PromptSourceConfig, row: dict[str, Any], number: int, left_out: Collection[str] = ()
    ) -> Prompt:
        """Return the prompt of a row. left_out: columns without a JSON value. Raises _Unfit."""
        plays = self._config.task.environment is not None
        values = {name: value_at(row, name) for name in self._named(source)}
        for column, value in values.items():
            if value is None:
                lacks = f"the row lacks the column {column}, or has null or no JSON value there"
                got = f"only {', '.join(row)}" if row else "no column"
                raise _Unfit(lacks, got, kind="missing")
        if source.answer is not None:
            row = row | {"answer": values[source.answer]}
        text, token_ids, messages = self._row_text(row) if plays else self._tokenised(source, row, left_out)
        return Prompt(
            id=f"{source.name}/{number if source.id is None else _id(source.id, values[source.id])}",
            text=text,
            token_ids=token_ids,
            columns=row,
            messages=messages,
            level=None if source.level is None else _level(source.level, values[source.level]),
        )

    def _named(self, source: PromptSourceConfig) -> list[str]:
        """Return the columns that a source names, which every row needs."""
        prompt = None if self._config.task.environment is not None else source.prompt
        return [name for name in (prompt, source.id, source.level, source.answer) if name is not None]

    def _row_text(self, row: dict[str, Any]) -> tuple[str, tuple[int, ...], None]:
        """Return an environment's row as JSON, with its first tokens. These never become a sampler's prompt."""
        text = json.dumps(row, ensure_ascii=False)
        return text, self._codec.encode(text)[: self._limit], None

    def _tokenised(
        self, source: PromptSourceConfig, row: dict[str, Any], left_out: Collection[str]
    ) -> tuple[str, tuple[int, ...], tuple[Mapping[str, Any], ...] | None]:
        """Return the sampler's input for a row: text, tokens, and the chat that it was rendered from, if any."""
        given = value_at(row, source.prompt)
        if not isinstance(given, str | list):
            raise _Unfit(
                f"the column {source.prompt} is not a prompt", type(given).__name__, expected="text or messages"
            )
        messages = None
        try:
            given, tools = stored_messages(given), [] if source.tools is None else listed_tools(row, source.tools)
            if says_nothing(given):
                raise _Unfit("the prompt is empty", "no text" if given else "0 tokens", kind="empty")
            chat = self._config.task.chat
            unknown = source.tools == "tools" and not tools
            refuse_unread(row, source.prompt, given, chat or ChatConfig(), tools_unknown=unknown, left_out=left_out)
            if isinstance(given, list) or chat is not None:
                messages = self._template.messages(given)
                text, token_ids, spells = self._template.tokens(messages, tools, self._codec)
                self._spelling += int(spells)
            elif tools:
                raise _Unfit(
                    f"the column {source.tools} has tools, but a plain text prompt does not use the template",
                    f"{len(tools)} tools",
                    expected=f"the section task.chat, or tools=null in source {source.name}",
                )
            else:
                text, token_ids = given, self._codec.encode(given)
        except (_Unfit, DataError):
            raise
        except ValueError as error:
            raise _unfit(error) from error
        if len(token_ids) > self._limit:
            raise _Unfit(
                "the prompt is longer than rollout.max_prompt_tokens",
                f"{len(token_ids)} tokens",
                expected=f"at most {self._limit}",
                kind="too_long",
            )
        return text, token_ids, messages


def _level(column: str, value: Any) -> str:
    if isinstance(value, list | dict):
        raise _Unfit(f"the column {column} is not a level", type(value).__name__, expected="text or a number")
    if value == "":
        raise _Unfit(f"the column {column} is empty", kind="missing")
    return str(value)


def _id(column: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Unfit(f"the column {column} is not an id", type(value).__name__, expected="text or a whole number")
    if value == "":
        raise _Unfit(f"the column {column} is empty", kind="missing")
    return str(value)


class PromptSource:
    """Yields the prompts of several sets in an endless order.

    Every stretch of prompts mixes the sets in proportion to their weights. Each finite set has its own epochs, and
    every epoch is a new permutation, so no prompt repeats within an epoch. An endless set yields its items in order.

    The order is a pure function of (sets, weights, seed, cursor). A prompt's cursor is its place in this order.
    """

    def __init__(self, sets: Sequence[PromptSet], seed: int):
        if not sets or any(prompt_set.count == 0 for prompt_set in sets):
            raise DataError("a prompt source needs at least one prompt of each set")
        self._sets = tuple(sets)
        weights = [Fraction(prompt_set.weight) for prompt_set in sets]
        self._shares = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._epochs = [-1] * len(sets)
        self._orders = [np.empty(0, np.int64)] * len(sets)

    def at(self, cursor: int, count: int) -> list[Prompt]:
        """Return the `count` prompts from `cursor` on, possibly from two epochs."""
        if cursor < 0 or count < 0:
            raise ValueError(describe("no such prompts", got=f"cursor {cursor}, count {count}", expected="0 or more"))
        taken, prompts = self._taken(cursor), []
        for _ in range(count):
            index = self._next(taken)
            prompts.append(self._item(index, taken[index]))
            taken[index] += 1
        return prompts

    def _taken(self, cursor: int) -> list[int]:
        """Return how many of the first `cursor` prompts are from each set.

        Prompt n of a set with share s is due at position (n + 1/2) / s, so by a position, position * s + 1/2 of its
        prompts, rounded down, are due. Summed over all sets, this differs from the position by less than half a prompt
        per set. The count starts one prompt per set earlier and steps through the last few one by one.
        """
        start = max(0, cursor - len(self._sets))
        taken = [int(start * share + Fraction(1, 2)) for share in self._shares]
        while sum(taken) < cursor:
            taken[self._next(taken)] += 1
        return taken

    def _next(self, taken: list[int]) -> int:
        """Return the number of the set whose next prompt is due first. Ties go to the first set."""
        if len(taken) == 1:
            return 0
        return min(range(len(taken)), key=lambda index: ((2 * taken[index] + 1) / self._shares[index], index))

    def _item(self, index: int, number: int) -> Prompt:
        prompt_set = self._sets[index]
        if prompt_set.count is None:
            return prompt_set.item(number)
        epoch, place = divmod(number, len(prompt_set.prompts))
        if epoch != self._epochs[index]:
            # This sorts raw words of the bit generator instead of calling Generator.permutation. A resumed run needs
            # the same order, and numpy guarantees the streams of Philox and SeedSequence but not of Generator's
            # methods.
            seed = np.random.SeedSequence(self._seed, spawn_key=(epoch, index) if index else (epoch,))
            words = np.random.Philox(seed).random_raw(len(prompt_set.prompts))
            self._orders[index], self._epochs[index] = np.argsort(words, kind="stable"), epoch
        return prompt_set.item(self._orders[index][place])
