"""Formats the plan as an aligned table."""

from __future__ import annotations

from collections.abc import Iterable

from moe_rl.planning.cluster_plan import Plan, Stage
from moe_rl.planning.sampler_memory import Storage
from moe_rl.planning.side_balance import SideBalance

Row = tuple[str, str | int, str]
"""A row: label, value, note. A number is written with commas."""


def render(plan: Plan, balance: SideBalance | None = None) -> str:
    """Format sections of rows, with values aligned to the right. balance: None if no speeds are known."""
    sections: dict[str, list[Row]] = {
        "ranks": _ranks(plan),
        "a step": _step(plan),
        "the run": _run(plan),
        "the model": _model(plan),
        "memory per rank": _memory(plan),
        "the sampler": _sampler(plan),
        "storage": _storage(plan),
    }
    if balance is not None:
        sections["samplers and trainers"] = _balance(balance)
    if not plan.samples:
        del sections["the sampler"]
    rows = iter(aligned(row for section in sections.values() for row in section))
    lines = []
    for title, section in sections.items():
        lines += [title, *(next(rows) for _ in section)]
    if plan.not_planned:
        lines.append(f"not planned: {', '.join(plan.not_planned)}")
    return "\n".join(lines)


def aligned(rows: Iterable[Row]) -> list[str]:
    """Format rows as lines, with labels aligned to the left and values to the right."""
    texts = [(label, value if isinstance(value, str) else f"{value:,}", note) for label, value, note in rows]
    labels, values = (max(len(row[column]) for row in texts) for column in (0, 1))
    return [f"  {label:<{labels}}  {value:>{values}}  {note}".rstrip() for label, value, note in texts]


def _ranks(plan: Plan) -> list[Row]:
    layout = plan.layout
    return [
        ("world size", layout.world_size, ""),
        ("pipeline stages", layout.pipeline, f"{layout.virtual_pipeline:,} runs of layers each"),
        ("tensor parallel", layout.tensor, "ranks that share dense matrices and the tokens of a sequence"),
        ("context parallel", layout.context, "ranks that share only the tokens of a sequence"),
        ("data parallel", layout.data, "each with its own sequences"),
        ("expert parallel", layout.expert, "ranks that share the experts"),
        ("expert tensor parallel", layout.expert_tensor, "ranks that share each expert's matrices"),
        ("copies of each expert", layout.expert_data, ""),
        ("experts per rank", layout.experts_per_rank, f"of {plan.model.num_experts:,}, top {plan.model.top_k}"),
    ]


def _step(plan: Plan) -> list[Row]:
    batch, pairs = plan.batch, f"(token, expert) pairs of a rank and layer, {bytes_text(plan.dispatch_bytes)}"
    return [
        ("sequences", batch.sequences_per_step, ""),
        ("tokens", batch.max_tokens_per_step, f"at most{_uncounted(plan)}"),
        ("longest sequence", batch.max_sequence_tokens, "tokens, prompt and completion"),
        ("groups per update", batch.groups_per_update, f"{batch.sequences_per_update:,} sequences"),
        ("microbatches", batch.max_microbatches, "per rank and update, if all are full length"),
        ("rows per microbatch", batch.microbatch_rows, f"{batch.microbatch_rows // plan.layout.context:,} on a rank"),
        ("dispatched rows", plan.fullest.activations.dispatched_rows, f"{pairs} each way, if loaded evenly"),
    ]


def _run(plan: Plan) -> list[Row]:
    batch, rounds = plan.batch, plan.batch.sampling_rounds
    unknown = "none: the prompts are endless" if batch.endless else "unknown: task.train cannot be read"
    epochs = unknown if batch.epochs is None else f"{batch.epochs:.2f}"
    steps, most = batch.steps_per_epoch, f"at most{_uncounted(plan)}"
    return [
        ("steps", batch.steps, ""),
        ("optimizer updates", batch.updates, ""),
        ("prompts per epoch", unknown if batch.prompts_per_epoch is None else batch.prompts_per_epoch, ""),
        ("steps per epoch", unknown if steps is None else f"{steps:,.1f}", ""),
        ("tokens per epoch", unknown if batch.max_tokens_per_epoch is None else batch.max_tokens_per_epoch, most),
        ("epochs", epochs, f"up to {rounds} times that" if rounds > 1 else ""),
    ]


