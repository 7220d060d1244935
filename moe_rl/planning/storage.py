"""Bytes that leave a rank's memory: routes, checkpoints, weights on their way to the sampler."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.hf import parameter_count
from moe_rl.config.model_facts import ModelFacts
from moe_rl.config.schema import Config
from moe_rl.planning.batch import Batch
from moe_rl.planning.memory import DTYPE_BYTES, state_bytes


@dataclass(frozen=True, slots=True)
class Storage:
    """routes_*: raw ids, one row a forwarded token. checkpoint_bytes: parameters and optimizer state, all of them.
    weight_sync_bytes: the whole model in the sampler's precision."""

    routes_bytes_per_token: int
    max_routes_bytes_per_step: int
    checkpoint_bytes: int
    weight_sync_bytes: int


def routes_bytes_per_token(facts: ModelFacts) -> int:
    """MoE layers x top_k ids, of one byte each up to 256 experts and of two above."""
    return len(facts.moe_layers) * facts.top_k * (1 if facts.num_experts <= 256 else 2)


def checkpoint_bytes(facts: ModelFacts, dtype: str) -> int:
    """Every parameter and its optimizer state, once."""
    return parameter_count(facts).total * (DTYPE_BYTES[dtype] + state_bytes(dtype))


def make_storage(config: Config, facts: ModelFacts, batch: Batch) -> Storage:
    routes = routes_bytes_per_token(facts)
    sampled = batch.sampling_rounds * batch.sequences_per_step
    return Storage(
        routes_bytes_per_token=routes,
        max_routes_bytes_per_step=sampled * (batch.max_sequence_tokens - 1) * routes,
        checkpoint_bytes=checkpoint_bytes(facts, config.train.dtype),
        weight_sync_bytes=parameter_count(facts).total * DTYPE_BYTES[config.rollout.dtype],
    )
