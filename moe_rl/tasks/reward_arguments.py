"""Compares the arguments that reward functions name with those that exist: built-in ones, and columns of the prompts.

It runs before a run starts anything, so a misspelt name never costs the start of a sampler.
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
    """Names the parameters of a reward function. The optional ones have a default."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Columns:
    """Describes the columns of one source of prompts.

    Attributes:
        lacking: for each column, the id of the first prompt whose row lacks it; None where every row has it.
        other: columns with the name of a built-in argument whose value is not that argument's.
    """

    lacking: Mapping[str, str | None]
    other: frozenset[str] = frozenset()

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Columns:
        """Read the columns of prompts."""
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        lacking = {name: next((one.id for one in prompts if name not in one.columns), None) for name in names}
        shared = [name for name in names if name in BUILT_IN]
        return cls(lacking, frozenset(name for name in shared if any(_differs(one, name) for one in prompts)))


def _differs(prompt: Prompt, name: str) -> bool:
    """Tell whether the prompt's column is something else than the built-in argument of its name."""
    own = {"prompt": prompt.text, "messages": None if prompt.messages is None else [*map(dict, prompt.messages)]}
    return name in prompt.columns and (name not in own or prompt.columns[name] != own[name])


def argument_problems(rewards: Mapping[str, RewardParameters], sources: Mapping[str, Columns]) -> Iterator[Problem]:
    """Yield one message for each argument that cannot be given, or that could mean two things.

    Args:
        rewards: parameters of each reward.
        sources: columns of each source of prompts, by a name for the message.
    """
    for reward, parameters in rewards.items():
        for source, columns in sources.items():
            for name in (*parameters.needed, *parameters.optional):
                where: About = {"key": f"task.rewards.{reward}", "argument": name}
                has = f"{source} with the columns {', '.join(columns.lacking) or '(none)'}"
                if name in columns.other:
                    yield describe(
                        "a column has the name of a built-in argument, but another content",
                        where=where,
                        got=has,
                        do="give the column another name",
                        fault="two meanings",
                    )
                elif name in BUILT_IN or name in parameters.optional:
                    continue
                elif name not in columns.lacking:
                    yield describe(
                        "the prompts have no column of this name",
                        where=where,
                        got=has,
                        expected=f"a column, or one of {', '.join(BUILT_IN)}",
                        do="rename the parameter, or give it a default",
                        fault="no column",
                    )
                elif (first := columns.lacking[name]) is not None:
                    yield describe(
                        "not every prompt has the column",
                        where=where,
                        got=f"{source} without it in prompt {first}",
                        do="add it to all rows, or give the parameter a default",
                        fault="no column",
                    )