def _model(plan: Plan) -> list[Row]:
    model = plan.model
    return [
        ("parameters", _count(model.parameters), f"{_count(model.expert_parameters)} in experts"),
        ("MoE layers", model.moe_layers, f"of {model.layers:,}"),
        ("parameters per rank", _count(plan.fullest.memory.parameters), "of the fullest stage"),
    ]


def _memory(plan: Plan) -> list[Row]:
    stage = plan.fullest
    memory, activations = stage.memory, stage.activations
    sharing = "sharded over its data-parallel group" if plan.distributed_optimizer else "not sharded"
    kept = f"recompute {plan.recompute}: {activations.in_flight:.4g} microbatches with "
    kept += bytes_text(activations.kept_bytes)
    rows = [
        ("parameters", bytes_text(memory.parameter_bytes), "frozen" if memory.adapter_bytes else ""),
        *((("adapters", bytes_text(memory.adapter_bytes), ""),) if memory.adapter_bytes else ()),
        ("main gradients", bytes_text(memory.main_grad_bytes), "of adapters" if memory.adapter_bytes else ""),
        ("optimizer state", bytes_text(memory.optimizer_bytes), sharing),
        *((("  in host memory", bytes_text(memory.host_bytes), "of each rank"),) if memory.host_bytes else ()),
        ("reference model", bytes_text(memory.reference_bytes), "frozen" if memory.reference_bytes else "none"),
        ("activations", bytes_text(activations.peak_bytes), f"{kept}, then the largest peak on top"),
        *((("  of adapters", bytes_text(activations.adapter_bytes), "of one layer"),) if memory.adapter_bytes else ()),
        ("routes and plans", bytes_text(stage.route_bytes), f"of all microbatches of a step{_uncounted(plan)}"),
        ("logits of these rows", bytes_text(activations.head_bytes), "with the last norm"),
        ("together", bytes_text(stage.total_bytes), _verdict(plan, stage.total_bytes)),
    ]
    if len(plan.stages) > 1:
        rows += [_stage(number, stage_plan) for number, stage_plan in enumerate(plan.stages)]
    return rows


def _stage(number: int, stage: Stage) -> Row:
    memory = stage.memory
    parts = f"model {bytes_text(memory.model_bytes)}, activations {bytes_text(stage.activations.peak_bytes)}"
    layers = "no layers"
    if memory.layers:
        layers = f"{len(memory.layers)} layers from {memory.layers[0]}, {memory.moe_layers} with experts"
    note = f"{layers}; {_count(memory.parameters)} parameters; {parts}"
    return f"stage {number}", bytes_text(stage.total_bytes), note


def _verdict(plan: Plan, total: int) -> str:
    if plan.limit_bytes is None:
        return "no cluster to compare with"
    comparison = "fits" if total <= plan.limit_bytes else "DOES NOT FIT"
    return f"{comparison}: a GPU has {bytes_text(plan.limit_bytes)} available"


def _sampler(plan: Plan) -> list[Row]:
    sampler, shared, nodes = plan.sampler, plan.shared_bytes, plan.sampler.nodes_per_engine
    fits = "fit" if sampler.fits_max_concurrent else "not all fit at full length: the sampler will preempt some"
    return [
        ("engines", sampler.engines, f"of {sampler.gpus_per_engine:,} GPUs" if plan.limit_bytes else ""),
        *([("nodes per engine", nodes, f"each starts moe-rl serve --nnodes {nodes}")] if nodes > 1 else []),
        ("weights", bytes_text(sampler.weight_bytes), "on each GPU" if plan.limit_bytes else ""),
        ("KV cache", sampler.kv_tokens, f"tokens of {sampler.kv_bytes_per_token:,} B, per engine"),
        ("sequences at once", sampler.max_concurrent, f"{fits}; {sampler.fitting:,} fit, per engine"),
        ("new weights", bytes_text(sampler.sync_bytes), "that arrive and wait for the rest of their layer, at most"),
        ("per GPU", bytes_text(sampler.total_bytes), _verdict(plan, sampler.total_bytes)),
        *([("with a rank on it", bytes_text(shared), _verdict(plan, shared))] if plan.beside else []),
        ("weight sync", bytes_text(plan.storage.weight_sync_bytes), "to each engine, at each transfer"),
        ("weights travel by", plan.transfer.way or "no way", plan.transfer.why),
        ("weight bucket", bytes_text(plan.storage.weight_bucket_bytes), "largest amount that a rank holds on the way"),
        *(
            (f"over {name}", f"{seconds:,.2f} s", "lower bound from the link only")
            for name, seconds in plan.storage.sync_seconds.items()
        ),
    ]


