"""Writes and reads `samples.jsonl`: a few sequences of every step, token by token, as JSON lines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.report.json_lines import StepFile, read_lines
from moe_rl.types import InsertedText, VersionSpan

FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class SampleLine:
    """Holds one sequence of a step: the policy's text, and the values of both engines.

    Attributes:
        step: the training step that sampled the sequence and trained on it.
        key: the request's name in messages and in the trace.
        prompt, completion: texts. The completion omits the stop token and inserted text.
        reward: the reward from which the advantage was computed, including length terms.
        parts: value of each reward function.
        advantages: advantage of the sequence, or of each of its turns; None for a value that is not finite. Empty if
            the sequence was not trained on.
        finish_reason: "stop" or "length".
        versions: which weights sampled which of its tokens.
        prompt_tokens: number of tokens in the prompt.
        pieces: text of each sampled token [T], the stop token included.
        sampler_logprobs: log-probabilities [T] of the sampled tokens in the sampler, in nats; None where it is
            not finite.
        trainer_logprobs: the same in the trainer, in the pass with the sampler's weights. Empty if the sequence was not
            in that pass.
        differing_layers: for each forwarded token (all but the last sampled one), the number of MoE layers whose router
            would choose other experts in the trainer. Empty as above.
        inserted: the text given to the model between its turns.
    """

    step: int
    key: str
    prompt: str
    completion: str
    reward: float
    parts: dict[str, float]
    advantages: list[float | None]
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    pieces: list[str]
    sampler_logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    differing_layers: list[int]
    inserted: list[InsertedText] = field(default_factory=list)

    @property
    def weights(self) -> str:
        """Describe which versions sampled it, with the tokens of each if there are several."""
        return versions_text(self.versions)

    @property
    def shown_advantages(self) -> str:
        """Return its advantages as text; "" if it was not trained on."""
        numbers = ", ".join("not finite" if advantage is None else f"{advantage:+.3f}" for advantage in self.advantages)
        return f"advantage {numbers}" if numbers else ""

    @property
    def differences(self) -> list[float]:
        """Return the trainer's minus the sampler's log-probability of each sampled token, in nats; NaN where a value is
        not finite."""
        pairs = zip(self.trainer_logprobs, self.sampler_logprobs, strict=True) if self.trainer_logprobs else ()
        return [math.nan if trainer is None or sampler is None else trainer - sampler for trainer, sampler in pairs]

    @property
    def mismatch(self) -> float:
        """Return the mean |trainer minus sampler log-probability| over the sampled tokens, in nats; NaN if it was not
        measured."""
        sizes = [abs(difference) for difference in self.differences]
        return sum(sizes) / len(sizes) if sizes else math.nan

    def layers_at(self, token: int) -> int | None:
        """Return the number of layers that differ at sampled token `token`. None for the last token, which is not
        forwarded, and if nothing was measured."""
        row = self.prompt_tokens + token + sum(text.tokens for text in self.inserted if text.after <= token)
        return self.differing_layers[row] if row < len(self.differing_layers) else None


def versions_text(versions: tuple[VersionSpan, ...]) -> str:
    """Describe weight versions, with the tokens of each if there are several."""
    if len(versions) == 1:
        return str(versions[0].weight_version)
    return ", then ".join(f"{span.weight_version} ({span.tokens} tokens)" for span in versions)


class SampleFile(StepFile[SampleLine]):
    """Appends to samples.jsonl of a run, on one rank."""

    def __init__(self, run_dir: Path):
        super().__init__(Path(run_dir) / FILE, SampleLine, "the samples of the run")


def read_samples(run_dir: Path) -> list[SampleLine]:
    """Read samples.jsonl of a run, in the order written. Raises MoeRLError, naming the line, if one is damaged."""
    return read_lines(Path(run_dir) / FILE, SampleLine)
