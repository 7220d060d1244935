"""Checks which settings of `train.megatron`, `train.megatron_optimizer` and `rollout.vllm` go together, and with the
rest of a config. `moe_rl.config.passed_on` checks each for itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_rl.config.bypasses import NO_PLAN
from moe_rl.config.schema import Config
from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.errors import Problem, describe
from moe_rl.models.facts import ModelFacts

# Fields of Megatron that have an effect only with another one: their pattern, and that one's name.
_NEEDS = {
    "recompute_(modules|method|num_layers)": "recompute_granularity",
    r"fp8_(recipe|margin|amax_\w+|wgrad|output_proj|dot_\w+|multi_\w+|quantizer_factory)": "fp8",
    "tp_only_amax_red|first_last_layers_bf16": "fp8",
    r"num_layers_at_\w+_in_bf16": "first_last_layers_bf16",
    "fp4_(recipe|quantizer_factory)": "fp4",
    r"cpu_offloading_\w+": "cpu_offloading",
    r"offload_modules|min_offloaded_tensor_size|activation_offload_fraction|delta_offload_\w+|"
    r"fine_grained_offloading_\w+": "fine_grained_activation_offloading",
}


def dispatcher_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each dispatcher setting that has no effect, or does not go with plans or moved experts."""
    passed, kind = config.train.megatron, config.train.megatron.get("moe_token_dispatcher_type")
    for name, (frees, why) in NO_PLAN.items():
        if frees(passed.get(name)) and config.replay.mode != "off" and config.replay.plan is not False:
            yield describe(
                why,
                where={"key": f"train.megatron.{name}", "given": f"replay.plan is {config.replay.plan or 'null'}"},
                got=passed[name],
                do="set replay.plan to false, or remove it",
            )
    if kind == "flex" and config.placement.experts != "natural":
        yield describe(
            "the flex dispatcher does not know where experts were moved",
            where={"key": "placement.experts", "given": "train.megatron.moe_token_dispatcher_type is flex"},
            got=config.placement.experts,
            expected="natural",
        )
    for name in passed:
        if re.match("moe_(flex|hybridep|permute_fusion_into)", name) and kind != "flex":
            yield describe(
                "only the flex dispatcher reads it",
                where={"key": f"train.megatron.{name}"},
                got=passed[name],
                do="remove it, or set train.megatron.moe_token_dispatcher_type to flex",
            )


