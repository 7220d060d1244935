"""Defines the messages between the trainer and the engine process, in frames of `messages.Channel`.

trainer -- Numbered(7, Generate) --> engine      several calls at once, each with its own number
        <-- Alive --------------              while any call is under way
        <-- RequestsEnded(7) ---              completions, as they end
        -- Leave(7) ----------->              the call ends early, with the tokens so far
        <-- Answered(7, Generated) --
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.msgpack import Decoder

from moe_rl.messages import Message, decoder
from moe_rl.types import Completion, GenerateRequest, RouteRef
from moe_rl.weights.update import Holding, WeightUpdate

SLEEPING_PARTS = ("weights", "kv_cache")
"""The parts that an engine releases while it sleeps, in the order of waking. The names are vLLM's tags."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Describes how to start an engine.

    Attributes:
        model_path: Hugging Face checkpoint folder; its weights are version 0.
        dtype: "bfloat16" or "float32".
        max_model_len: prompt plus completion, in tokens.
        max_concurrent: sequences decoded at once.
        trace_root: folder of the trace store; None turns recording off.
        log_path: file for all output of the engine's process.
        silence_seconds: an engine that makes no progress in a call for this long counts as hung and is killed.
        support, log_normalizer, router_logits_fraction, head: as in recording.Recording.
        sleeps: whether the engine must support sleep.
        reads_text: whether the engine must support stop strings.
        cuda_graphs: whether vLLM replays its forward pass as CUDA graphs.
        passed: further arguments of vLLM.
        yields: whether the trainer's ranks have priority on a CPU. They wait for each other: one without a core delays
            all.
    """

    model_path: Path
    dtype: str
    max_model_len: int
    max_concurrent: int
    kv_cache_mib: int
    trace_root: Path | None
    model_fingerprint: str
    log_path: Path
    startup_timeout_seconds: float
    seed: int
    silence_seconds: float = 60.0
    capture: str = "patch"
    support: bool = False
    log_normalizer: bool = False
    router_logits_fraction: float = 0.0
    head: int = 0
    sleeps: bool = False
    reads_text: bool = False
    yields: bool = False
    cuda_graphs: bool = False
    passed: dict[str, Any] = field(default_factory=dict)


class Start(Message, frozen=True):
    """Starts the engine; the first frame. It is answered with Ready or Failed."""

    settings: EngineSettings


class Generate(Message, frozen=True):
    """Requests completions. A call without requests publishes a shard that earlier calls left open, or with `keep_open`
    its records so far.

    Attributes:
        shard: this call's alone, unless earlier calls left it open.
        keep_open: leave the shard open: its records are written but not published, and later calls may use it.
        alone: no other call may be running, and the prefix cache is emptied first, so that the result depends only on
            the weights and the requests.
    """

    requests: list[GenerateRequest]
    shard: str
    alone: bool = False
    keep_open: bool = False


class Score(Message, frozen=True):
    """Requests scores. `shard` gets the routes; None records none."""

    runs: list[list[int]]
    shard: str | None


class AskCounts(Message, frozen=True):
    pass


class Update(Message, frozen=True):
    """Loads a part of new weights. An engine with running requests must pause first."""

    update: WeightUpdate


class Pause(Message, frozen=True):
    """Stops the forward passes. Requests keep their place and their KV cache."""


class Resume(Message, frozen=True):
    """Ends a pause. Refused while the weights are incomplete."""


class Sleep(Message, frozen=True):
    level: int


class Wake(Message, frozen=True):
    part: str


class Close(Message, frozen=True):
    pass


class Leave(Message, frozen=True):
    """Ends the Generate call of this number early: its unfinished requests are aborted. Gets no answer; has no effect
    on a call that has ended."""

    number: int


class Ready(Message, frozen=True):
    vllm_version: str


class Alive(Message, frozen=True):
    """Sign of life of a process that works on its calls. An engine sends it for each step, loaded tensor, or pause."""


class Generated(Message, frozen=True):
    completions: list[Completion]


class Scored(Message, frozen=True):
    """Answers Score, with the fields of types.ScoredTokens."""

    logprobs: list[np.ndarray]
    routes: list[RouteRef]


class Counted(Message, frozen=True):
    """Answers AskCounts with the recorder's counts, see Sampler.counts."""

    counts: dict[str, int]


class Updated(Message, frozen=True):
    """Answers Update with what the engine then holds."""

    holding: Holding


class Done(Message, frozen=True):
    """Answers Pause, Resume and Wake."""


class Slept(Message, frozen=True):
    """Answers Sleep. `gives_back`: whether memory was released."""

    gives_back: bool


class Failed(Message, frozen=True):
    """Reports that the call failed. `weights` marks failures about the weights, and `refused` a call that is itself at
    fault."""

    message: str
    weights: bool = False
    refused: bool = False


Call = Generate | Score | AskCounts | Update | Pause | Resume | Sleep | Wake
Reply = Generated | Scored | Counted | Updated | Slept | Done


class Numbered(Message, frozen=True):
    """Carries one call. Its answer carries the same number."""

    number: int
    call: Call


class Answered(Message, frozen=True):
    """Carries the reply to one call. Replies come in the order in which the calls end."""

    number: int
    reply: Reply | Failed


class RequestsEnded(Message, frozen=True):
    """Reports a Generate call's completions that have ended, before the call is answered.

    Attributes:
        completions: with their indices in the call, without routes. Aborted ones are left out.
    """

    number: int
    completions: list[tuple[int, Completion]]


CALLS: Decoder[Start | Numbered | Leave | Close] = decoder(Start | Numbered | Leave | Close)
REPLIES: Decoder[Ready | Failed | Answered | RequestsEnded | Alive] = decoder(
    Ready | Failed | Answered | RequestsEnded | Alive
)
