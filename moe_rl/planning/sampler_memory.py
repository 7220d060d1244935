"""What the samplers hold: their weights, KV cache, and the sequences that fit into it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.schema import Config
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import parameter_count
from moe_rl.planning.batch_sizes import Batch
from moe_rl.planning.memory import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Bytes are of one GPU, or of the host where there is none. kv_tokens: that an engine's KV cache holds.
    max_concurrent: sequences that an engine decodes at once, whether they fit or not; fitting: those that do at full
    length."""

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
    """Bytes of a number x (what every GPU holds, norms and routers; and of matrices and experts its part)."""
    count = parameter_count(facts)
    return DTYPE_BYTES[dtype] * (count.dense - count.cut + -(-(count.cut + count.expert) // gpus))


def kv_bytes_per_token(facts: ModelFacts, dtype: str, gpus: int) -> int:
    """layers x numbers of a token and layer x bytes of a number. Key-value heads are shared among an engine's GPUs, at
    least one on each; the latents of MLA are whole on each. Windowed layers are counted as if they kept everything."""
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