def combination_problems(
    train: TrainConfig, parallel: ParallelConfig, facts: ModelFacts | None, *, experts: str = "natural"
) -> Iterator[Problem]:
    """Yield a problem for each combination that has no effect, computes something wrong, or hides Adam's state.

    Args:
        facts: The model's, None if they are not known.
        experts: `placement.experts`.
    """
    passed = train.megatron_optimizer
    moves, away = bool(passed.get("optimizer_cpu_offload")), passed.get("optimizer_offload_fraction", 0.0)
    overlap, summed = "overlap_cpu_optimizer_d2h_h2d", "grad_reduce_in_fp32"
    if isinstance(away, int | float) and not 0 <= away <= 1:
        yield describe(
            "not a fraction of the parameters",
            where={"key": "train.megatron_optimizer.optimizer_offload_fraction"},
            got=away,
            expected="0 to 1",
        )
    elif isinstance(away, int | float) and moves != (away > 0):
        yield describe(
            "no state would be in host memory" if moves else "has an effect only with optimizer_cpu_offload",
            where={"key": "train.megatron_optimizer.optimizer_offload_fraction"},
            got=away,
            expected="above 0, at most 1" if moves else 0,
            do="set both keys, or remove both",
        )
    elif isinstance(away, int | float) and 0 < away < 1 and passed.get(overlap) and not passed.get(summed, True):
        yield describe(
            "Adam would not wait for the gradients of the parameters whose state stays on the GPU",
            where={"key": f"train.megatron_optimizer.{overlap}", "given": f"optimizer_offload_fraction is {away}"},
            got=True,
            expected=False,
            do=f"remove it, or set optimizer_offload_fraction to 1.0 or {summed} to true",
        )
    if "bucket_size" in passed and not passed.get("overlap_grad_reduce"):
        yield describe(
            "has an effect only where gradients are summed during the backward pass, by default on GPUs alone",
            where={"key": "train.megatron_optimizer.bucket_size"},
            got=passed["bucket_size"],
            do="remove it, or set train.megatron_optimizer.overlap_grad_reduce to true as well",
        )
    apart = [key for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload") if passed.get(key)]
    if apart == ["optimizer_cpu_offload"]:
        yield describe(
            "without the precision-aware optimizer the float32 weights would stay on the GPU, too",
            where={"key": "train.megatron_optimizer.use_precision_aware_optimizer", "given": f"{apart[0]} is true"},
            got=False,
            expected=True,
        )
    if moves and passed.get("decoupled_weight_decay") is False:
        yield describe(
            "Adam in host memory decays weights in no other way",
            where={"key": "train.megatron_optimizer.decoupled_weight_decay", "given": "optimizer_cpu_offload is true"},
            got=False,
            expected=True,
        )
    if "use_precision_aware_optimizer" in apart and train.dtype == "float32":
        yield describe(
            "only bfloat16 weights have main weights beside them",
            where={"key": f"train.megatron_optimizer.{apart[0]}", "given": "train.dtype is float32"},
            got=True,
            expected=False,
            do="remove it, or set train.dtype to bfloat16",
        )
    for key in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if apart != ["use_precision_aware_optimizer"] and passed.get(key) == "bfloat16":
            yield describe(
                "only the precision-aware optimizer on a GPU takes it",
                where={"key": f"train.megatron_optimizer.{key}"},
                got=passed[key],
                expected="float32",
                do="remove it, or set use_precision_aware_optimizer to true, without optimizer_cpu_offload",
            )
    exchange, latent = train.overlap_expert_parallel_comm, facts is None or facts.latent is not None
    batched, remainders = parallel.pipeline > parallel.virtual_pipeline == 1, apart == ["use_precision_aware_optimizer"]
    for section, key, idle, needed, there in (
        ("megatron", "high_priority_a2a_comm_stream", False, "train.overlap_expert_parallel_comm", exchange),
        ("megatron", "batch_p2p_sync", True, "parallel.pipeline above 1, without parallel.virtual_pipeline", batched),
        ("megatron", "mla_down_proj_fusion", False, "a model.path whose attention is latent", latent),
        *(
            ("megatron", key, False, f"train.megatron.{needed}", bool(train.megatron.get(needed)))
            for key in train.megatron
            for pattern, needed in _NEEDS.items()
            if re.fullmatch(pattern, key) and (needed != "recompute_granularity" or train.recompute == "none")
        ),
        ("megatron_optimizer", summed, True, "train.dtype bfloat16", train.dtype == "bfloat16"),
        ("megatron_optimizer", "pin_cpu_grads", False, "optimizer_cpu_offload", moves),
        ("megatron_optimizer", overlap, False, "optimizer_cpu_offload", moves),
        ("megatron_optimizer", "decoupled_min_lr", False, "decoupled_lr", passed.get("decoupled_lr") is not None),
        (
            "megatron_optimizer",
            "store_param_remainders",
            False,
            "use_precision_aware_optimizer, without optimizer_cpu_offload",
            remainders,
        ),
    ):
        value = getattr(train, section).get(key)
        if not (there or value is None or value is idle):
            yield describe(
                f"has an effect only with {needed}",
                where={"key": f"train.{section}.{key}"},
                got=value,
                do=f"remove it, or set {needed}",
            )
    low = [key for key in ("fp8", "fp4") if train.megatron.get(key)]
    recipe = train.megatron.get("fp8_recipe", "delayed")
    if low and (low != ["fp8"] or recipe not in ("delayed", "tensorwise")):
        yield describe(
            "rows are padded to a multiple of 16 on each rank, and this format needs more",
            where={"key": "train.megatron.fp8_recipe" if low == ["fp8"] else "train.megatron.fp4"},
            got=recipe if low == ["fp8"] else train.megatron["fp4"],
            expected="fp8 with the recipe delayed or tensorwise",
        )
    modules = train.megatron.get("recompute_modules")
    again = isinstance(modules, list) and "moe" in modules
    if low and (again or train.recompute == "moe"):
        yield describe(
            "experts would be recomputed in another precision than the forward pass had",
            where={
                "key": "train.megatron.recompute_modules" if again else "train.recompute",
                "given": f"train.megatron.{low[0]} is set",
            },
            got="moe",
            do=f"remove moe, or train.megatron.{low[0]}",
        )
    if facts is not None and facts.latent is not None and train.megatron.get("apply_rope_fusion"):
        yield describe(
            "latent attention takes its angles from moe_rl, which has them for packed sequences alone",
            where={"key": "train.megatron.apply_rope_fusion"},
            got=True,
            expected=False,
        )
    if apart and experts != "natural":
        yield describe(
            "experts cannot move, because the optimizer holds their state itself",
            where={"key": "placement.experts", "given": f"train.megatron_optimizer.{apart[0]} is true"},
            got=experts,
            expected="natural",
        )
    if apart and not train.distributed_optimizer:
        yield describe(
            "only the distributed optimizer can do this",
            where={"key": "train.distributed_optimizer", "given": f"train.megatron_optimizer.{apart[0]} is true"},
            got=False,
            expected=True,
        )


def draft_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if rows of drafts would be counted that are never written, see `vllm.arguments.synchronous`, or
    if more than routes would be recorded, see `vllm.extras`."""
    passed, rollout = config.rollout.vllm, config.rollout
    drafts = [name for name in passed if re.match("spec(ulative)?_", name) and passed[name] is not None]
    for key, value in (
        ("rollout.keep_sampling_mask", rollout.keep_sampling_mask),
        ("objective.score_centering", config.objective.score_centering),
        ("rollout.router_logits_fraction", rollout.router_logits_fraction),
    ):
        if drafts and value:
            yield describe(
                "a step with drafts draws several tokens of a request, and only their routes are recorded",
                where={"key": key, "given": f"rollout.vllm.{drafts[0]} is set"},
                got=value,
                do=f"remove it, or rollout.vllm.{drafts[0]}",
            )
    if drafts and passed.get("async_scheduling") and rollout.capture != "native":
        yield describe(
            "an asynchronous scheduler counts drafts before it knows which are accepted",
            where={"key": "rollout.vllm.async_scheduling", "given": f"rollout.vllm.{drafts[0]} is set"},
            got=passed["async_scheduling"],
            expected=False,
            do="remove it",
        )
