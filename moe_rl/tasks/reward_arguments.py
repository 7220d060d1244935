"""Compares the arguments that reward functions name with the built-in ones and the columns of the prompts.

It runs before a run starts anything, so a misspelt name is found before a sampler starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_rl.errors import About, Problem, describe

if TYPE_CHECKING:  # verifier processes import this module and need no numpy
    from moe_rl.types import Prompt

BUILT_IN = ("prompt", "completion", "completion_token_ids", "finish_reason", "stop_token_id", "stop_string", "messages")
"""Arguments that exist for every prompt: fields of tasks.verifiers.RewardItem."""


@dataclass(frozen=True, slots=True)
class RewardParameters:
    """Names the parameters of a reward function. The optional ones have a default. others: it takes all columns, as
    `**kwargs`."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    others: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """Describes the columns of one source of prompts.

    Attributes:
        lacking: for each column, the id of the first prompt whose row lacks it; None if every row has it.
        other: columns that share the name of a built-in argument but not its value.
        left_out: columns left out because they hold non-JSON values.
    """

    lacking: Mapping[str, str | None]
    other: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], named: Sequence[str | None] = (), left_out: frozenset[str] = frozenset()
    ) -> Columns:
        """Read the columns of prompts. named: those that the config names as prompt and answer. They have no two
        meanings: a function gets the rendered text as `prompt`, and the answer as `answer`."""
        lacking: dict[str, str | None] = {}
        other, first = set[str](), None
        for prompt in prompts:  # once: a million prompts are decoded one by one
            for name in prompt.columns:
                lacking.setdefault(name, first)
                if name in BUILT_IN and name not in named and name not in other and _differs(prompt, name):
                    other.add(name)
            lacking |= {
                name: prompt.id for name, first_id in lacking.items() if first_id is None and name not in prompt.columns
            }
            first = first or prompt.id
        return cls(lacking, frozenset(other), left_out)

    @property
    def told(self) -> str:
        """Return the columns for a message."""
        left_out = f"; left out, as JSON has no such value: {', '.join(sorted(self.left_out))}" if self.left_out else ""
        return f"the columns {', '.join(self.lacking) or '(none)'}{left_out}"


def _differs(prompt: Prompt, name: str) -> bool:
    """Return whether the prompt's column differs from the built-in argument of the same name."""
    built_in = {"prompt": prompt.text, "messages": None if prompt.messages is None else [*map(dict, prompt.messages)]}
    return name in prompt.columns and (name not in built_in or prompt.columns[name] != built_in[name])


def argument_problems(
    rewards: Mapping[str, RewardParameters], sources: Mapping[str, Columns], advice: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Yield one message for each argument that cannot be passed or is ambiguous.

    Args:
        rewards: parameters of each reward.
        sources: columns of each source of prompts, by a name for the message.
        advice: for each reward, remedies for an argument that the rows lack. Empty if the user does not name the
            arguments: none of them can then be ambiguous.
    """
    for reward, parameters in rewards.items():
        ways = advice[reward]
        for source, columns in sources.items():
            for name in (*parameters.needed, *parameters.optional):
                where: About = {"key": f"task.rewards.{reward}", "argument": name}
                if name in columns.other and ways:
                    yield describe(
                        "a column has the name of a built-in argument but other content",
                        where=where,
                        got=f"{source} with {columns.told}",
                        do="give the column another name",
                        fault="two meanings",
                    )
                elif name in BUILT_IN or name in parameters.optional:
                    continue
                elif name not in columns.lacking:
                    yield describe(
                        "the prompts have no column of this name",
                        where=where,
                        got=f"{source} with {columns.told}",
                        expected=f"a column, or one of {', '.join(BUILT_IN)}" if ways else "such a column",
                        do=_remedy(name, source, ways),
                        fault="no column",
                    )
                elif (first := columns.lacking[name]) is not None:
                    yield describe(
                        "not every prompt has the column, or some have null there",
                        where=where,
                        got=f"{source} without it in prompt {first}",
                        do=_remedy(name, source, ways, some=True),
                        fault="no column",
                    )


def _remedy(name: str, source: str, ways: Sequence[str], *, some: bool = False) -> str:
    """Return the remedy for a missing column. some: some rows have it."""
    ways = ["add it to all rows", *ways[1:]] if some else list(ways)
    if name == "answer":
        more = (
            "leave rows without it out with drop: [missing]" if some else "dots lead into it: reward_model.ground_truth"
        )
        ways = [f"name the column that holds it with the key `answer` of {source} ({more})", *ways]
    return ", or ".join(ways) or "use the kind on prompts that have it, or write a reward function"
