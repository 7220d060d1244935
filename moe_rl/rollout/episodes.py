"""Builds the requests for a run's episodes, for steps and evaluations: their names and sampling parameters. Says also
what any evaluation samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_rl.config.prompt_sources import HeldoutSourceConfig
from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.schema import Config
from moe_rl.rollout.batches import drawing_of
from moe_rl.rollout.kept import episode_name, shard_name
from moe_rl.rollout.trajectories import EpisodeRequest
from moe_rl.types import Drawing, Prompt

Heldout = Sequence[tuple[HeldoutSourceConfig, Prompt]]


class Draw(NamedTuple):
    """Says how a held-out prompt is sampled once. place: the index of the prompt. sample: its number, from 0."""

    place: int
    sample: int
    drawing: Drawing


def draws_of(heldout: Heldout, rollout: RolloutConfig) -> tuple[list[Draw], list[Draw]]:
    """Return what an evaluation samples, and what it takes greedily, as each source says."""
    sampled, greedy = list[Draw](), list[Draw]()
    for place, (source, _) in enumerate(heldout):
        temperature = rollout.temperature if source.temperature is None else source.temperature
        top_p = rollout.top_p if source.top_p is None else source.top_p
        drawing = Drawing(temperature, rollout.top_k, top_p, rollout.min_p)
        sampled += [Draw(place, sample, drawing) for sample in range(source.samples if temperature else 0)]
        if source.greedy or not temperature:
            greedy.append(Draw(place, 0, Drawing(0.0)))
    return sampled, greedy


class Episodes:
    """Makes the requests for the episodes of a run, whose prompts are rows of its environment."""

    def __init__(self, config: Config):
        self.config = config

    def round(self, step: int, number: int, prompts: Sequence[Prompt], *, first: int) -> list[EpisodeRequest]:
        """Return the requests for a round of a step, group by group.

        Args:
            number: the round's number, from 0.
            first: number of the first prompt within the step.
        """
        return [
            self.request(name := episode_name(step, index, member), name, prompt, shard_name(step, number))
            for index, prompt in enumerate(prompts, start=first)
            for member in range(self.config.rollout.group_size)
        ]

    def group(self, shard: str, cursor: int, prompt: Prompt) -> list[EpisodeRequest]:
        """Return the requests for a group that is sampled on its own.

        Args:
            shard: name of a new trace shard of the group.
        """
        members = range(self.config.rollout.group_size)
        return [self.request(f"{shard}-c{member}", f"group{cursor}-c{member}", prompt, shard) for member in members]

    def request(self, name: str, seed: str, prompt: Prompt, shard: str | None) -> EpisodeRequest:
        """Return the request for an episode to train on. shard: as in EpisodeRequest."""
        return EpisodeRequest(name, seed, prompt, drawing_of(self.config.rollout), shard)

    def evaluation(self, kind: str, draw: Draw, prompt: Prompt) -> EpisodeRequest:
        """Return the request for an episode of an evaluation, which is not kept."""
        name = f"eval-{kind}-p{draw.place}" + (f"-c{draw.sample}" if draw.drawing.temperature else "")
        return EpisodeRequest(name, name, prompt, draw.drawing)
