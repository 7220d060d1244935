"""Computes the memory of the samplers: their weights, their KV cache, and the number of sequences that fit."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.schema import Config
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import parameter_count
from moe_rl.planning.batch_sizes import Batch
from moe_rl.planning.memory import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Holds the memory of a sampler's GPU, or of the host where there is no GPU, in bytes.

    Attributes:
        kv_tokens: tokens that the KV cache of an engine holds.
        max_concurrent: sequences that an engine may decode at once, whether they fit or not.
        fitting: sequences of full length that fit.
    """

    engines: int
    gpus_per_engine: int
    weight_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_concurrent: int
    fitting: int

    @property
    def fits_max_concurrent(self) -> bool:
        return self.max_concurrent <= self.fitting

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes


def weight_bytes(facts: ModelFacts, dtype: str, gpus: int) -> int:
    """Return the bytes of weights on a GPU: norms and routers in full, and the GPU's part of all matrices and
    experts."""
    count = parameter_count(facts)
    return DTYPE_BYTES[dtype] * (count.dense - count.cut + -(-(count.cut + count.expert) // gpus))


def kv_bytes_per_token(facts: ModelFacts, dtype: str, gpus: int) -> int:
    """Return the bytes of the KV cache per token: layers x numbers per token and layer x bytes of a number.

    Key-value heads are divided among the GPUs of an engine, at least one on each. The latents of MLA are whole on each.
    Layers with a sliding window are counted as if they kept all tokens.
    """
    numbers = facts.cache_width
    if facts.latent is None:
        numbers = numbers // facts.kv_heads * -(-facts.kv_heads // gpus)
    return facts.layers * numbers * DTYPE_BYTES[dtype]


def make_sampler(config: Config, facts: ModelFacts, batch: Batch) -> SamplerMemory:
    rollout = config.rollout
    engines, gpus = max(1, len(rollout.servers)), 1
    if config.cluster is not None:
        engines, gpus = config.cluster.engines, config.cluster.gpus_per_engine
    per_token = kv_bytes_per_token(facts, rollout.dtype, gpus)
    tokens = (rollout.kv_cache_mib << 20) // per_token
    return SamplerMemory(
        engines=engines,
        gpus_per_engine=gpus,
        weight_bytes=weight_bytes(facts, rollout.dtype, gpus),
        kv_cache_bytes=rollout.kv_cache_mib << 20,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        max_concurrent=min(rollout.max_concurrent, -(-batch.sequences_per_step // engines)),
        fitting=tokens // batch.max_sequence_tokens,
    )
