"""The rollouts that a run keeps, so that what a step learned from can be looked at and scored again.

`rollouts/step000012.rollout` holds everything that step 12 learned from but the routes, which lie in the step's trace
shards: keys, tokens, sampler logprobs, rewards, weight versions, references to routes. It is one line,
`moe_rl rollout 1 <xxh3-128 of the rest>`, and the batch as it went to the ranks (`messages.py`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from moe_rl import messages
from moe_rl.disk import write_whole, writing
from moe_rl.errors import DataError, describe
from moe_rl.trace import TraceStore
from moe_rl.types import Sequence

# What follows the round is added by who samples: a fleet of servers, the pipeline stages of an engine.
_SHARD = re.compile(r"step(\d{6,})(?:-round\d+)?(?:-server\d+(?:-again\d+)?)?(?:\.pp\d+of\d+)?")
_SUFFIX = ".rollout"
_HEAD = b"moe_rl rollout 1 "


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step learns from. Sequences whose verification failed are not in it.

    group_ids: number of the prompt of each sequence. metrics: what sampling and verification showed. digest: of every
    completion that was sampled for the step, trained on or not, as the prompt ledger has it.
    """

    sequences: list[Sequence]
    group_ids: list[int]
    metrics: dict[str, float]
    digest: str


def shards_of(batch: RolloutBatch) -> list[str]:
    """The trace shards that hold the routes of a batch, sorted."""
    return sorted({part.shard for one in batch.sequences if one.routes is not None for part in one.routes.parts})


def shard_name(step: int, number: int = 0) -> str:
    """Trace shard of a round of one step's rollout. number: of the round, from 0."""
    return f"step{step:06d}" + (f"-round{number + 1}" if number else "")


def shard_step(name: str) -> int | None:
    """The step whose rollout a trace shard holds; None when it is of something else."""
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else None


def kept_steps(step: int, last: int, checkpoints: Iterable[int]) -> set[int]:
    """The steps whose rollouts are kept once `step` is sampled: the `last` ones, step 1, and the one after each of the
    checkpoints that are kept, given by the steps they had done."""
    return {1, *(done + 1 for done in checkpoints), *range(step - last + 1, step + 1)}


class KeptRollouts:
    """The files of `folder` and the trace shards beside them, which come and go together."""

    def __init__(self, folder: Path, store: TraceStore):
        self.folder, self.store = folder, store

    def save(self, step: int, batch: RolloutBatch) -> None:
        """Write a step's file, which appears complete or not at all."""
        with writing("the folder of the rollouts could not be made", self.folder):
            self.folder.mkdir(exist_ok=True)
        payload = messages.encode(batch)
        head = _HEAD + xxhash.xxh3_128_hexdigest(payload).encode() + b"\n"
        write_whole(self._path(step), head + payload, "a step's rollouts")

    def load(self, step: int) -> RolloutBatch:
        """What `save` was given. Raises DataError when the file is missing, cut short or changed."""
        path = self._path(step)
        try:
            head, newline, payload = path.read_bytes().partition(b"\n")
        except OSError as error:
            raise DataError(describe("a step's rollouts were not kept", where=str(path), got=error.strerror)) from error
        digest = xxhash.xxh3_128_hexdigest(payload)
        if not newline or head != _HEAD + digest.encode():
            raise DataError(
                describe(
                    "a step's rollouts are damaged",
                    where=str(path),
                    got=repr(head[:60]),
                    expected=repr(_HEAD + digest.encode()),
                    do="compare another step of the run",
                )
            )
        try:
            return messages.decode(payload, RolloutBatch)
        except (msgspec.MsgspecError, ValueError) as error:
            raise DataError(
                describe("a step's rollouts are of another version of moe_rl", where=str(path), got=error)
            ) from error

    def steps(self) -> list[int]:
        """The steps that have both their file and their trace shards, ascending."""
        shards = {shard_step(name) for name in self.store.shards()}
        return sorted(step for path in self._files() if (step := shard_step(path.stem)) is not None and step in shards)

    def retain(self, steps: Container[int]) -> None:
        """Remove every file and every shard but those of these steps, unfinished files too."""
        for name in self.store.shards():
            if not _is_of(name, steps):
                self.store.remove(name)
        for path in self.folder.glob("*.tmp"):
            path.unlink()
        for path in self._files():
            if not _is_of(path.stem, steps):
                path.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / f"{shard_name(step)}{_SUFFIX}"

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*{_SUFFIX}") if shard_step(path.stem) is not None]


def _is_of(name: str, steps: Container[int]) -> bool:
    step = shard_step(name)
    return step is not None and step in steps
