"""Gathers what the ranks saw of a few sequences of a step, so that users can read them in samples.jsonl.

Rank 0 chooses the sequences when it samples. Every rank then adds the rows and layers that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from moe_rl.megatron import world
from moe_rl.megatron.microbatch import ScoredWork
from moe_rl.report.sample_lines import SampleLine
from moe_rl.rollout.kept import KeptSample
from moe_rl.types import Sequence


@dataclass(frozen=True, slots=True)
class View:
    """Holds what one rank saw of one sequence.

    Attributes:
        logprobs: the trainer's log-probabilities [T]; empty on ranks that do not speak for the sequence.
        advantages: those of the sequence's units of the loss; empty on the same ranks.
        positions: forwarded tokens that this rank's routers saw.
        differing: for each of them, the number of this rank's layers whose router would choose other experts.
    """

    key: str
    logprobs: list[float]
    advantages: list[float]
    positions: list[int]
    differing: list[int]


def gather_views(keys: Seq[str], passes: Seq[ScoredWork]) -> dict[str, list[View]]:
    """Return the views of all ranks of these sequences. All ranks call it together."""
    if not keys:
        return {}
    mine = [view for scored in passes for view in _views(frozenset(keys), scored)]
    by_key: dict[str, list[View]] = {key: [] for key in keys}
    for views in world.gather(mine, list[View]):
        for view in views:
            by_key[view.key].append(view)
    return by_key


def _views(keys: frozenset[str], scored: ScoredWork) -> list[View]:
    speaks, views = world.speaks_for_its_sequences(), []
    for number, work in enumerate(scored.work):
        wanted = [(index, name) for index, name in enumerate(work.table.names) if name in keys]
        if not wanted:
            continue
        places, batch = work.table.places, work.microbatch
        positions, sequence = places.position[places.recorded], places.sequence[places.recorded]
        differing = np.zeros(len(positions), np.int64)
        if scored.seen.compared:
            differing = scored.seen.compared[number].differs.sum(0).cpu().numpy()
        for index, name in wanted:
            values, advantages = [], []
            if speaks:
                values = scored.logprobs[number].split(batch.counts)[index].tolist()
                advantages = batch.advantages.split(batch.units)[index].tolist()
            mine = sequence == index
            views.append(View(name, values, advantages, positions[mine].tolist(), differing[mine].tolist()))
    return views


def lines(
    step: int, samples: Seq[KeptSample], sequences: Seq[Sequence], views: dict[str, list[View]]
) -> list[SampleLine]:
    """Combine what rank 0 knows about the samples with what the ranks saw of them."""
    by_key = {sequence.key: sequence for sequence in sequences}
    return [_line(step, sample, by_key[sample.key], views.get(sample.key, [])) for sample in samples]


def _line(step: int, sample: KeptSample, sequence: Sequence, views: Seq[View]) -> SampleLine:
    spoken = [view for view in views if view.advantages]
    differing = [0] * sequence.forwarded if any(view.positions for view in views) else []
    for view in views:
        for position, layers in zip(view.positions, view.differing, strict=True):
            differing[position] += layers
    return SampleLine(
        step=step,
        key=sample.key,
        prompt=sample.prompt,
        completion=sample.completion,
        reward=sequence.reward,
        parts=sample.parts,
        advantages=[value if math.isfinite(value) else None for value in (spoken[0].advantages if spoken else ())],
        finish_reason=sample.finish_reason,
        versions=sequence.versions,
        prompt_tokens=len(sequence.prompt_token_ids),
        pieces=sample.pieces,
        sampler_logprobs=_finite(sequence.rollout_logprobs.tolist()),
        trainer_logprobs=_finite(spoken[0].logprobs if spoken else ()),
        differing_layers=differing,
        inserted=sample.inserted,
    )


def _finite(logprobs: Iterable[float]) -> list[float | None]:
    """Round the values to 1e-6. JSON has no numbers for those that are not finite: they become None."""
    return [round(value, 6) if math.isfinite(value) else None for value in logprobs]
