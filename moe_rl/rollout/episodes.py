"""Builds the requests for a run's episodes, for steps and evaluations: their names and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

from moe_rl.config.prompt_sources import HeldoutSourceConfig
from moe_rl.config.schema import Config
from moe_rl.rollout.kept import episode_name
from moe_rl.rollout.trajectories import EpisodeRequest
from moe_rl.types import Prompt

Heldout = Sequence[tuple[HeldoutSourceConfig, Prompt]]


class Episodes:
    """Makes the requests for the episodes of a run, whose prompts are rows of its environment."""

    def __init__(self, config: Config):
        self.config = config

    def round(self, step: int, prompts: Sequence[Prompt], *, first: int) -> list[EpisodeRequest]:
        """Return the requests for a round of a step, group by group.

        Args:
            first: number of the first prompt within the step.
        """
        return [
            self.request(name := episode_name(step, number, member), name, prompt)
            for number, prompt in enumerate(prompts, start=first)
            for member in range(self.config.rollout.group_size)
        ]

    def group(self, shard: str, cursor: int, prompt: Prompt) -> list[EpisodeRequest]:
        """Return the requests for a group that is sampled on its own.

        Args:
            shard: name of a new trace shard of the group. The shard of each turn has it as a prefix.
        """
        members = range(self.config.rollout.group_size)
        return [self.request(f"{shard}-c{member}", f"group{cursor}-c{member}", prompt) for member in members]

    def request(self, name: str, seed: str, prompt: Prompt) -> EpisodeRequest:
        """Return the request for an episode to train on."""
        rollout = self.config.rollout
        return EpisodeRequest(name, seed, prompt, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)

    def evaluation(self, heldout: Heldout) -> list[tuple[list[int], list[EpisodeRequest]]]:
        """Return an evaluation's requests for sampled and for greedy episodes, with the indices of their prompts.
        Prompts and seeds are the same at every call. None of the episodes are kept."""
        rollout = self.config.rollout
        sampled: tuple[list[int], list[EpisodeRequest]] = [], []
        greedy: tuple[list[int], list[EpisodeRequest]] = [], []
        for place, (source, prompt) in enumerate(heldout):
            temperature = rollout.temperature if source.temperature is None else source.temperature
            top_p = rollout.top_p if source.top_p is None else source.top_p
            for sample in range(source.samples if temperature else 0):
                name = f"eval-sampled-p{place}-c{sample}"
                sampled[0].append(place)
                sampled[1].append(
                    EpisodeRequest(name, name, prompt, temperature, top_p, rollout.top_k, rollout.min_p, kept=False)
                )
            if source.greedy or not temperature:
                name = f"eval-greedy-p{place}"
                greedy[0].append(place)
                greedy[1].append(EpisodeRequest(name, name, prompt, 0.0, kept=False))
        return [sampled, greedy]
