"""Defines the exception tree. It has one root, so that commands turn every expected failure into one clear message.

A message says what is wrong, where, what was got, what was expected and what to do. `describe` lays that out; every
raise site in moe_rl goes through it or writes a sentence with the same five parts.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 5


def describe(what: str, *, where: str = "", got: object = None, expected: object = None, do: str = "") -> str:
    """Lay out one message: what (where): got X, expected Y. Do Z."""
    text = what if not where else f"{what} ({where})"
    facts = []
    if got is not None:
        facts.append(f"got {got}")
    if expected is not None:
        facts.append(f"expected {expected}")
    if facts:
        text += ": " + ", ".join(facts)
    if do:
        text += f". {do[0].upper()}{do[1:]}"
    return text


def first_of(texts: Sequence[str], *, separator: str = "; ") -> str:
    """Join the first five texts for a message, and say how many more there are."""
    more = f"{separator}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + more


class MoeRLError(Exception):
    """Root of everything moe_rl raises on purpose. Tools print it as one message and exit 2."""


class ConfigError(MoeRLError, ValueError):
    """The config, or the files it names, cannot be run. Carries every problem found, not only the first."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(MoeRLError, ValueError):
    """A prompt file or a kept rollout is damaged or lacks a part."""


class DiskError(MoeRLError):
    """A file could not be written. The message names it, says whether the disk is full, and how much is free."""


class TraceError(MoeRLError):
    """A routing trace is missing, damaged or misused. The message names shard and record."""


class TraceDiskError(TraceError, DiskError):
    """A shard could not be written, and nothing of it is there."""


class RouteValidationError(TraceError, ValueError):
    """Routes that may not be trained on. The message names request, token and layer."""


class SupportError(TraceError, ValueError):
    """A recorded sampling support that may not be trained on. The message names request and token."""


class ReplayError(MoeRLError):
    """Replay was not exact: a route was missed, repeated, or another one was dispatched."""


class EngineError(MoeRLError):
    """The sampler refused a request, answered wrongly or died. The message names the process and its log."""


class SamplerGone(EngineError):
    """A sampler died, hangs, or lost the run's weights, and the run cannot do without it. Tools exit 3."""


class WeightSyncError(EngineError):
    """The sampler does not hold what the trainer sent, or the trainer would send other weights than it trains."""


class PatchError(MoeRLError):
    """The installed vLLM is not the version, or not in the state, that a patch series needs."""


class RewardError(MoeRLError):
    """Too many verifications failed (raised, hung or died) to go on."""


class NonFiniteError(MoeRLError):
    """What the trainer computes is not finite: update after update was skipped, or routers score with NaN."""


class CollapseError(MoeRLError):
    """The run is lost: what it measures says that no further step can mend it. Tools exit 4."""


class CheckpointError(MoeRLError):
    """A checkpoint is missing, incomplete, damaged or from another run."""


class Stopped(MoeRLError):
    """The run was asked to stop and did, with what it had done in a checkpoint. Tools exit 5."""
