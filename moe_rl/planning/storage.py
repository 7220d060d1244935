"""Computes the bytes that leave a rank's memory: routes, checkpoints, weight transfers, and tokens sent to experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_rl.config.layout import Layout
from moe_rl.config.schema import Config
from moe_rl.config.training import LoraConfig, TrainConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import expected_tensors, parameter_count
from moe_rl.models.peft import adapter_tensors
from moe_rl.planning.batch_sizes import Batch
from moe_rl.planning.memory import DTYPE_BYTES, state_bytes


@dataclass(frozen=True, slots=True)
class Storage:
    """Holds the bytes that leave a rank's memory.

    Attributes:
        routes_*: raw ids, one row per forwarded token. Those of a node are the ones that its ranks read.
        checkpoint_bytes: parameters and optimizer state of the whole model.
        checkpoints: number of checkpoints that are there while one is written.
        disk_gb_per_second: speed of the cluster's disk in 10^9 bytes; None if the config does not say.
        grace_seconds: time from a request to stop to the end of the run.
        weight_sync_bytes: the whole model in the sampler's precision, or only the adapters.
        weight_bucket_bytes: the largest amount of weights that a rank holds at a time during a transfer.
        sync_seconds: time to send weight_sync_bytes over each link of the cluster, from the link's bandwidth alone.
    """

    routes_bytes_per_token: int
    max_routes_bytes_per_step: int
    max_routes_bytes_per_node: int
    checkpoint_bytes: int
    checkpoints: int
    disk_gb_per_second: float | None
    grace_seconds: float
    weight_sync_bytes: int
    weight_bucket_bytes: int
    sync_seconds: dict[str, float]


def routes_bytes_per_token(facts: ModelFacts) -> int:
    """Return the bytes of routes per token: MoE layers x top_k ids, one byte each up to 256 experts and two above."""
    return len(facts.moe_layers) * facts.top_k * (1 if facts.num_experts <= 256 else 2)


def node_share(layout: Layout, gpus_per_node: int) -> float:
    """Return the fraction of a step's routes that the ranks of one node read.

    A node reads the sequences of its data-parallel shares and the layers of its stages. Megatron numbers ranks by
    tensor, context, data and then pipeline.
    """
    per_share = layout.tensor * layout.context
    stage = per_share * layout.data
    stages = max(1.0, gpus_per_node / stage)
    shares = min(layout.data, max(1.0, min(gpus_per_node, stage) / per_share))
    return min(1.0, shares / layout.data) * min(1.0, stages / layout.pipeline)


def checkpoint_bytes(facts: ModelFacts, train: TrainConfig) -> int:
    """Return the bytes of a checkpoint: every trained parameter and its optimizer state, once."""
    trained = parameter_count(facts).total if train.lora is None else adapter_elements(facts, train.lora)
    return trained * (DTYPE_BYTES[train.dtype] + state_bytes(train).stored)


def adapter_elements(facts: ModelFacts, lora: LoraConfig) -> int:
    return sum(map(math.prod, adapter_tensors(facts, lora.rank, lora.targets).values()))


def weight_sync_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of a weight transfer to one engine: every parameter once, in the sampler's precision."""
    return parameter_count(facts).total * DTYPE_BYTES[dtype]


def weight_bucket_bytes(facts: ModelFacts, dtype: str, bucket_mib: float) -> int:
    """Return the bytes of the bucket, or of the largest weight, which is not divided; at most all weights of the
    model."""
    largest = max(math.prod(shape) for shape in expected_tensors(facts).values())
    return min(max(int(bucket_mib * 2**20), largest * DTYPE_BYTES[dtype]), weight_sync_bytes(facts, dtype))


def make_storage(config: Config, facts: ModelFacts, layout: Layout, batch: Batch) -> Storage:
    routes, weights = routes_bytes_per_token(facts), weight_sync_bytes(facts, config.rollout.dtype)
    of_step = batch.sampling_rounds * batch.sequences_per_step * (batch.max_sequence_tokens - 1) * routes
    cluster, lora = config.cluster, config.train.lora
    if lora is not None and lora.sync == "adapter":
        weights = adapter_elements(facts, lora) * DTYPE_BYTES[config.train.dtype]
    # Sequences of further sampling rounds are not trained on, so their routes are not read.
    read = of_step // batch.sampling_rounds
    share = node_share(layout, layout.world_size if cluster is None else cluster.gpus_per_node)
    return Storage(
        routes_bytes_per_token=routes,
        max_routes_bytes_per_step=of_step,
        max_routes_bytes_per_node=round(read * share),
        checkpoint_bytes=checkpoint_bytes(facts, config.train),
        checkpoints=config.checkpoint.keep + 1 + (config.eval.best is not None),
        disk_gb_per_second=cluster.links_gb_per_second.get("disk") if cluster else None,
        grace_seconds=config.checkpoint.grace_seconds,
        weight_sync_bytes=weights,
        weight_bucket_bytes=weight_bucket_bytes(facts, config.rollout.dtype, config.rollout.weight_bucket_mib),
        sync_seconds={
            name: weights / (speed * 1e9) for name, speed in (cluster.links_gb_per_second if cluster else {}).items()
        },
    )
