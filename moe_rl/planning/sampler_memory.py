"""Computes the memory of the samplers: their weights, their KV cache, and the number of sequences that fit."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.schema import Config
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import layer_weights, parameter_count
from moe_rl.planning.batch_sizes import Batch
from moe_rl.planning.memory import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Holds the memory of a sampler's GPU, or of the host where there is no GPU, in bytes.

    Attributes:
        kv_tokens: tokens that the KV cache of an engine holds.
        max_concurrent: sequences that an engine may decode at once, whether they fit or not.
        fitting: sequences of full length that fit.
        sync_bytes: what arrives of new weights and is kept until its layer is complete, at most.
    """

    engines: int
    gpus_per_engine: int
    weight_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_concurrent: int
    fitting: int
    sync_bytes: int

    @property
    def fits_max_concurrent(self) -> bool:
        return self.max_concurrent <= self.fitting

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes + self.sync_bytes


def weight_bytes(facts: ModelFacts, dtype: str, gpus: int) -> int:
    """Return the bytes of weights on a GPU: norms and routers in full, and the GPU's part of all matrices and
    experts."""
    count = parameter_count(facts)
    return DTYPE_BYTES[dtype] * (count.dense - count.cut + -(-(count.cut + count.expert) // gpus))


def sync_bytes(facts: ModelFacts, dtype: str, gpus: int, *, exporting: int, bucket: int, largest: int) -> int:
    """Return the bytes that a GPU keeps at most of an update while it arrives, beside the weights that it replaces.

    A GPU keeps its own experts of a layer until the last of them has come, and a tensor keeps its whole bucket. The
    ranks that export these experts hand over equal shares of the layer; each share may begin and end within a bucket.
    Experts that are stacked into one tensor are exported by one rank, and each GPU keeps all of them. The bucket that
    arrives next may have the largest tensor.

    Args:
        exporting: how many ranks the experts of a layer are exported by.
        bucket: bytes of a bucket of several tensors.
        largest: bytes of the largest bucket.
    """
    if any(weight.experts == "stacked" for layer in facts.moe_layers[:1] for weight in layer_weights(facts, layer)):
        exporting = gpus = 1
    layer = DTYPE_BYTES[dtype] * parameter_count(facts).expert // max(1, len(facts.moe_layers))
    return -(-exporting // gpus) * (-(-layer // exporting) + bucket) + largest


def kv_bytes_per_token(facts: ModelFacts, dtype: str, gpus: int) -> int:
    """Return the bytes of the KV cache per token: layers x numbers per token and layer x bytes of a number.

    Key-value heads are divided among the GPUs of an engine, at least one on each. The latents of MLA are whole on each.
    Layers with a sliding window are counted as if they kept all tokens.
    """
    numbers = facts.cache_width
    if facts.latent is None:
        numbers = numbers // facts.kv_heads * -(-facts.kv_heads // gpus)
    return facts.layers * numbers * DTYPE_BYTES[dtype]


def make_sampler(config: Config, facts: ModelFacts, batch: Batch, largest_bucket: int) -> SamplerMemory:
    """Compute a sampler's memory. largest_bucket: bytes of the largest bucket of weights."""
    rollout = config.rollout
    engines, gpus = max(rollout.engines, len(rollout.servers)), 1
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
        sync_bytes=sync_bytes(
            facts,
            rollout.dtype,
            gpus,
            exporting=config.parallel.expert,
            bucket=int(rollout.weight_bucket_mib * 2**20),
            largest=largest_bucket,
        ),
    )
