"""Defines the base class of all config sections, and the types of their fields."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from moe_rl.errors import Problem
from moe_rl.shipped import find
from moe_rl.types import LARGEST_REWARD


def possible(path: Path) -> Path:
    """Refuse a path that no file system accepts."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if "\0" in str(path) or longest > 255 or len(os.fsencode(path)) > 4000:
        raise PydanticCustomError("path", "a path without zero bytes, of names of at most 255 bytes")
    return path


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a number")
    return value


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
# The libraries use float32 and int32, which hold no larger numbers.
Positive = Annotated[float, Field(gt=0.0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0.0, le=1e30)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
# The upper limit is the longest time in milliseconds that the kernel waits.
Seconds = Annotated[float, Field(ge=0.01, le=2e6)]
# Counts of things that cost a process, a request or a message each.
Few = Annotated[int, Field(ge=1, le=2**16)]
Location = Annotated[Path, AfterValidator(possible), AfterValidator(find)]
Number = BeforeValidator(_no_boolean)
"""Added to a Literal of numbers, which would otherwise accept true as 1."""
Reward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class Section(BaseModel):
    """A mapping with a fixed set of keys. The text under a field documents it and goes into
    docs/generated/config.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """Yield one message for each problem between the keys of this section."""
        return iter(())

    @model_validator(mode="after")
    def _obey_rules(self, info: ValidationInfo) -> Self:
        """Refuse a section that breaks its rules, with all messages at once.

        If the validation context is a list, the messages go into it instead. `load_config` passes one, so that
        `config.check` can report them together with problems between sections.
        """
        problems = list(self.problems())
        if isinstance(info.context, list):
            info.context.extend(problems)
        elif problems:
            raise PydanticCustomError("section", "{problems}", {"problems": "\n".join(problems), "found": problems})
        return self


def chosen_by(key: str, usual: str) -> Discriminator:
    """Return the discriminator of a union of tagged sections: the value of `key`, or `usual` without one."""
    return Discriminator(lambda value: value.get(key, usual) if isinstance(value, dict) else getattr(value, key, None))


def members(annotation: Any) -> dict[str, type[Any]]:
    """Return the sections of a union of tagged sections, by tag; none for any other annotation."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    tagged = [get_args(member) for member in get_args(annotation) if get_origin(member) is Annotated]
    return {arguments[1].tag: arguments[0] for arguments in tagged if isinstance(arguments[1], Tag)}
