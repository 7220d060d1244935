"""Keeps the rollouts of a run, so that what a step trained on can be inspected and scored again.

`rollouts/step000012.rollout` holds everything that step 12 trained on except the routes, which are in the step's trace
shards: keys, tokens, sampler logprobs, rewards, weight versions and route references. The file starts with the line
`moe_rl rollout 1 <xxh3-128 of the rest>`, followed by the batch in the encoding that was sent to the ranks
(`messages.py`).

`rollouts/step000012.sampled` holds the completions of a step that is not fully judged yet, if their weights will be
gone by then. It is deleted once the other file exists.

`rollouts/step000012-p3-c1.session` holds the turns of an episode, see `gateway.finishing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.errors import DataError
from moe_rl.rollout import sealed
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.prompt_ledger import PromptLedger, StepPrompts
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.trace import TraceStore
from moe_rl.types import Completion, InsertedText, Sequence

# The sampler appends the part after the round or number: the server or engine, `again` if that server was lost and is
# used again, or the pipeline stage of an engine. In older runs each turn of an episode has a shard.
_PLACE = r"(?:-again\d+)?(?:-(?:server|engine)\d+(?:-again\d+)?)?(?:\.pp\d+of\d+)?"
_SHARD = re.compile(r"step(\d{6,})(?:-round\d+|-p\d+-c\d+(?:-\d+)?)?" + _PLACE)
_GROUP_SHARD = re.compile(r"group(\d{6,})-(\d+)(?:-c\d+(?:-\d+)?)?" + _PLACE)
_SUFFIX = ".rollout"
_HEAD, _WHAT = "moe_rl rollout 1", "a step's rollouts"
_SAMPLED_SUFFIX = ".sampled"
SESSION_SUFFIX = ".session"
_SAMPLED_HEAD, _SAMPLED_WHAT = "moe_rl sampled 1", "the completions of a step"


@dataclass(frozen=True, slots=True)
class KeptSample:
    """Holds rank 0's fields of a sequence shown in samples.jsonl, see `report.sample_lines.SampleLine`."""

    key: str
    prompt: str
    completion: str
    pieces: list[str]
    parts: dict[str, float]
    finish_reason: str
    inserted: list[InsertedText] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Holds one step's training batch, without sequences whose verification failed.

    Attributes:
        group_ids: For each sequence, the number of its prompt.
        metrics: Measured during sampling and verification.
        digest: Digest of all completions sampled for the step, including those not trained on, as in the prompt ledger.
        samples: Some of the sequences, for samples.jsonl.
    """

    sequences: list[Sequence]
    group_ids: list[int]
    metrics: dict[str, float]
    digest: str
    samples: list[KeptSample] = field(default_factory=list)


@dataclass(slots=True)
class SampledStep:
    """Holds the completions of a step that is not fully judged, or not fully sampled.

    Attributes:
        first: Cursor of the first prompt; the others follow it.
        completions: Of each prompt; empty where episodes were played.
        metrics: Measured during sampling.
        digest: As in RolloutBatch.
        trajectories: Of each prompt, where episodes were played.
    """

    first: int
    completions: list[list[Completion]]
    metrics: dict[str, float]
    digest: str
    trajectories: list[list[Trajectory]] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        """Return the number of prompts."""
        return len(self.trajectories or self.completions)

    @property
    def sequences(self) -> list[Sequence]:
        """Return all sequences. Their rewards are not known yet: NaN."""
        played = [trajectory for group in self.trajectories for trajectory in group]
        return [
            *(Sequence.of(completion, math.nan) for group in self.completions for completion in group),
            *(Sequence.of(piece, math.nan, trajectory.name) for trajectory in played for piece in trajectory.sequences),
        ]


def shards_of(recorded: Iterable[Sequence | Completion]) -> list[str]:
    """Return the names of the trace shards that hold the routes of these, sorted."""
    return sorted({part.shard for piece in recorded if piece.routes is not None for part in piece.routes.parts})


def shard_name(step: int, number: int = 0) -> str:
    """Return the name of the trace shard for one round of a step's rollout. Rounds are numbered from 0."""
    return f"step{step:06d}" + (f"-round{number + 1}" if number else "")


