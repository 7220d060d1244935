"""What all sections of a config have in common: typed, frozen, closed, and with rules of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from moe_rl.types import LARGEST_REWARD


def _possible(path: Path) -> Path:
    """Refuse what no system has a file for."""
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
# Larger ones do not fit into the float32 and int32 of the libraries below.
Positive = Annotated[float, Field(gt=0.0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0.0, le=1e30)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
# The kernel waits for so many milliseconds at most.
Seconds = Annotated[float, Field(ge=0.01, le=2e6)]
# What is made of each: processes, requests, messages between ranks.
Few = Annotated[int, Field(ge=1, le=2**16)]
Location = Annotated[Path, AfterValidator(_possible)]
Number = BeforeValidator(_no_boolean)
"""For a Literal of numbers, which else takes true for 1."""
Reward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class Section(BaseModel):
    """A mapping with known keys. The text under a field documents it; docs/reference/config.md is made of these."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """Say what is wrong between the keys of this section, one message each."""
        return iter(())

    @model_validator(mode="after")
    def _obey_rules(self, info: ValidationInfo) -> Self:
        """Refuse a section that breaks its rules, with every message at once.

        A list as the context takes the messages instead: `load_config` gives one, and `config.check` then reports them
        together with what is wrong between sections.
        """
        found = list(self.problems())
        if isinstance(info.context, list):
            info.context.extend(found)
        elif found:
            raise PydanticCustomError("section", "{problems}", {"problems": "\n".join(found)})
        return self
