"""Computes what a plan says beside the ranks' memory: batch sizes, the memory of the samplers, and the bytes that leave
a rank: routes, checkpoints, weight transfers, and tokens sent to experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moe_rl.config.layout import Layout, make_layout
from moe_rl.config.schema import Config
from moe_rl.config.training import LoraConfig, ParallelConfig, TrainConfig
from moe_rl.errors import Problem, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import expected_tensors, layer_weights, parameter_count
from moe_rl.models.peft import adapter_tensors
from moe_rl.planning.memory import DTYPE_BYTES, state_bytes
from moe_rl.planning.packing import padded_length, row_multiple
from moe_rl.planning.parameters import adapter_buffers
from moe_rl.trace import TraceSpec
from moe_rl.trace.frame import MAX_AUX_BYTES


@dataclass(frozen=True, slots=True)
class Storage:
    """Holds the bytes that leave a rank's memory.

    Attributes:
        routes_*: raw ids, one row per forwarded token. Those of a node are the ones that its ranks read.
        checkpoint_bytes: parameters and optimizer state of the whole model.
        export_bytes: weights of the whole model as `export.every_steps` writes them.
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
    export_bytes: int
    checkpoints: int
    disk_gb_per_second: float | None
    grace_seconds: float
    weight_sync_bytes: int
    weight_bucket_bytes: int
    sync_seconds: dict[str, float]


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
    trained = parameter_count(facts).total if train.lora is None else trained_elements(facts, train.lora)
    return trained * (DTYPE_BYTES[train.dtype] + state_bytes(train).stored)


def trained_elements(facts: ModelFacts, lora: LoraConfig) -> int:
    """Return the elements of all adapters as a single rank holds them: those that a layer's experts share, once."""
    alone = make_layout(ParallelConfig(), facts, 1)
    return sum(buffer.elements for buffer in adapter_buffers(facts, alone, range(facts.layers), lora))


def adapter_elements(facts: ModelFacts, lora: LoraConfig) -> int:
    """Return the elements of all adapters as they are sent: those that a layer's experts share, once for each."""
    return sum(map(math.prod, adapter_tensors(facts, lora.rank, lora.targets).values()))


def weight_sync_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of a weight transfer to one engine: every parameter once, in the sampler's precision."""
    return parameter_count(facts).total * DTYPE_BYTES[dtype]


def weight_bucket_bytes(facts: ModelFacts, dtype: str, bucket_mib: float) -> int:
    """Return the bytes of the bucket, or of the largest weight, which is not divided; at most all weights of the
    model."""
    largest = max(math.prod(shape) for shape in expected_tensors(facts).values())
    return min(max(int(bucket_mib * 2**20), largest * DTYPE_BYTES[dtype]), weight_sync_bytes(facts, dtype))


