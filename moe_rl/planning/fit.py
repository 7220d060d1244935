"""Finds what does not fit into memory or on disk, and says what to change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from moe_rl.config.check_files import existing_folder
from moe_rl.config.schema import Config
from moe_rl.errors import Problem, describe
from moe_rl.planning.cluster_plan import Plan, Stage


def transfer_problems(plan: Plan) -> list[Problem]:
    """Say why weights cannot reach the samplers; empty when they can."""
    return [plan.transfer.problem] if plan.transfer.problem else []


def memory_problems(plan: Plan) -> list[Problem]:
    """Return one message for each thing that does not fit; empty when everything fits or no cluster is given."""
    limit = plan.limit_bytes
    if limit is None:
        return []
    found = []
    worst = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].total_bytes)
    if plan.stages[worst].total_bytes > limit:
        found.append(
            describe(
                "the model and its activations do not fit on a rank",
                where={"key": "cluster.gpu_memory_gib", "stage": worst},
                got=f"{plan.stages[worst].total_bytes / 2**30:.1f} GiB",
                expected=f"at most {limit / 2**30:.1f} GiB without cluster.reserved_gib",
                do=_remedy(plan, plan.stages[worst]),
                fault="trainer",
            )
        )
    if plan.sampler.total_bytes > limit:
        found.append(
            describe(
                "weights, KV cache and arriving weights do not fit on a GPU of a sampler",
                where={"key": "cluster.gpu_memory_gib"},
                got=f"{plan.sampler.weight_bytes / 2**30:.1f} + {plan.sampler.kv_cache_bytes / 2**30:.1f} + "
                f"{plan.sampler.sync_bytes / 2**30:.1f} GiB",
                expected=f"at most {limit / 2**30:.1f} GiB without cluster.reserved_gib",
                do="lower rollout.kv_cache_mib"
                if plan.sampler.weight_bytes < limit
                else "raise cluster.gpus_per_engine: the weights alone are too large",
                fault="sampler",
            )
        )
    elif plan.beside and plan.stages[worst].total_bytes <= limit < plan.shared_bytes:
        found.append(
            describe(
                "a rank and an engine do not fit on the GPU that they share",
                where={"key": "cluster.gpu_memory_gib"},
                got=f"{plan.shared_bytes / 2**30:.1f} GiB",
                expected=f"at most {limit / 2**30:.1f} GiB without cluster.reserved_gib",
                do=("" if plan.sleeps else "set rollout.sleep_level, ")
                + "lower rollout.kv_cache_mib, use more ranks, keep less of the optimizer on the GPU "
                "(docs/howto/one_node.md), or name servers in rollout.servers",
                fault="shared",
            )
        )
    if plan.sampler.fitting == 0:
        found.append(
            describe(
                "not one sequence of full length fits",
                where={"key": "rollout.kv_cache_mib"},
                got=f"{plan.sampler.kv_tokens:,} tokens",
                expected=f"at least {plan.batch.max_sequence_tokens:,}",
                do="raise it",
            )
        )
    return found


def _remedy(plan: Plan, stage: Stage) -> str:
    """Say what would lower the largest part of a rank's memory."""
    memory, activations = stage.memory, stage.activations
    parts = {
        "use more ranks, which divide the optimizer state": memory.optimizer_bytes,
        "raise parallel.expert, or parallel.pipeline": memory.parameter_bytes + memory.main_grad_bytes,
        "set objective.kl_coef to 0": memory.reference_bytes,
        "raise parallel.tensor, which divides the vocabulary, or lower train.microbatch_tokens": activations.head_bytes,
        "lower train.microbatch_tokens or raise parallel.context"
        if plan.recompute == "uniform"
        else "set train.recompute to uniform": activations.peak_bytes - activations.head_bytes,
    }
    if not plan.distributed_optimizer:
        parts["set train.distributed_optimizer"] = parts.pop("use more ranks, which divide the optimizer state")
    return max(parts, key=parts.__getitem__)


def disk_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the disk of run.runs_dir is too full for the checkpoints that the run keeps."""
    free = shutil.disk_usage(existing_folder(config.run.runs_dir)).free
    count, each = plan.storage.checkpoints, plan.storage.checkpoint_bytes
    if free < count * each:
        yield describe(
            f"not enough free disk for {count} checkpoints: those that are kept, and the one that is written",
            where={"key": "run.runs_dir", "folder": config.run.runs_dir},
            got=f"{free:,} bytes",
            expected=f"at least {count * each:,}",
            do="free some space, set run.runs_dir or lower checkpoint.keep",
        )
