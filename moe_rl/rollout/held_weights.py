"""Identifies the weights that a server holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from moe_rl.vllm.control import Served


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Identifies the weights of a server: which start of the server holds them, after how many updates, their
    digest."""

    start: str
    updates: int
    version: int
    digest: str

    @classmethod
    def of(cls, served: Served) -> Self:
        """Return what a server says that it holds."""
        return cls(served.start, served.updates, served.weight_version, served.weight_digest)

    def __str__(self) -> str:
        return f"version {self.version}, {f'digest {self.digest}' if self.digest else 'no digest'}"