def checkpoints_to_come(config: Config, done: int = 0, replaced: int = 0) -> int:
    """Return by how many the checkpoints of a run grow, at most: to those that it keeps and the one that is written.

    Args:
        done: steps that the run has made. It saves only in the others.
        replaced: number of checkpoints that are there already, which new ones replace.
    """
    best = config.eval.best is not None
    every = 1 if best else config.checkpoint.every_steps
    saves = -(-config.run.steps // every) - done // every
    return max(1, min(config.checkpoint.keep + 1 + best - replaced, saves))


def make_storage(config: Config, facts: ModelFacts, layout: Layout, batch: Batch) -> Storage:
    routes, weights = TraceSpec.of(facts).row_bytes, weight_sync_bytes(facts, config.rollout.dtype)
    of_step = batch.sampling_rounds * batch.sequences_per_step * (batch.max_sequence_tokens - 1) * routes
    cluster, lora = config.cluster, config.train.lora
    links = cluster.links_gb_per_second if cluster else {}
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
        export_bytes=weight_sync_bytes(facts, config.train.dtype),
        checkpoints=checkpoints_to_come(config),
        disk_gb_per_second=links.get("disk"),
        grace_seconds=config.checkpoint.grace_seconds,
        weight_sync_bytes=weights,
        weight_bucket_bytes=weight_bucket_bytes(facts, config.rollout.dtype, config.rollout.weight_bucket_mib),
        sync_seconds={name: weights / (speed * 1e9) for name, speed in links.items()},
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the batch sizes of a run.

    Attributes:
        max_sequence_tokens: longest prompt plus longest completion.
        whole: every completion is one sequence. False: an episode may have branches, or a completion segments, which
            are not counted.
        max_microbatches: the most that a rank has per update.
        microbatch_rows: rows of a full microbatch, on all its context-parallel ranks together.
        prompts_per_epoch: number of prompts in task.train. None if unknown; the values that depend on it are then None
            too.
        epochs: with one sampling round per step.
        endless: a source of task.train generates prompts without end, so there are no epochs.
    """

    sequences_per_step: int
    groups_per_update: int
    sequences_per_update: int
    max_sequence_tokens: int
    whole: bool
    max_tokens_per_step: int
    max_microbatches: int
    microbatch_rows: int
    steps: int
    updates: int
    sampling_rounds: int
    prompts_per_epoch: int | None
    steps_per_epoch: float | None
    max_tokens_per_epoch: int | None
    epochs: float | None
    endless: bool


def make_batch(config: Config, layout: Layout, prompts: int | None) -> Batch:
    """Compute the sizes. prompts is the number of prompts in task.train.

    Numbers that do not divide evenly are rounded up here; `check.problems` refuses them.
    """
    run, rollout, train = config.run, config.rollout, config.train
    sequences = rollout.prompts_per_step * rollout.group_size
    groups_per_update = -(-rollout.prompts_per_step // train.updates_per_step)
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    per_microbatch = max(1, train.microbatch_tokens // longest)
    per_rank = -(-groups_per_update * rollout.group_size // layout.data)
    cut = config.pipeline.by_group and config.pipeline.segments == "exact" and not rollout.stop
    return Batch(
        sequences_per_step=sequences,
        groups_per_update=groups_per_update,
        sequences_per_update=groups_per_update * rollout.group_size,
        max_sequence_tokens=longest,
        whole=config.task.environment is None and not cut,
        max_tokens_per_step=sequences * longest,
        max_microbatches=-(-per_rank // per_microbatch),
        microbatch_rows=padded_length(train.microbatch_tokens, layout.context, row_multiple(train, config.parallel)),
        steps=run.steps,
        updates=run.steps * train.updates_per_step,
        sampling_rounds=rollout.dynamic_sampling_rounds,
        prompts_per_epoch=prompts,
        steps_per_epoch=prompts / rollout.prompts_per_step if prompts else None,
        max_tokens_per_epoch=prompts * rollout.group_size * longest if prompts else None,
        epochs=run.steps * rollout.prompts_per_step / prompts if prompts else None,
        endless=any(source.kind == "generator" for source in config.task.train),
    )


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Holds the memory of a sampler's GPU, or of the host where there is no GPU, in bytes.

    Attributes:
        nodes_per_engine: nodes that an engine spans.
        kv_tokens: tokens that the KV cache of an engine holds.
        max_concurrent: sequences that an engine may decode at once, whether they fit or not.
        fitting: sequences of full length that fit.
        sync_bytes: what arrives of new weights and is kept until its layer is complete, at most.
    """

    engines: int
    gpus_per_engine: int
    nodes_per_engine: int
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
    engines, gpus, nodes = max(rollout.engines, len(rollout.servers)), 1, 1
    if config.cluster is not None:
        engines, gpus = config.cluster.engines, config.cluster.gpus_per_engine
        nodes = config.cluster.nodes_per_engine
    per_token = kv_bytes_per_token(facts, rollout.dtype, gpus)
    tokens = (rollout.kv_cache_mib << 20) // per_token
    bucket, exporting = int(rollout.weight_bucket_mib * 2**20), config.parallel.expert
    arriving = sync_bytes(facts, rollout.dtype, gpus, exporting=exporting, bucket=bucket, largest=largest_bucket)
    return SamplerMemory(
        engines=engines,
        gpus_per_engine=gpus,
        nodes_per_engine=nodes,
        weight_bytes=weight_bytes(facts, rollout.dtype, gpus),
        kv_cache_bytes=rollout.kv_cache_mib << 20,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        max_concurrent=min(rollout.max_concurrent, -(-batch.sequences_per_step // engines)),
        fitting=tokens // batch.max_sequence_tokens,
        sync_bytes=arriving,
    )


def record_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """Yield a problem for each setting with which the record of the longest sequence would be too large to store."""
    rollout, sampled = config.rollout, config.rollout.max_completion_tokens
    rows, fraction = rollout.max_prompt_tokens + sampled, rollout.router_logits_fraction
    # Rows are drawn one by one: six standard deviations more than the mean.
    drawn = min(rows, fraction * rows + 6 * math.sqrt(fraction * (1 - fraction) * rows))
    logits = 4 * len(facts.moe_layers) * facts.num_experts * drawn
    head = 4 * (config.objective.score_centering or 0) * sampled
    for key, got, needed in (
        ("rollout.router_logits_fraction", fraction, logits),
        ("objective.score_centering", config.objective.score_centering, head),
    ):
        if needed > MAX_AUX_BYTES:
            yield describe(
                "the record of a long sequence would be too large to store",
                where={"key": key},
                got=f"{got}: {needed / 2**20:.0f} MiB at rollout.max_prompt_tokens + rollout.max_completion_tokens "
                f"= {rows} tokens",
                expected=f"at most {MAX_AUX_BYTES >> 20} MiB",
                do="lower it, or rollout.max_completion_tokens",
            )
