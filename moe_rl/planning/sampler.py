"""What the sampler holds: its KV cache, and the sequences that fit into it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.model_facts import ModelFacts
from moe_rl.config.schema import Config
from moe_rl.planning.batch import Batch
from moe_rl.planning.memory import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Sampler:
    """kv_tokens: tokens that the KV cache holds. max_concurrent: sequences decoded at once, whether they fit or not."""

    kv_bytes_per_token: int
    kv_tokens: int
    max_concurrent: int
    fits_max_concurrent: bool


def kv_bytes_per_token(facts: ModelFacts, dtype: str) -> int:
    """layers x numbers cached of a token and layer (keys and values, or what they are made of) x bytes of a number."""
    return facts.layers * facts.cache_width * DTYPE_BYTES[dtype]


def make_sampler(config: Config, facts: ModelFacts, batch: Batch) -> Sampler:
    rollout = config.rollout
    per_token = kv_bytes_per_token(facts, rollout.dtype)
    tokens = (rollout.kv_cache_mib << 20) // per_token
    concurrent = min(rollout.max_concurrent, batch.sequences_per_step)
    return Sampler(per_token, tokens, concurrent, concurrent * batch.max_sequence_tokens <= tokens)
