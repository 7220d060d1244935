"""Defines the section `pipeline`: how sampling and training overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from moe_rl.config.section import NotNegative, Section, Whole
from moe_rl.errors import Problem, describe


class PipelineConfig(Section):
    """Says how sampling and training overlap."""

    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: a step samples its completions with the newest weights, then trains on them. one_step_off: the next step is
    sampled while a step trains, with the weights from before that step. async: groups of completions are sampled
    without a break, new weights go in while requests are in flight, and a step trains on the groups that are ready.
    one_step_off and async need a sampler that shares no GPU with the trainer."""
    max_staleness: Whole | None = None
    """Largest number of versions that the weights that began a group may lag those that train on it, in mode async. The
    limit applies when a step takes the group, after its time in the queue. 0: as sync, bit for bit. null: 1 in mode
    async."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of requests that are in flight when new weights arrive, in mode async. keep: they
    continue with it. recompute: they are aborted, and continued with a new prefill under the new weights."""
    segments: Literal["exact", "first"] = "exact"
    """How an aborted and continued completion is trained on, in mode async: aborted at an update with kv recompute, or
    with either kv when the run ended in the middle of it and was resumed. exact: each part is its own segment after the
    earlier parts, with routes for all its tokens from the weights that sampled it. All segments of a completion are in
    one microbatch and one term of the loss; a part that leaves no room for another in train.microbatch_tokens is
    sampled again. first: one sequence, in which every token keeps the first routes that were recorded for it."""
    late: Literal["wait", "drop"] = "wait"
    """What a step does, in mode async, about groups that are not ready and would be too old for the next step. wait: it
    waits for them. drop: they are dropped and their prompts count as used."""
    oversample: NotNegative = 0.0
    """Groups that may be sampled beyond those that steps need, as a fraction of rollout.prompts_per_step (mode async).
    Steps do not wait for this many of the slowest groups, which are then dropped."""

    @property
    def lag(self) -> int:
        """Return how many versions the weights that sampled a completion may lag the trainer's."""
        if self.mode == "async":
            return 1 if self.max_staleness is None else self.max_staleness
        return int(self.mode == "one_step_off")

    @property
    def by_group(self) -> bool:
        """Return whether groups are sampled one by one, and not the batch of a step at once."""
        return self.mode == "async" and self.lag > 0

    @property
    def ahead(self) -> int:
        """Return how many batches are sampled before the step that trains on them begins."""
        return int(self.mode == "one_step_off")

    def problems(self) -> Iterator[Problem]:
        keys: tuple[str, ...] = "kv", "segments", "late", "oversample"
        given, do = "pipeline.max_staleness is 0", "raise it"
        if self.mode != "async":
            keys, given, do = ("max_staleness", *keys), f"pipeline.mode is {self.mode}", "set it to async"
        for key in keys if not self.by_group else ():
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                yield describe(
                    "only used when groups are sampled without a break",
                    where={"key": f"pipeline.{key}", "given": given},
                    got=value,
                    do=f"{do}, or remove pipeline.{key}",
                )
