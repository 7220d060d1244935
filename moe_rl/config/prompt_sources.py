"""Defines where prompts come from: the lists `task.train` and `task.heldout`, and the chat template's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moe_rl.config.section import Count, Few, Positive, Section, Share, possible
from moe_rl.errors import Problem, describe
from moe_rl.shipped import find

Kind = Literal["jsonl", "parquet", "generator", "dataset"]
GENERATOR = "reasoning_gym:"
# A name on the Hugging Face hub: one or two parts.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _location(text: str) -> str:
    if not text:
        raise PydanticCustomError("location", "a file, folder, data set or generator")
    path = possible(Path(text))
    return text if find(path) == path else str(find(path))


class PromptSourceConfig(Section):
    """Names one set of prompts and the meaning of its columns. A reward function may name any column.

    A column's name may have dots: it then leads into an object, a list (by a number from 0) or JSON text.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the source in ids, messages and metrics: letters, digits, dots, dashes and underscores."""
    data: Annotated[str, AfterValidator(_location)]
    """FILE.jsonl, with one JSON object per line; FILE.parquet; a folder or the hub name of a data set that the library
    `datasets` loads; or `reasoning_gym:TASK`, a generator of endless tasks."""
    prompt: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages {role, content}, which may be stored as JSON text."""
    tools: str | None = "tools"
    """Column with the tools that the template shows with the row's prompt: a list of JSON schemas, which may be stored
    as JSON text. A row without tools uses those of task.chat. null: none."""
    id: str | None = None
    """Column with a name that no other row of the source has. null: the number of the row, from 0."""
    answer: str | None = None
    """Column with the right answer, such as reward_model.ground_truth: rewards get its value as the argument `answer`.
    null: the column `answer`."""
    level: str | None = None
    """Column with a difficulty class; the evaluation logs pass rates for each class. null: none."""
    drop: tuple[Literal["too_long", "empty", "duplicate", "missing"], ...] = ()
    """Rows to leave out and count, instead of refusing the source. too_long: the prompt has more than
    rollout.max_prompt_tokens; a generator needs this. empty: the prompt has no text. duplicate: an earlier row has the
    same id. missing: a column that the config names is absent or null."""
    split: str | None = None
    """Split of a data set, such as train. Only for `datasets`."""
    config: str | None = None
    """Configuration of a data set that has several, such as main. Only for `datasets`."""
    options: dict[str, Any] = {}
    """The generator's own settings, such as {max_terms: 4}. Only for a generator."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of a generator, which needs one. Two seeds give different tasks."""

    @property
    def kind(self) -> Kind:
        """Return what reads `data`."""
        if self.data.startswith(GENERATOR):
            return "generator"
        kinds: dict[str, Kind] = {".jsonl": "jsonl", ".parquet": "parquet"}
        return kinds.get(Path(self.data).suffix, "dataset")

    @property
    def may_be_on_the_hub(self) -> bool:
        """Return whether `data` is not a folder here, but could be the name of a data set."""
        return self.kind == "dataset" and not Path(self.data).is_dir() and bool(_HUB_NAME.fullmatch(self.data))


class TrainSourceConfig(PromptSourceConfig):
    """Names one set of training prompts, its columns and its share."""

    weight: Positive = 1.0
    """Share of this source in the prompts, relative to the weights of the other sources."""


class HeldoutSourceConfig(PromptSourceConfig):
    """Names one set of held-out prompts and its columns, and says how it is evaluated."""

    prompts: Count | None = None
    """Number of prompts of this set that each evaluation uses, always the same ones. null: `eval.prompts`."""
    samples: Few = 1
    """Number of completions that are sampled for each prompt. A prompt's pass rate is the mean over them."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    """Temperature of these samples; 0 takes the likeliest token. null: `rollout.temperature`."""
    top_p: Share | None = None
    """Sample from the smallest set of tokens that together have this probability. null: `rollout.top_p`."""
    greedy: bool = True
    """Whether each prompt is also completed at temperature 0, for eval/pass_rate_greedy."""
    pass_at: tuple[Few, ...] = ()
    """Numbers k of samples, at most `samples`, for which the evaluation estimates pass@k: the probability that at least
    one of k samples passes."""


class ChatConfig(Section):
    """Sets how the model's own chat template turns messages into a prompt."""

    system: str | None = None
    """System message put before the messages of every prompt. null: none."""
    template_kwargs: dict[str, Any] = {}
    """Variables for the template, such as {enable_thinking: false}. The template must use each."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that the template shows to the model. Rows may have their own."""


def source_problems(key: str, sources: Sequence[PromptSourceConfig], *, limited: bool) -> Iterator[Problem]:
    """Yield the problems between the keys of the sources of `task.train` or `task.heldout`, called `key`.

    limited: whether a prompt may be too long, as those of environments may not.
    """
    if not sources:
        yield describe("there is no source of prompts", where={"key": key}, do="give at least one")
    names = [source.name for source in sources]
    for index, source in enumerate(sources):
        if source.name in names[:index]:
            yield describe("another source has this name", where={"key": f"{key}.{index}.name"}, got=source.name)
        keys = {name for name in ("split", "config", "options", "seed") if getattr(source, name) not in (None, {})}
        wanted = {"generator": {"options", "seed"}, "dataset": {"split", "config"}}.get(source.kind, set())
        for name in sorted(keys - wanted):
            yield describe(
                "this kind of source does not take it",
                where={"key": f"{key}.{index}.{name}", "given": f"data is {source.data}"},
                got=getattr(source, name),
                do="remove it",
            )
        if source.kind == "generator" and source.seed is None:
            yield describe("a generator needs a seed", where={"key": f"{key}.{index}.seed"}, do="give a whole number")
        if source.kind == "generator" and limited and "too_long" not in source.drop:
            yield describe(
                "only some prompts of a generator are made before the run starts, and a later one that is longer than "
                "rollout.max_prompt_tokens would end the run",
                where={"key": f"{key}.{index}.drop"},
                got=f"[{', '.join(source.drop)}]",
                expected="too_long in it",
                do="add it: the generator then makes another prompt instead",
            )


def heldout_problems(sources: Sequence[HeldoutSourceConfig]) -> Iterator[Problem]:
    """Yield the problems of how the sources of `task.heldout` are evaluated."""
    for index, source in enumerate(sources):
        key = f"task.heldout.{index}"
        if source.temperature is not None and 0 < source.temperature < 0.01:
            yield describe(
                "vLLM would use 0.01 for a lower temperature",
                where={"key": f"{key}.temperature"},
                got=source.temperature,
                expected="0, or at least 0.01",
            )
        if source.temperature == 0:
            for name, value, unset in (("samples", source.samples, 1), ("top_p", source.top_p, None)):
                if value != unset:
                    yield describe(
                        "at temperature 0 all samples of a prompt are equal",
                        where={"key": f"{key}.{name}", "given": f"{key}.temperature is 0"},
                        got=value,
                        do="remove it, or raise the temperature",
                    )
        if wrong := [k for n, k in enumerate(source.pass_at) if k > source.samples or k in source.pass_at[:n]]:
            yield describe(
                "pass@k needs k samples of each prompt, and each k once",
                where={"key": f"{key}.pass_at"},
                got=", ".join(map(str, wrong)),
                expected=f"different numbers of at most {key}.samples = {source.samples}",
            )
