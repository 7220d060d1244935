"""What the trainer and the engine process say to each other, in frames of `messages.Channel`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.msgpack import Decoder

from moe_rl.messages import Message, decoder
from moe_rl.types import Completion, GenerateRequest, RouteRef
from moe_rl.weights.update import WeightUpdate

SLEEPING_PARTS = ("weights", "kv_cache")
"""What an engine gives back while it sleeps, in the order in which it is taken back. vLLM's own tags."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with.

    model_path: Hugging Face checkpoint folder; its weights are version 0. dtype: "bfloat16" or "float32".
    max_model_len: prompt + completion, in tokens. max_concurrent: sequences decoded at once. trace_root: folder of the
    trace store, None turns recording off. log_path: gets all output of the engine's process. silence_seconds: an engine
    that makes no progress in a call for so long is taken for hung and killed. support to router_logits_fraction: as in
    recording.Recording. sleeps: whether it will be told to.
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
    sleeps: bool = False


class Start(Message, frozen=True):
    """First frame to the engine."""

    settings: EngineSettings


class Generate(Message, frozen=True):
    """enough: completions after which the others are aborted; None: all are sampled to their end."""

    requests: list[GenerateRequest]
    shard: str
    enough: int | None


class Score(Message, frozen=True):
    """shard: gets the routes; None: they are not recorded."""

    runs: list[list[int]]
    shard: str | None


class AskCounts(Message, frozen=True):
    pass


class Update(Message, frozen=True):
    update: WeightUpdate


class Sleep(Message, frozen=True):
    level: int


class Wake(Message, frozen=True):
    part: str


class Close(Message, frozen=True):
    pass


class Ready(Message, frozen=True):
    vllm_version: str


class Alive(Message, frozen=True):
    """Sent while a call is worked on, whenever the engine got ahead: a step done, a tensor loaded."""


class Generated(Message, frozen=True):
    completions: list[Completion]


class Scored(Message, frozen=True):
    """As types.ScoredTokens."""

    logprobs: list[np.ndarray]
    routes: list[RouteRef]


class Counted(Message, frozen=True):
    """counts: of the recorder, see Sampler.counts."""

    counts: dict[str, int]


class Updated(Message, frozen=True):
    pass


class Slept(Message, frozen=True):
    """gives_back: whether there was memory to give back."""

    gives_back: bool


class Awake(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    """The call failed. weights: for what the weights are, or were to be."""

    message: str
    weights: bool = False


Call = Generate | Score | AskCounts | Update | Sleep | Wake
Reply = Generated | Scored | Counted | Updated | Slept | Awake
CALLS: Decoder[Start | Call | Close] = decoder(Start | Call | Close)
REPLIES: Decoder[Ready | Alive | Reply | Failed] = decoder(Ready | Alive | Reply | Failed)
