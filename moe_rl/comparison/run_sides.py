"""Makes the two sides of a bisection from what a run kept: rollouts, routes, and the weights of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.comparison.bisection import Computation, Settings, Value
from moe_rl.comparison.engine_runs import EngineRuns
from moe_rl.comparison.passes import other_budget
from moe_rl.comparison.third_engine import PARTS, ThirdEngine
from moe_rl.comparison.trainer_scores import TrainerScores, in_layout
from moe_rl.config.layout import least_ranks, on_one_rank
from moe_rl.config.schema import Config
from moe_rl.models.hf import read_model
from moe_rl.train.run_folder import RunFolder
from moe_rl.vllm.arguments import BLOCK_SIZE

_DECLARED = "as declared"


@dataclass(frozen=True, slots=True)
class Versions:
    """Says which weights the two sides have.

    Attributes:
        step: Of the rollouts.
        sampler, trainer: Versions of the weights.
        checkpoint: The trainer's; None: the initial model.
        folders: Hugging Face folders of these and of other kept versions.
    """

    step: int
    sampler: int
    trainer: int
    checkpoint: Path | None
    folders: Mapping[int, Path]


def sides_of_run(
    config: Config, run: RunFolder, versions: Versions, out: Path | None
) -> tuple[Computation, Computation, dict[str, str]]:
    """Score the rollouts with the trainer, and describe both sides. Call it between world.start and world.stop.

    Args:
        config: Of the run, as it was.
        out: Folder for what engines write; None: start no engine and no ranks.

    Returns:
        Sampler, trainer, and {cause: why it is not tested}.

    Raises:
        MoeRLError: The rollouts are not complete, or an engine or a rank failed.
    """
    facts, rollout, replays = read_model(config.model.path), config.rollout, config.replay.mode != "off"
    scores = TrainerScores(on_one_rank(config), run, versions.step, versions.sampler, versions.checkpoint)
    sequences = scores.source.sequences
    weights = {f"version {version}": path for version, path in versions.folders.items()}
    block = int(str(rollout.vllm.get("block_size") or BLOCK_SIZE))
    third = ThirdEngine(
        [sequence.ids for sequence in sequences],
        [len(sequence.prompt_token_ids) for sequence in sequences],
        [scores.source.store.read(sequence.routes).routes for sequence in sequences if sequence.routes is not None],
        weights=weights,
        block=block,
    )
    suspects = third.suspects()
    declared = third.settings | {"temperature": rollout.temperature, "support": _support(config)}
    of_sampler = declared | dict.fromkeys(PARTS, rollout.dtype)
    of_sampler |= {"weights": f"version {versions.sampler}", "weight format": rollout.weights}
    of_trainer = declared | dict.fromkeys(PARTS, config.train.dtype) | {"router": "float32"}  # Megatron's always is
    of_trainer |= {"weights": f"version {versions.trainer}", "routes": "recorded" if replays else "own"}

    def sampled_only(settings: Settings) -> list[np.ndarray]:
        """Return the log-probabilities of sampled tokens. An episode also has tokens that the model was given."""
        pairs = zip(sequences, third(settings), strict=True)
        return [logprobs[sequence.positions - len(sequence.prompt_token_ids)] for sequence, logprobs in pairs]

    sampler, trainer = Added(sampled_only), Added(sampled_only)
    untested = {"gate weights as recorded": "a run records which experts were taken, not their weights"}
    if len(weights) == 1:
        untested["weights"] = "the run kept one version only (checkpoint.keep, checkpoint.every_steps)"
    prompt_cache = suspects.pop("prompt cache")  # a trainer has none
    if len(prompt_cache) < 3:
        untested["prompt cache"] = untested.get("weights", f"no prompt has a whole block of {block} tokens")
        prompt_cache = []

    changes: dict[str, list[Any]] = {}
    alone = measured = scores.of(config.train.microbatch_tokens)
    if budget := other_budget(sequences, config.train.microbatch_tokens):
        trainer.add(["packing"], lambda _: scores.of(budget), alone)
        changes["packing"] = [f"{budget} tokens"]
    else:
        untested["packing"] = "the sequences are packed alike with any train.microbatch_tokens"
    ranks = least_ranks(config.parallel)
    if ranks == 1:
        untested["layout"] = "the run's layout has one rank"
    elif out is None:
        untested["layout"] = f"needs --engines, which starts {ranks} ranks"
    else:
        measured = in_layout(config, run, versions.step, versions.sampler, versions.checkpoint, ranks, out)
        trainer.add(["layout"], lambda _: alone, measured)
        changes["layout"] = ["one rank"]
    others: dict[Any, list[Any]] = {}
    states: dict[Any, list[Any]] = {}
    if out is None:
        untested |= dict.fromkeys(EngineRuns.CAUSES, "needs --engines")
    else:
        engines = EngineRuns(config, facts, versions.folders[versions.sampler], sequences, out)
        untested |= engines.untested
        if engines.changes:
            sampler.add_engines(engines, [sequence.rollout_logprobs for sequence in sequences])
            others, states = engines.changes, engines.suspects
    return (
        Computation(
            of_sampler | sampler.settings,
            sampler,
            [sequence.rollout_logprobs for sequence in sequences],
            {**suspects, "prompt cache": prompt_cache, **states},
            others,
        ),
        Computation(of_trainer | trainer.settings, trainer, measured, suspects, changes),
        untested,
    )


class Added:
    """Computes log-probabilities in the third engine, and adds what each other cause alone moves in engines of its own
    kind. Two of these causes at once start no engine more.

    Attributes:
        settings: These other causes, as declared.
    """

    def __init__(self, third: Callable[[Settings], list[np.ndarray]]):
        self._third = third
        self._added: dict[str, tuple[Callable[[Settings], Seq[np.ndarray]], Seq[np.ndarray]]] = {}
        self._moved: dict[tuple[str, Value], list[np.ndarray]] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return dict.fromkeys(self._added, _DECLARED)

    def add(self, causes: Iterable[str], run: Callable[[Settings], Seq[np.ndarray]], before: Seq[np.ndarray]) -> None:
        """Add causes that `run` changes. before: what it returns without a change."""
        self._added |= dict.fromkeys(causes, (run, before))

    def add_engines(self, engines: EngineRuns, recorded: Seq[np.ndarray]) -> None:
        """Add the causes of engines. recorded: what the run's own engines computed."""
        fresh = engines({})
        self.add(engines.suspects, engines, fresh)
        self.add(engines.changes.keys() - engines.suspects.keys(), lambda _: fresh, recorded)

    def __call__(self, settings: Settings) -> list[np.ndarray]:
        logprobs = self._third({cause: value for cause, value in settings.items() if cause not in self._added})
        for cause, (run, before) in self._added.items():
            value = settings[cause]
            if value != _DECLARED:
                if (cause, value) not in self._moved:
                    after = run({cause: value})
                    self._moved[cause, value] = [second - first for second, first in zip(after, before, strict=True)]
                logprobs = [values + moved for values, moved in zip(logprobs, self._moved[cause, value], strict=True)]
        return logprobs


def _support(config: Config) -> str:
    """Return the sampler's support in the words of ThirdEngine."""
    rollout = config.rollout
    limits = {"top_k": rollout.top_k or None, "top_p": rollout.top_p if rollout.top_p < 1 else None}
    limits["min_p"] = rollout.min_p or None
    return ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None) or "all"
