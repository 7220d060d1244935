"""Defines one member of `objective.corrections`: a weight that corrects the mismatch of sampler and trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moe_rl.config.section import Section
from moe_rl.errors import Problem, describe

# For each rule: the bounds that it needs, and those that it accepts in addition.
_BOUNDS = {
    "truncate": ({"high"}, set()),
    "vtrace": ({"high"}, set()),
    "mask": ({"high"}, {"low"}),
    "reject": (set(), {"low", "high"}),
    "veto": ({"low"}, set()),
}


class CorrectionConfig(Section):
    """Defines a weight that corrects the mismatch of sampler and trainer (moe_rl/objectives/corrections.py)."""

    level: Literal["token", "sequence", "geometric"]
    """Ratio of the trainer's old policy to the sampler that the rule uses. token: the ratio of the token. sequence: the
    product of the ratios of all tokens of the sequence. geometric: their geometric mean."""
    rule: Literal["truncate", "vtrace", "mask", "reject", "veto"]
    """Weight computed from the ratio. truncate: the ratio, but at most `high`. vtrace: the same; where turns have their
    own rewards, what a turn led to is also weighed by the ratios of the turns in between. mask: the ratio inside the
    bounds, and 0 outside. reject: 1 inside the bounds, and 0 outside. veto: 0 for the whole sequence if the ratio of
    any of its tokens is below `low`."""
    low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Lower bound of the ratio. Optional for mask and reject, required for veto. A ratio of 1 is always inside the
    bounds."""
    high: Annotated[float, Field(ge=1.0)] | None = None
    """Upper bound of the ratio. Required for truncate, vtrace and mask, optional for reject."""

    @property
    def weighs(self) -> bool:
        """Return whether the weight is the ratio itself."""
        return self.rule in ("truncate", "vtrace", "mask")

    def bound_problems(self, key: str) -> Iterator[Problem]:
        """Yield the problems of the bounds and the level. key: this correction's, for messages."""
        rule = self.rule
        needed, allowed = _BOUNDS[rule]
        given = {bound for bound in ("low", "high") if getattr(self, bound) is not None}
        for bound in sorted(needed - given):
            yield describe(f"{rule} needs it", where={"key": f"{key}.{bound}"}, got="no value")
        for bound in sorted(given - needed - allowed):
            yield describe(
                f"rule {rule} has no such bound",
                where={"key": f"{key}.{bound}"},
                got=getattr(self, bound),
                expected=f"only {' and '.join(sorted(needed))}",
            )
        if not needed and not given:
            yield describe(f"{rule} without a bound keeps everything", where={"key": key}, got="neither low nor high")
        if self.low == self.high == 1:
            yield describe(
                "the bounds leave a single ratio", where={"key": key}, got="low 1 and high 1", expected="low < high"
            )
        if rule == "veto" and self.level != "token":
            yield describe(
                "a veto works on single tokens",
                where={"key": f"{key}.level"},
                got=self.level,
                expected="token",
                do=f"take level {self.level} with rule reject to drop a sequence by its own ratio",
            )
        if rule == "vtrace" and self.level != "sequence":
            yield describe(
                "vtrace weighs turns by their products of token ratios",
                where={"key": f"{key}.level"},
                got=self.level,
                expected="sequence",
                do="take rule truncate for another level",
            )
