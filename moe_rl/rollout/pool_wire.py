"""Defines the messages between rank 0 and the pool's process, in frames of `messages.Channel`.

The pool answers calls one by one in order of arrival; only StepsRetained may come earlier, and BatchTaken later,
between the answers to other calls. While it works it sends signs of life. Rank 0 sends the pool the same messages that
it would send an engine.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.msgpack import Decoder

from moe_rl.messages import Message, decoder
from moe_rl.types import ScoredTokens
from moe_rl.vllm.wire import Alive, Close, Score, Update, Wake


class OpenPool(Message, frozen=True):
    """Opens the pool for the run in a folder; the first frame."""

    run_dir: Path
    config: Path


class BeginGroups(Message, frozen=True):
    """Starts sampling groups: the sampler has weight version `version`; `step` is the next that needs a batch."""

    step: int
    version: int


class TakeBatch(Message, frozen=True):
    """Requests the batch of a step, which is then in the folder of kept rollouts."""

    step: int


class RetainSteps(Message, frozen=True):
    """Deletes the rollouts of all steps but these."""

    steps: set[int]


class EvaluatePolicy(Message, frozen=True):
    step: int


class PoolOpened(Message, frozen=True):
    """Answers OpenPool, with the fields of Sampler."""

    vllm_version: str
    workers: int
    address: str


class GroupsBegun(Message, frozen=True):
    """Answers BeginGroups with messages about kept groups that cannot be used."""

    unusable: list[str]


class StepsRetained(Message, frozen=True):
    pass


class BatchSampled(Message, frozen=True):
    """Reports that a batch's completions are sampled. Its BatchTaken follows once they are judged.
    Not sent when groups are sampled one by one.

    parts: the work done for it, each part with its begin and end on time.perf_counter.
    """

    step: int
    parts: list[tuple[str, float, float]]


class BatchTaken(Message, frozen=True):
    """Reports that the batch of a step is on disk.

    parts: as in BatchSampled, the work done since.
    """

    step: int
    parts: list[tuple[str, float, float]]


class PolicyEvaluated(Message, frozen=True):
    metrics: dict[str, float]


class RunsScored(Message, frozen=True):
    """Answers Score, one element for each worker."""

    scores: list[ScoredTokens]


class SamplerUpdated(Message, frozen=True):
    """Answers Update and Wake with the number of workers that are left."""

    workers: int


class PoolFailed(Message, frozen=True):
    """Reports that a call failed. `kind` names the class of `moe_rl.errors`."""

    kind: str
    message: str


Call = BeginGroups | TakeBatch | RetainSteps | EvaluatePolicy | Score | Update | Wake
Reply = GroupsBegun | BatchTaken | StepsRetained | PolicyEvaluated | RunsScored | SamplerUpdated
CALLS: Decoder[OpenPool | Call | Close] = decoder(OpenPool | Call | Close)
REPLIES: Decoder[PoolOpened | Alive | BatchSampled | Reply | PoolFailed] = decoder(
    PoolOpened | Alive | BatchSampled | Reply | PoolFailed
)
