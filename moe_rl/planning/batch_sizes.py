"""Computes the batch sizes of a run. Upper bounds assume that every sequence is as long as the config allows."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.layout import Layout
from moe_rl.config.schema import Config
from moe_rl.config.training import TrainConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the batch sizes of a run.

    Attributes:
        max_sequence_tokens: longest prompt plus longest completion.
        max_microbatches: the most that a rank has per update.
        microbatch_rows: rows of a full microbatch, on all its context-parallel ranks together.
        prompts_per_epoch: number of prompts in task.train. None if unknown; the values that depend on it are then None
            too.
        epochs: with one sampling round per step.
        endless: a source of task.train generates prompts without end, so there are no epochs.
    """

    sequences_per_step: int
    groups_per_update: int
    sequences_per_update: int
    max_sequence_tokens: int
    max_tokens_per_step: int
    max_microbatches: int
    microbatch_rows: int
    steps: int
    updates: int
    sampling_rounds: int
    prompts_per_epoch: int | None
    steps_per_epoch: float | None
    max_tokens_per_epoch: int | None
    epochs: float | None
    endless: bool


def make_batch(config: Config, layout: Layout, prompts: int | None) -> Batch:
    """Compute the sizes. prompts is the number of prompts in task.train.

    Numbers that do not divide evenly are rounded up here; `check.problems` refuses them.
    """
    run, rollout, train = config.run, config.rollout, config.train
    sequences = rollout.prompts_per_step * rollout.group_size
    groups_per_update = -(-rollout.prompts_per_step // train.updates_per_step)
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    per_microbatch = max(1, train.microbatch_tokens // longest)
    per_rank = -(-groups_per_update * rollout.group_size // layout.data)
    return Batch(
        sequences_per_step=sequences,
        groups_per_update=groups_per_update,
        sequences_per_update=groups_per_update * rollout.group_size,
        max_sequence_tokens=longest,
        max_tokens_per_step=sequences * longest,
        max_microbatches=-(-per_rank // per_microbatch),
        microbatch_rows=_microbatch_rows(train, layout),
        steps=run.steps,
        updates=run.steps * train.updates_per_step,
        sampling_rounds=rollout.dynamic_sampling_rounds,
        prompts_per_epoch=prompts,
        steps_per_epoch=prompts / rollout.prompts_per_step if prompts else None,
        max_tokens_per_epoch=prompts * rollout.group_size * longest if prompts else None,
        epochs=run.steps * rollout.prompts_per_step / prompts if prompts else None,
        endless=any(source.kind == "generator" for source in config.task.train),
    )


def _microbatch_rows(train: TrainConfig, layout: Layout) -> int:
    """Return train.microbatch_tokens, up to 5% more where sequences are packed by load, in multiples of 8 for each
    rank.
    """
    tokens = train.microbatch_tokens * (105 if train.packing == "load" else 100) // 100
    return -(-tokens // (8 * layout.context)) * 8 * layout.context
