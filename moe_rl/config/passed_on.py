"""Checks the settings that a config passes on: `train.megatron`, `train.megatron_optimizer` and `rollout.vllm`.

They may name any field of the installed libraries' config classes that moe_rl does not set itself. The fields are read
from the source of these classes, because importing a library would take seconds and needs torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moe_rl.config.bypasses import bypasses
from moe_rl.config.passed_together import combination_problems, dispatcher_problems, draft_problems
from moe_rl.config.schema import Config
from moe_rl.errors import Problem, describe, did_you_mean
from moe_rl.models.facts import ModelFacts

DTYPES = ("float32", "bfloat16")
"""Names of the precisions that a field of type torch.dtype takes. In float16 and uint8, TransformerEngine scales Adam's
moments, and a resume would not restore them bit for bit."""
ATTENTION = ("flash", "fused", "unfused", "auto")
"""Names of Megatron's AttnBackend. Its `local` needs other layers than a run has."""

_OBJECT = "only a program can set it: its value is an object"
_UNREAD = "nothing that a run uses reads it"
_SHAPE = "the checkpoint's config.json decides what the model computes"
_LAYOUT = "parallel decides which rank holds what"
_GPUS = "cluster.gpus_per_engine decides the GPUs of an engine"
_MOVED = "a connector would move KV blocks, and the recorder would not see it"
_COMPARED = "parameters are compared bit for bit with the main weights that the optimizer wrote"
_ADAM = "the optimizer is Adam in float32 or bfloat16"
_NAMED = {"torch.dtype": DTYPES, "AttnBackend": ATTENTION}  # types whose values a config names


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Passed:
    """Describes one mapping.

    Attributes:
        classes: File, relative to the folder of site packages, and name of each class whose fields may be set.
        ours: Fields that moe_rl sets.
        refused: Patterns of further fields, with the reason.
        engine: Pattern of the fields that have an effect only with TransformerEngine.
    """

    classes: tuple[tuple[str, str], ...]
    ours: frozenset[str]
    refused: Mapping[str, str]
    engine: str = "(?!)"


