"""Defines the section `pipeline`: how sampling and training overlap."""

from __future__ import annotations

from typing import Literal

from moe_rl.config.section import Section


class PipelineConfig(Section):
    """Says how sampling and training overlap."""

    mode: Literal["sync", "one_step_off"] = "sync"
    """sync: a step samples its completions with the newest weights, then trains on them. one_step_off: the next step is
    sampled while a step trains, with the weights from before that step. Needs a sampler that shares no GPU with the
    trainer."""

    @property
    def lag(self) -> int:
        """Return by how many versions the weights that sampled a completion may be older than the trainer's."""
        return {"sync": 0, "one_step_off": 1}[self.mode]
