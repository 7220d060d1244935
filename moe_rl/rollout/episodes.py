"""Asks for the episodes of a run's steps and evaluations: their names, and how they are sampled."""

from __future__ import annotations

from collections.abc import Sequence

from moe_rl.config.prompt_sources import HeldoutSourceConfig
from moe_rl.config.schema import Config
from moe_rl.rollout.kept import episode_name
from moe_rl.rollout.trajectories import EpisodePlayer, EpisodeRequest, Trajectory
from moe_rl.types import Prompt, Verdict

Heldout = Sequence[tuple[HeldoutSourceConfig, Prompt]]


class Episodes:
    """Plays the prompts of a run, which are rows of its environment."""

    def __init__(self, config: Config, player: EpisodePlayer):
        self.config, self.player = config, player

    def round(self, step: int, prompts: Sequence[Prompt], *, first: int) -> list[list[Trajectory]]:
        """Play the groups of a round of a step.

        Args:
            first: number of the first prompt within the step.
        """
        size = self.config.rollout.group_size
        played = self.player.play(
            [
                self.request(episode_name(step, number, member), prompt)
                for number, prompt in enumerate(prompts, start=first)
                for member in range(size)
            ]
        )
        return [played[at : at + size] for at in range(0, len(played), size)]

    def request(self, name: str, prompt: Prompt) -> EpisodeRequest:
        """Return the request for an episode to train on."""
        rollout = self.config.rollout
        return EpisodeRequest(name, prompt, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)

    def evaluated(self, heldout: Heldout) -> list[tuple[list[int], list[Verdict]]]:
        """Play held-out prompts as their sources ask for them, see Rollouts.evaluation. Nothing of it is kept.

        Returns:
            For sampled and for greedy episodes, the places of their prompts, and their verdicts.
        """
        return [
            (places, [one.verdict for one in self.player.play(asked)]) for places, asked in self.evaluation(heldout)
        ]

    def evaluation(self, heldout: Heldout) -> list[tuple[list[int], list[EpisodeRequest]]]:
        """Return the requests of an evaluation for sampled episodes and for greedy ones, with the places of their
        prompts. Prompts and seeds are the same at every call."""
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
                    EpisodeRequest(name, prompt, temperature, top_p, rollout.top_k, rollout.min_p, kept=False)
                )
            if source.greedy or not temperature:
                greedy[0].append(place)
                greedy[1].append(EpisodeRequest(f"eval-greedy-p{place}", prompt, 0.0, kept=False))
        return [sampled, greedy]