def _storage(plan: Plan) -> list[Row]:
    storage, copy = plan.storage, max(stage.memory.checkpoint_copy_bytes for stage in plan.stages)
    return [
        ("routes per token", f"{storage.routes_bytes_per_token:,} B", "raw"),
        ("routes per step", bytes_text(storage.max_routes_bytes_per_step), f"raw, at most{_uncounted(plan)}"),
        ("routes per node", bytes_text(storage.max_routes_bytes_per_node), "of a step, read by its ranks"),
        ("one checkpoint", bytes_text(storage.checkpoint_bytes), _disk_times(storage)),
        ("one export", bytes_text(storage.export_bytes), _export_time(storage)),
        ("checkpoints", bytes_text(storage.checkpoints * storage.checkpoint_bytes), f"{storage.checkpoints}, at most"),
        ("a rank's copy of it", bytes_text(copy), "in host memory while it is written, at most; from a GPU it stays"),
    ]


def _export_time(storage: Storage) -> str:
    speed = storage.disk_gb_per_second
    seconds = f", {storage.export_bytes / (speed * 1e9):,.0f} s to write" if speed else ""
    return f"weights alone{seconds} (export.every_steps)"


def _disk_times(storage: Storage) -> str:
    """Say how long the disk of the cluster takes."""
    if not (speed := storage.disk_gb_per_second):
        return ""
    seconds, grace = storage.checkpoint_bytes / (speed * 1e9), storage.grace_seconds
    late = f"; a stop leaves {grace:g} s (checkpoint.grace_seconds), too few to save" if seconds > grace else ""
    return f"{seconds:,.0f} s to write, and to resume, at {speed:g} GB/s{late}"


def _balance(balance: SideBalance) -> list[Row]:
    speeds, unit = balance.speeds, "completion tokens/s of a GPU that"
    of = "of 1 GPU" if balance.gpus_per_engine == 1 else f"of {balance.gpus_per_engine:,} GPUs"
    needed = f"{of}, so that {balance.trainers:,} GPUs that train never wait"
    idle = [f"if both sides work at once; {share:.0%} if each waits for the other" for share in balance.idle_in_turns]
    return [
        ("speed of sampling", f"{speeds.sampled:,.0f}", f"{unit} samples, {speeds.source}"),
        ("speed of training", f"{speeds.trained:,.0f}", f"{unit} trains"),
        ("samplers for a trainer", f"{balance.ratio:,.2f}", "GPUs that sample for each that trains keep both busy"),
        ("engines for these trainers", balance.engines, needed),
        ("planned", f"{balance.samplers:,} : {balance.trainers:,}", "GPUs that sample, and that train"),
        ("samplers idle", f"{balance.idle_overlapped[0]:.0%}", idle[0]),
        ("trainers idle", f"{balance.idle_overlapped[1]:.0%}", idle[1]),
    ]


def _uncounted(plan: Plan) -> str:
    return "" if plan.batch.whole else ", not counting branches and segments"


def bytes_text(count: int) -> str:
    """Format bytes in the binary unit that keeps at least one digit before the point."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} B" if unit == "B" else f"{value:,.1f} {unit}"


def _count(count: int) -> str:
    return f"{count / 1e9:,.2f} bn" if count >= 1e9 else f"{count / 1e6:,.2f} M" if count >= 1e5 else f"{count:,}"
