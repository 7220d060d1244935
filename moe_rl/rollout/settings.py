"""What an engine in a child process is started with: what the trainer says, and the child is told as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
