"""Defines the messages between rank 0 and the pool's process, in frames of `messages.Channel`.

The pool answers calls one by one, in the order in which they came. While it works it sends signs of life.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.msgpack import Decoder

from moe_rl.messages import Message, decoder
from moe_rl.types import ScoredTokens
from moe_rl.weights.update import WeightUpdate


class OpenPool(Message, frozen=True):
    """Opens the pool for the run in a folder; the first frame."""

    run_dir: Path
    config: Path


class BeginGroups(Message, frozen=True):
    """Says that the sampler has the weights `version`, and `step` is the next one that needs a batch."""

    step: int
    version: int


class TakeBatch(Message, frozen=True):
    """Asks for the batch of a step. It is then in the folder of kept rollouts."""

    step: int


class RetainSteps(Message, frozen=True):
    """Deletes the rollouts of all steps but these."""

    steps: set[int]


class EvaluatePolicy(Message, frozen=True):
    step: int


class ScoreRuns(Message, frozen=True):
    """Asks for scores, see Sampler.score."""

    runs: list[list[int]]
    shard: str | None


class AskPoolCounts(Message, frozen=True):
    pass


class UpdateSampler(Message, frozen=True):
    update: WeightUpdate


class ClosePool(Message, frozen=True):
    pass


class PoolOpened(Message, frozen=True):
    """Answers OpenPool, with the fields of Sampler."""

    vllm_version: str
    workers: int
    address: str


class PoolAlive(Message, frozen=True):
    """Says that the process runs."""


class GroupsBegun(Message, frozen=True):
    """Answers BeginGroups with messages about kept groups that cannot be used."""

    unusable: list[str]


class StepsRetained(Message, frozen=True):
    pass


class BatchTaken(Message, frozen=True):
    """Says that the batch of a step is on disk.

    parts: what was done for it, each with its begin and end on time.perf_counter.
    """

    step: int
    parts: list[tuple[str, float, float]]


class PolicyEvaluated(Message, frozen=True):
    metrics: dict[str, float]


class RunsScored(Message, frozen=True):
    scores: list[ScoredTokens]


class PoolCounted(Message, frozen=True):
    """Answers AskPoolCounts with the recorders' counts, see Sampler.counts."""

    counts: dict[str, int]


class SamplerUpdated(Message, frozen=True):
    """Answers UpdateSampler with the number of workers that are left."""

    workers: int


class PoolFailed(Message, frozen=True):
    """Says that a call failed. `kind` names the class of `moe_rl.errors`."""

    kind: str
    message: str


Call = BeginGroups | TakeBatch | RetainSteps | EvaluatePolicy | ScoreRuns | AskPoolCounts | UpdateSampler
Reply = GroupsBegun | BatchTaken | StepsRetained | PolicyEvaluated | RunsScored | PoolCounted | SamplerUpdated
CALLS: Decoder[OpenPool | Call | ClosePool] = decoder(OpenPool | Call | ClosePool)
REPLIES: Decoder[PoolOpened | PoolAlive | Reply | PoolFailed] = decoder(PoolOpened | PoolAlive | Reply | PoolFailed)
