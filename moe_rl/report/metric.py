"""Describes one reported number: its name, unit, direction, meaning, and the meaning of a bad value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neutral", "must be 0", "must be 1", "must equal routing/expected"]
When = Literal["every step", "when measured", "evaluation"]

Mode = Literal["r3", "r2", "off"]

FAMILY = "<name>"
MODES: tuple[Mode, ...] = ("r3", "r2", "off")
REPLAYED: tuple[Mode, ...] = ("r3", "r2")


@dataclass(frozen=True, slots=True)
class Metric:
    """Describes one reported number. A key ending in `<name>` stands for a family, with one member per name.

    Attributes:
        when: "every step": required in each training line. "when measured": may be absent. "evaluation": only in
            evaluation lines.
        modes: the values of replay.mode under which the metric exists. Other modes reject it.
    """

    key: str
    unit: str
    better: Better
    meaning: str
    bad: str
    when: When = "every step"
    modes: tuple[Mode, ...] = MODES

    @property
    def family(self) -> bool:
        return self.key.endswith(FAMILY)
