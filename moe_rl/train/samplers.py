"""Who samples for a run: an engine in a child process of rank 0, or the servers that the config names."""

from __future__ import annotations

from moe_rl.config.schema import Config
from moe_rl.models.hf import ModelFacts
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.sampler import Sampler
from moe_rl.train.run_folder import RunFolder
from moe_rl.vllm.wire import EngineSettings


def start_sampler(config: Config, facts: ModelFacts, folder: RunFolder) -> Sampler:
    """Rank 0 calls it, from its main thread. Raises EngineError for an engine that does not start, a server that does
    not answer."""
    if config.rollout.servers:
        return ServerFleet.attach(config, folder.trace)
    return VllmEngine.start(engine_settings(config, facts, folder))


def engine_settings(config: Config, facts: ModelFacts, folder: RunFolder) -> EngineSettings:
    """What the run's engine is started with; trace and log go into the folder."""
    rollout = config.rollout
    return EngineSettings(
        model_path=config.model.path,
        dtype=rollout.dtype,
        max_model_len=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        max_concurrent=rollout.max_concurrent,
        kv_cache_mib=rollout.kv_cache_mib,
        trace_root=folder.trace,
        model_fingerprint=facts.fingerprint,
        log_path=folder.engine_log,
        startup_timeout_seconds=rollout.startup_timeout_seconds,
        seed=config.run.seed,
        silence_seconds=config.run.peer_timeout_seconds,
        capture=rollout.capture,
        support=rollout.keep_sampling_mask,
        router_logits_fraction=rollout.router_logits_fraction,
        sleeps=rollout.sleep_level > 0,
    )
