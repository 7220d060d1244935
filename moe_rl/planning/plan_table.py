"""The plan as an aligned table for people."""

from __future__ import annotations

from moe_rl.planning.plan import Plan

Row = tuple[str, str, str]
"""Label, value, note."""


def render(plan: Plan) -> str:
    """Sections of rows, their values aligned to the right."""
    sections: dict[str, list[Row]] = {
        "ranks": _ranks(plan),
        "a step": _step(plan),
        "the run": _run(plan),
        "the model": _model(plan),
        "memory per rank": _memory(plan),
        "the sampler": _sampler(plan),
        "storage": _storage(plan),
    }
    rows = [row for section in sections.values() for row in section]
    labels, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = []
    for title, section in sections.items():
        lines.append(title)
        lines += [f"  {label:<{labels}}  {value:>{values}}  {note}".rstrip() for label, value, note in section]
    return "\n".join(lines)


def _ranks(plan: Plan) -> list[Row]:
    layout = plan.layout
    return [
        ("world size", f"{layout.world_size:,}", ""),
        ("pipeline stages", f"{layout.pipeline:,}", f"{layout.virtual_pipeline:,} runs of layers each"),
        ("tensor parallel", f"{layout.tensor:,}", "ranks that share dense matrices and a sequence's tokens"),
        ("context parallel", f"{layout.context:,}", "ranks that share a sequence's tokens alone"),
        ("data parallel", f"{layout.data:,}", "each with sequences of its own"),
        ("expert parallel", f"{layout.expert:,}", "ranks that share the experts"),
        ("expert tensor parallel", f"{layout.expert_tensor:,}", "ranks that share each expert's matrices"),
        ("copies of each expert", f"{layout.expert_data:,}", ""),
        ("experts per rank", f"{layout.experts_per_rank:,}", f"of {plan.model.num_experts:,}, top {plan.model.top_k}"),
    ]


def _step(plan: Plan) -> list[Row]:
    batch = plan.batch
    return [
        ("sequences", f"{batch.sequences_per_step:,}", ""),
        ("tokens", f"{batch.max_tokens_per_step:,}", "at most"),
        ("longest sequence", f"{batch.max_sequence_tokens:,}", "tokens, prompt and completion"),
        ("groups per update", f"{batch.groups_per_update:,}", f"{batch.sequences_per_update:,} sequences"),
        ("microbatches", f"{batch.max_microbatches:,}", "per rank and update, if all are full length"),
    ]


def _run(plan: Plan) -> list[Row]:
    batch, rounds = plan.batch, plan.batch.sampling_rounds
    epochs = "unknown: task.train cannot be read" if batch.epochs is None else f"{batch.epochs:.2f}"
    return [
        ("steps", f"{batch.steps:,}", ""),
        ("optimizer updates", f"{batch.updates:,}", ""),
        ("prompts per epoch", "unknown" if batch.prompts_per_epoch is None else f"{batch.prompts_per_epoch:,}", ""),
        ("epochs", epochs, f"to {rounds} times that" if rounds > 1 else ""),
    ]


def _model(plan: Plan) -> list[Row]:
    model = plan.model
    return [
        ("parameters", _count(model.parameters), f"{_count(model.expert_parameters)} in experts"),
        ("MoE layers", f"{model.moe_layers:,}", f"of {model.layers:,}"),
        ("parameters per rank", _count(plan.fullest.parameters), ""),
    ]


def _memory(plan: Plan) -> list[Row]:
    stage = plan.fullest
    sharing = "sharded over its data-parallel group" if plan.distributed_optimizer else "not sharded"
    return [
        ("parameters", bytes_text(stage.parameter_bytes), ""),
        ("main gradients", bytes_text(stage.main_grad_bytes), "float32"),
        ("optimizer state", bytes_text(stage.optimizer_bytes), f"float32, {sharing}"),
        ("reference model", bytes_text(stage.reference_bytes), "frozen" if stage.reference_bytes else "none"),
        ("together", bytes_text(stage.model_bytes), "activations come on top"),
    ]


def _sampler(plan: Plan) -> list[Row]:
    sampler = plan.sampler
    fits = "fit" if sampler.fits_max_concurrent else "do not all fit at full length: the sampler will preempt"
    return [
        ("KV cache", f"{sampler.kv_tokens:,}", f"tokens of {sampler.kv_bytes_per_token:,} B"),
        ("sequences at once", f"{sampler.max_concurrent:,}", fits),
        ("weight sync", bytes_text(plan.storage.weight_sync_bytes), "each time"),
    ]


def _storage(plan: Plan) -> list[Row]:
    storage = plan.storage
    return [
        ("routes per token", f"{storage.routes_bytes_per_token:,} B", "raw"),
        ("routes per step", bytes_text(storage.max_routes_bytes_per_step), "raw, at most"),
        ("one checkpoint", bytes_text(storage.checkpoint_bytes), ""),
    ]


def bytes_text(count: int) -> str:
    """Bytes in the binary unit that keeps at least one digit before the point."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} B" if unit == "B" else f"{value:,.1f} {unit}"


def _count(count: int) -> str:
    return f"{count / 1e9:,.2f} bn" if count >= 1e9 else f"{count / 1e6:,.2f} M" if count >= 1e5 else f"{count:,}"