def episode_name(step: int, prompt: int, member: int) -> str:
    """Return the name of a step's episode and of its session.

    Args:
        prompt: number of the prompt within the step, from 0.
        member: number of the episode among those of the prompt, from 0.
    """
    return f"{shard_name(step)}-p{prompt}-c{member}"


def shard_step(name: str) -> int | None:
    """Return the step whose rollout is in a trace shard; None if the shard does not belong to a training step."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def group_shard_name(cursor: int, number: int) -> str:
    """Return the name of a trace shard of a group that is sampled on its own."""
    return f"group{cursor:06d}-{number}"


def shard_group(name: str) -> tuple[int, int] | None:
    """Return cursor and number from a name that `group_shard_name` made; None for any other shard."""
    match = _GROUP_SHARD.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def kept_steps(step: int, last: int, checkpoints: Iterable[int], ahead: int) -> set[int]:
    """Return the steps whose rollouts are kept while `step` is the newest that the trainer has taken.

    These are step 1, the `last` steps, and the next `ahead` steps, which may be sampled by now. Each kept checkpoint
    adds two: the step after it, from which a run resumes, and the step that was sampled with its weights.

    Args:
        checkpoints: The last step of each checkpoint.
        ahead: How many steps sampling runs ahead of training.
    """
    of_checkpoints = {done + 1 + n for done in checkpoints for n in (0, ahead)}
    return {1, *of_checkpoints, *range(step - last + 1, step + ahead + 1)}


def of_others(what: str, got: str, expected: str) -> DataError:
    """Return the error for kept rollouts that are not the expected ones."""
    return DataError(f"its kept rollouts belong to other {what}", got=got, expected=expected)


class KeptRollouts:
    """Manages the rollout files in `folder` and their trace shards, which are kept and deleted together."""

    def __init__(self, folder: Path, store: TraceStore):
        self.folder, self.store = folder, store

    def save(self, step: int, batch: RolloutBatch) -> None:
        """Write a step's file. It appears complete or not at all."""
        sealed.save(self._path(step), _HEAD, batch, _WHAT)
        self._sampled_path(step).unlink(missing_ok=True)

    def save_sampled(self, step: int, sampled: SampledStep) -> None:
        """Write the completions of a step, until `save` has its batch."""
        sealed.save(self._sampled_path(step), _SAMPLED_HEAD, sampled, _SAMPLED_WHAT)

    def sampled(self, step: int) -> SampledStep | None:
        """Return the completions that `save_sampled` wrote for a step without a batch; None if there are none.

        Raises:
            DataError: The file is cut short or changed.
        """
        path = self._sampled_path(step)
        if self._path(step).exists() or not path.exists():
            return None
        return sealed.load(path, _SAMPLED_HEAD, SampledStep, _SAMPLED_WHAT, "delete it, to sample the step again")

    def load_sampled(self, step: int) -> RolloutBatch | SampledStep:
        """Return the batch of a step or, where it has none yet, its completions."""
        return self.sampled(step) or self.load(step)

    def load(self, step: int) -> RolloutBatch:
        """Read the batch that `save` wrote.

        Raises:
            DataError: The file is missing, cut short or changed.
        """
        return sealed.load(self._path(step), _HEAD, RolloutBatch, _WHAT, "compare another step of the run")

    def entered[B: (RolloutBatch, RolloutBatch | SampledStep)](
        self, step: int, ledger: PromptLedger, source: PromptSource, read: Callable[[int], B]
    ) -> tuple[StepPrompts, B]:
        """Read the batch of a step with `load`, or what `load_sampled` returns, and check that it matches the ledger.

        Raises:
            MoeRLError: Something is missing or damaged, or belongs to other prompts or completions.
        """
        entry = ledger.find(step - 1)
        if entry is None:
            raise DataError("its rollouts were not finished", got="no line for the step in the prompt ledger")
        if entry.prompts != (prompts := entry.ids_in(source)):
            raise of_others("prompts", f"{entry.prompts[:1]} from cursor {entry.cursors[0][0]}", f"{prompts[:1]}")
        batch = read(step)
        if batch.digest != entry.completions:
            raise of_others("completions", f"digest {batch.digest}", f"{entry.completions} as in the prompt ledger")
        self.store.check_published(shards_of(batch.sequences))
        return entry, batch

    def steps(self) -> list[int]:
        """Return the steps that have both their file and their trace shards, ascending."""
        shards = set(self.store.shards())
        of_steps = {shard_step(name) for name in shards}
        steps = [step for path in self._files() if (step := shard_step(path.stem)) is not None]
        return sorted(
            step for step in steps if step in of_steps or shards.issuperset(shards_of(self.load(step).sequences))
        )

    def retain(self, steps: Container[int], groups: Container[int] | None = None) -> None:
        """Delete all files and shards, unfinished ones too, except those of these steps and groups.

        Args:
            groups: cursors of the groups, sampled one by one, that these and later steps use. None: all.
        """
        self.unneeded(steps, groups)()

    def unneeded(self, steps: Container[int], groups: Container[int] | None = None) -> Callable[[], None]:
        """Find what `retain` deletes. Returns what deletes it, in any thread, while more is sampled."""

        def kept(name: str) -> bool:
            group = shard_group(name)
            return _is_of(name, steps) if group is None else groups is None or group[0] in groups

        # A removal that was killed may have left the lines of shards without a file.
        names = {*self.store.shards(), *self.store.manifest().published}
        shards = [name for name in sorted(names) if not kept(name)]
        paths = [path for path in self.folder.glob(f"*{SESSION_SUFFIX}") if not kept(path.stem)]
        # The pool may be writing the file of the next step, or a session.
        paths += [path for path in self.folder.glob("*.tmp") if not kept(path.name.partition(".")[0])]
        paths += [path for path in [*self._files(), *self._files(_SAMPLED_SUFFIX)] if not _is_of(path.stem, steps)]

        def delete() -> None:
            self.store.remove(*shards)
            for path in paths:
                path.unlink(missing_ok=True)

        return delete

    def _path(self, step: int) -> Path:
        return self.folder / f"{shard_name(step)}{_SUFFIX}"

    def _sampled_path(self, step: int) -> Path:
        return self._path(step).with_suffix(_SAMPLED_SUFFIX)

    def _files(self, suffix: str = _SUFFIX) -> list[Path]:
        return [path for path in self.folder.glob(f"*{suffix}") if shard_step(path.stem) is not None]


def _is_of(name: str, steps: Container[int]) -> bool:
    step = shard_step(name)
    return step is not None and step in steps


class ReplayedRollouts:
    """Replaces `Rollouts` with the batches that another run has kept. Has no sampler, and never changes that run.

    Attributes:
        unusable: as in Rollouts; always empty.
    """

    engine = None

    def __init__(self, config: Config, task: TaskPrompts, run_dir: Path, replayed: Path, store: TraceStore):
        """replayed: the folder of the other run. store: its routes."""
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger.of_run(run_dir, config.pipeline)
        self.replayed = PromptLedger.of_run(replayed, config.pipeline)
        self.kept = KeptRollouts(replayed / "rollouts", store)
        self.unusable: list[str] = []

    def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Return the other run's batch of this step, and enter its prompts into this run's ledger."""
        entry, batch = self.kept.entered(step, self.replayed, self.source, self.kept.load)
        self.ledger.append(entry)
        return batch

    def settle(self, clock: Clock) -> None:
        """Do nothing: nothing is sampled."""

    def retain(self, steps: Container[int]) -> None:
        """Do nothing: the rollouts are the other run's."""