MEGATRON = Passed(
    classes=(
        ("megatron/core/model_parallel_config.py", "ModelParallelConfig"),
        ("megatron/core/transformer/transformer_config.py", "TransformerConfig"),
        ("megatron/core/transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    ours=_words(
        """num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size moe_layer_freq
        num_moe_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups
        moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_dtype
        moe_router_load_balancing_type moe_aux_loss_coeff moe_grouped_gemm normalization
        layernorm_epsilon qk_layernorm add_qkv_bias add_bias_linear softmax_type window_size window_attn_skip_freq
        gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset hidden_dropout
        attention_dropout tensor_model_parallel_size sequence_parallel context_parallel_size
        pipeline_model_parallel_size virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
        overlap_p2p_comm batch_p2p_comm expert_model_parallel_size expert_tensor_parallel_size params_dtype
        pipeline_dtype bf16 perform_initialization variable_seq_lengths calculate_per_token_loss
        finalize_model_grads_func overlap_moe_expert_parallel_comm delay_wgrad_compute q_lora_rank kv_lora_rank
        qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base rope_type rotary_scaling_factor mscale mscale_all_dim
        original_max_position_embeddings beta_fast beta_slow"""
    ),
    refused={
        r"\w+_func|timers|.*init_method|quant_recipe|_cpu_offloading_context": _OBJECT,
        r"(inference|nccl_all_reduce|cuda_graph|mtp|dsa|mamba|linear|init|embedding_init)_\w+|"
        r"(use_inference|use_mamba|delay_offload|config_logger|symmetric|mlp_chunks_for)_\w+|flash_decode|test_mode|"
        r"fp16|enable_autocast|autocast_dtype|cross_entropy\w+|cache_mla_latents|moe_per_layer_logging|"
        r"mlp_chunks_for_\w+|use_cpu_initialization|defer_embedding_wgrad_compute|wgrad_deferral_limit|"
        r"barrier_with_L1_time|log_max_attention_logit|transformer_impl|moe_pad\w+|moe_token_drop_policy|"
        r"moe_(deepep|hybridep)_num_sms|moe_(ncclep|enable_deepep)\w*|masked_softmax_fusion|"
        r"hetereogenous_dist_checkpoint|moe_layer_recompute|rotary_percent|bias_dropout_fusion|"
        r"persist_layer_norm|memory_efficient_layer_norm|deterministic_mode|attention_softmax_in_fp32|"
        r"pipeline_model_parallel_comm_backend|use_fused_weighted_squared_relu|use_te_rng_tracker|"
        r"use_grouped_gemm_for_dense_mlp|fp8_interval": _UNREAD,
        r"tp_comm_\w+": "only Megatron's training script makes the buffers that TransformerEngine needs for it",
        "batch_invariant_mode": "only Megatron's training script turns its matrix products on",
        r"(mup|use_mup|qk_clip|experimental|mrope|heterogeneous)\w*|qk_l2_norm|no_rope_freq|"
        r"apply_\w+(layernorm|scaling)|layernorm_zero_centered_gamma|rotary_interleaved|softmax_scale|"
        r"attention_output_gate|multi_latent_attention|is_hybrid_model|moe_latent_size|moe_shared_expert_gate|"
        r"moe_router_topk_limited_devices|moe_router_quantile\w+|moe_apply_probs_on_input|\w+_interleave_size": _SHAPE,
        r"\w*(gtp|num_weight_shards|in_\w+_pipeline_stage|in_pipeline_split)\w*|hierarchical_context\w+|"
        r"hybrid_context_parallel|max_seqlen_per_dp_cp_rank|mtp_standalone|use_ring_exchange_p2p": _LAYOUT,
        "fp[48]_param": _COMPARED,
        "moe_z_loss_coeff": "its weight would depend on how a batch is cut into microbatches",
        "microbatch_group_size_per_vp_stage": "a pass may have no more microbatches than parallel.pipeline",
        "num_microbatches_with_partial_activation_checkpoints": "all microbatches recompute the same layers",
    },
    engine=r"fp32_residual_connection|(fp8|fp4|use_kitchen|kitchen)\w*|apply_rope_fusion|fused_(single|residual)\w+|"
    r"use_transformer_engine_op_fuser|attention_backend|flash_attention_version|cp_comm_type|tp_only_amax_red|"
    r"\w*offload\w*|\w*grouped_gemm_for\w+|moe_single_grouped_\w+|first_last_layers_bf16|"
    r"num_layers_at_\w+_in_bf16|mla_down_proj_fusion|activation_func_fp8_input_store|"
    r"moe_paged_stash\w*|disable_parameter_transpose_cache|moe_permute_fusion",
)
OPTIMIZER = Passed(
    classes=(
        ("megatron/core/optimizer/optimizer_config.py", "OptimizerConfig"),
        ("megatron/core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
    ours=_words(
        """optimizer lr min_lr adam_beta1 adam_beta2 adam_eps weight_decay clip_grad use_distributed_optimizer bf16
        fp16 params_dtype delay_wgrad_compute"""
    ),
    refused={
        "timers": _OBJECT,
        r"(muon|adaptive_muon|lion|soap|sgd|loss_scale|initial_loss|min_loss)_\w+|loss_scale|hysteresis": _ADAM,
        r"config_logger_dir|barrier_with_L1_time|log_num_zeros_in_grad|optimizer_cuda_graph|main_grads_dtype|"
        r"num_buckets|overlap_param_gather_with_optimizer_step|use_layer_wise_distributed_optimizer|"
        r"use_torch_optimizer_for_cpu_offload|pin_cpu_params": _UNREAD,
        r"\w*fsdp\w*|use_custom_fsdp|\w+_sharding_strategy|keep_fp8_transpose_cache|"
        r"suggested_communication_unit_size|gradient_reduce_div_fusion": "the trainer does not use Megatron's FSDP",
        r"grad_norm_skip_threshold|check_for_\w+": "guards decides which updates are skipped",
        r"(overlap|align)_param_gather": "a step reads the parameters right after its last update",
        r"fp[48]_param_gather|reuse_grad_buf_for_mxfp8_param_ag": _COMPARED,
        "fp8_recipe": "with bfloat16 parameters it has no effect but whole main weights, which the plan does not count",
        "main_params_dtype": "main weights are float32, or the 16 bits that bfloat16 weights lack",
        "average_in_collective": "gradients are sums, because the loss has its global denominator already",
        "num_distributed_optimizer_instances": _LAYOUT,
    },
    engine=r"(fp8|fp4|reuse_grad_buf_for_mxfp8)\w*|store_param_remainders|nccl_ub|disable_symmetric_registration",
)
VLLM = Passed(
    classes=(("vllm/engine/arg_utils.py", "EngineArgs"),),
    ours=_words(
        """model skip_tokenizer_init generation_config logprobs_mode worker_extension_cls scheduler_cls worker_cls
        weight_transfer_config structured_outputs_config load_format
        additional_config enable_return_routed_experts dtype seed max_model_len
        max_num_seqs kv_cache_memory_bytes gpu_memory_utilization tensor_parallel_size enable_sleep_mode
        scheduling_policy enforce_eager"""
    ),
    refused={
        r"(data_parallel_|elastic_ep)\w+|dp_sync_interval|enable_(eplb|elastic_ep)|eplb_config|"
        r"expert_placement_strategy": "an engine is one replica of the weights, whose experts stay in their places",
        "all2all_backend|disable_nccl_for_dp_synchronization": "only engines that share the rows of a step read it",
        r"(decode|prefill)_context_parallel_size|(dcp|cp)_\w+|enable_hc_sp": (
            "a context-parallel worker holds only some of a request's KV slots"
        ),
        r"enable_dbo|ubatch_size|dbo_\w+": "the second micro-batch would overwrite the first one's routes",
        r"(kv_transfer|ec_transfer|ec_manager|kv_events)_config|kv_offloading_\w+": _MOVED,
        r"pipeline_parallel_size|distributed_executor_backend|master_\w+|nnodes|node_rank|device_ids": _GPUS,
        r"model_\w+|hf_\w+|runner|convert|\w*revision|config_format|tokenizer\w*|override_generation_config|"
        r"\w*lora\w*|trust_remote_code|logits_processors|pooler_config|diffusion_config": _SHAPE,
        r"_api_\w+|mm_\w+|\w+_mm_\w+|\w*mamba\w*|video_\w+|limit_mm_per_prompt|media_\w+|language_model_only|"
        r"allowed_\w+|return_sampling_mask|enable_prompt_embeds|served_model_name|\w*replayssm\w*|kda_\w+|gdn_\w+|"
        r"io_processor_plugin|enable_trace_replay|reasoning_\w+|structured_\w+|tokens_only|shutdown_timeout|"
        r"watermark_config|aux_output_config|swa_bounded_replay|enable_mm_embeds|enable_tower\w+|"
        r"default_mm_\w+|use_tqdm_on_load|pt_load_map_location|engram_config|max_parallel_loading_workers|"
        r"renderer_num_workers": _UNREAD,
        r"max_num_queued_\w+": "a run's engine refuses no request: those above rollout.max_concurrent wait",
        r"sleep_\w+|enable_cumem_allocator": "rollout.sleep_level decides how an engine sleeps",
        r"(enable_)?fault_tolerance\w*": "rollout.max_lost_servers decides what a lost engine means",
    },
)
_MAPPINGS = {"train.megatron": MEGATRON, "train.megatron_optimizer": OPTIMIZER, "rollout.vllm": VLLM}
_PLANNED = re.compile(
    r"train\.megatron_optimizer\.(use_precision_aware_optimizer|exp_avg\w*_dtype|store_param_remainders|"
    r"optimizer_cpu_offload|optimizer_offload_fraction|pin_cpu_grads|grad_reduce_in_fp32)"
)
# Megatron's names for what train.recompute sets.
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


def given(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield (mapping, field, value) of every setting that the config passes on."""
    for key in _MAPPINGS:
        section, name = key.split(".")
        for field, value in getattr(getattr(config, section), name).items():
            yield key, field, value


def not_planned(config: Config) -> tuple[str, ...]:
    """Return the keys of the settings that are passed on and that the plan does not consider."""
    keys = (f"{mapping}.{field}" for mapping, field, _ in given(config))
    return tuple(key for key in keys if not _PLANNED.fullmatch(key))


def needs_engine(config: Config) -> Iterator[str]:
    """Yield the keys of the settings that only TransformerEngine implements."""
    if config.train.delay_wgrad_compute:
        yield "train.delay_wgrad_compute"
    for mapping, field, value in given(config):
        if value not in (None, False) and re.fullmatch(_MAPPINGS[mapping].engine, field):
            yield f"{mapping}.{field}"
    modules = config.train.megatron.get("recompute_modules")
    kept = ("core_attn", "mlp", "moe", "shared_experts")
    if isinstance(modules, list) and any(module not in kept for module in modules):
        yield "train.megatron.recompute_modules"  # their outputs are discarded
    optimizer = config.train.megatron_optimizer
    if optimizer.get("use_precision_aware_optimizer") and not optimizer.get("optimizer_cpu_offload"):
        yield "train.megatron_optimizer.use_precision_aware_optimizer"


def passed_problems(config: Config, facts: ModelFacts | None = None) -> Iterator[Problem]:
    """Yield a problem for each setting that cannot be passed on. facts: the model's, None if they are not known."""
    for mapping, name, value in given(config):
        yield from setting_problems(mapping, name, value, recompute=config.train.recompute)
    yield from dispatcher_problems(config)
    yield from combination_problems(config.train, config.parallel, facts, experts=config.placement.experts)
    yield from draft_problems(config)


def setting_problems(mapping: str, name: str, value: Any, *, recompute: str) -> Iterator[Problem]:
    """Yield the problem of one setting, if it cannot be passed on. recompute: that of `train`."""
    passed, key = _MAPPINGS[mapping], f"{mapping}.{name}"
    known = fields(passed.classes)
    if not known:
        return  # the library is not installed, which is told elsewhere
    if name not in known:
        free = [field for field in known if field not in passed.ours and not _reason(passed, field)]
        do = did_you_mean(name, free)
        yield describe("unknown setting of the installed version", where={"key": key}, got=value, do=do)
    elif name in passed.ours:
        yield describe("moe_rl sets it", where={"key": key}, got=value, do=f"remove it{_ours(name)}")
    elif name in _RECOMPUTATION and recompute != "none":
        yield describe(
            "train.recompute sets it",
            where={"key": key, "given": f"train.recompute is {recompute}"},
            got=value,
            do="remove it, or set train.recompute to none",
        )
    elif mapping == "train.megatron" and (problems := list(bypasses({name: value}, "key", "train.megatron."))):
        yield from problems
    elif reason := _reason(passed, name):
        yield describe(reason, where={"key": key}, got=value, do="remove it")
    elif not _accepts(known[name], value):
        expected = ast.unparse(known[name])
        for kind, names in _NAMED.items():
            expected = expected.replace(kind, f"one of {', '.join(names)}")
        yield describe("wrong value", where={"key": key}, got=repr(value), expected=expected)


def _reason(passed: Passed, name: str) -> str:
    return next((why for pattern, why in passed.refused.items() if re.fullmatch(pattern, name)), "")


def _ours(name: str) -> str:
    near = {"max_num_seqs": "rollout.max_concurrent", "kv_cache_memory_bytes": "rollout.kv_cache_mib"}
    near |= {"gpu_memory_utilization": "rollout.kv_cache_mib, which sizes the KV cache"}
    near |= {"enforce_eager": "rollout.cuda_graphs"}
    near |= {"enable_sleep_mode": "rollout.sleep_level"}
    near |= {"tensor_parallel_size": "cluster.gpus_per_engine, for servers: an engine beside a rank has only its GPU"}
    return f", and set {near[name]}" if name in near else ""


@cache
def fields(classes: tuple[tuple[str, str], ...]) -> dict[str, ast.expr]:
    """Return the annotation of each field of these classes, by name; none if the library is not installed."""
    field_types: dict[str, ast.expr] = {}
    for file, name in classes:
        package, _, rest = file.partition("/")
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
        places = [] if spec is None else spec.submodule_search_locations or []
        for source in (Path(place) / rest for place in places):
            if source.is_file():
                tree = ast.parse(source.read_bytes())
                (section,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
                field_types |= {
                    node.target.id: node.annotation
                    for node in section.body
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                }
    return field_types


_PLAIN = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list,), "dict": (dict,)}


def _accepts(annotation: ast.expr, value: Any) -> bool:
    """Return whether a value read from YAML may be of this type. A type that is not built in accepts everything: the
    library checks it."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return _accepts(ast.parse(text, mode="eval").body, value)
        case ast.Name(id=name) if name in _PLAIN:
            return isinstance(value, _PLAIN[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Attribute() | ast.Name() if (kind := ast.unparse(annotation)) in _NAMED:
            return value in _NAMED[kind]
        case ast.BinOp(left=left, right=right):
            return _accepts(left, value) or _accepts(right, value)
        case ast.Subscript(value=ast.Name(id=name), slice=inside):
            parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
            if name == "Optional":
                return value is None or _accepts(inside, value)
            if name == "Union":
                return any(_accepts(part, value) for part in parts)
            if name == "Literal":
                return any(isinstance(part, ast.Constant) and part.value == value for part in parts)
            if name in ("list", "List"):
                return isinstance(value, list) and all(_accepts(inside, item) for item in value)
            if name in ("tuple", "Tuple", "set"):
                return isinstance(value, list)
            if name in ("dict", "Dict"):
                return isinstance(value, dict)
    return True
