"""Builds the trained model: Megatron's config from a Hugging Face model, GPTModel, data parallelism and optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from moe_rl.config.passed_on import DTYPES as DTYPE_NAMES
from moe_rl.config.training import LoraConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ConfigError
from moe_rl.megatron import hf_map, world
from moe_rl.megatron.hf_files import CheckpointReader
from moe_rl.megatron.lora import attach
from moe_rl.megatron.router import ReplayRouter
from moe_rl.megatron.router_gradients import OwnGradients
from moe_rl.megatron.specs import replay_spec
from moe_rl.models.facts import ModelFacts, Yarn
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.replay_pass import Mode, ReplayPass, Watch
from moe_rl.replay.tables import MicrobatchRoutes

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def product_precision(dtype: str) -> str:
    """Return what a model of this dtype multiplies in on this rank's device: its dtype, or "tf32" for float32 where
    TransformerEngine, which has no switch for this, or torch rounds."""
    rounds = torch.cuda.is_available() and (HAVE_TE or torch.backends.cuda.matmul.allow_tf32)
    return "tf32" if dtype == "float32" and rounds else dtype


def transformer_config(facts: ModelFacts, train: TrainConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Return Megatron's config for a model: its layers, the style of its routers, no dropped tokens."""
    dtype, interleaved = DTYPES[train.dtype], parallel.virtual_pipeline > 1
    make_config = partial(
        TransformerConfig if facts.latent is None else MLATransformerConfig,
        num_layers=facts.layers,
        hidden_size=facts.hidden_size,
        num_attention_heads=facts.heads,
        num_query_groups=facts.kv_heads,
        kv_channels=facts.head_dim,
        ffn_hidden_size=facts.intermediate_size,
        moe_layer_freq=[int(layer in facts.moe_layers) for layer in range(facts.layers)],
        num_moe_experts=facts.num_experts,
        moe_router_topk=facts.top_k,
        moe_ffn_hidden_size=facts.moe_intermediate_size,
        moe_shared_expert_intermediate_size=facts.shared_intermediate_size or None,
        moe_router_score_function=facts.score_function,
        # norm_topk_prob: softmax over the chosen logits equals softmax over all logits, renormalised over the chosen
        # ones. Sigmoid scores are always renormalised.
        moe_router_pre_softmax=not facts.norm_topk_prob,
        moe_router_topk_scaling_factor=facts.routed_scaling,
        moe_router_num_groups=facts.groups if facts.groups > 1 else None,
        moe_router_group_topk=facts.top_groups if facts.groups > 1 else None,
        moe_router_enable_expert_bias=facts.expert_bias,
        moe_router_bias_update_rate=train.expert_bias_rate,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if train.router_aux_loss else "none",
        moe_aux_loss_coeff=train.router_aux_loss,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=HAVE_TE,
        normalization="RMSNorm",
        layernorm_epsilon=facts.rms_norm_eps,
        qk_layernorm=facts.qk_norm or facts.latent is not None,
        add_qkv_bias=facts.attention_bias,
        add_bias_linear=facts.linear_bias,
        softmax_type="learnable" if facts.sinks else "vanilla",
        window_size=(facts.window - 1, 0) if facts.window else None,
        window_attn_skip_freq=[int(layer in facts.windowed_layers) for layer in range(facts.layers)],
        gated_linear_unit=True,
        **_activation(facts),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        # under tensor parallelism, Megatron trains MoE layers only with sequence parallelism
        sequence_parallel=parallel.tensor > 1,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        pipeline_model_parallel_layout=_runs(parallel.layers_per_run),
        # With two stages, each stage is both before and after the other, so all batched sends and receives go to one
        # rank. Megatron then matches them in the wrong order, which stays unnoticed if lengths are equal. Single
        # messages are matched correctly.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **_fusions(),
        perform_initialization=False,  # every parameter is loaded from the checkpoint
        variable_seq_lengths=True,
        # The loss is already divided by its global denominator, so gradients are summed over ranks and microbatches
        # without any scaling.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_sum_gradients,
        overlap_moe_expert_parallel_comm=train.overlap_expert_parallel_comm,
        delay_wgrad_compute=train.delay_wgrad_compute,
        **_recomputation(train),
        **_latent_attention(facts),
    )
    with _naming("train.megatron", train.megatron):
        config = make_config(**_values(train.megatron))
    if facts.yarn is not None and facts.latent is None:
        # Megatron reads these from its config, although the config has no such fields.
        for name, value in _yarn(facts.yarn).items():
            setattr(config, f"yarn_{name}", value)
    return config


def _fusions() -> dict[str, bool]:
    """Return which of Megatron's fused kernels the device has that every model uses. `train.megatron` may say
    otherwise."""
    engine = HAVE_TE and torch.cuda.is_available()
    # The output layer, which is not TransformerEngine's, takes this kernel from apex.
    adds = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {"bias_activation_fusion": engine, "gradient_accumulation_fusion": engine and adds}


def _values(passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that are passed on to Megatron, with precisions as torch's and the attention as its enum."""
    made = {name: getattr(torch, value) if value in DTYPE_NAMES else value for name, value in passed.items()}
    if "attention_backend" in made:  # Megatron compares it with members of the enum, which no text equals
        made["attention_backend"] = AttnBackend[made["attention_backend"]]
    return made


@contextmanager
def _naming(key: str, passed: Mapping[str, Any]) -> Iterator[None]:
    """Turn Megatron's refusal of settings that are passed on into a ConfigError that names them."""
    try:
        yield
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        if not passed:
            raise
        raise ConfigError(
            f"megatron refuses these settings: {error}", where={"key": key}, got=dict(passed), do="change them"
        ) from error


def _runs(layers_per_run: tuple[int, ...]) -> list[list[str]] | None:
    """Return Megatron's pipeline layout for runs of unequal length: the parts of each run."""
    runs = [["decoder"] * layers for layers in layers_per_run]
    if not runs:
        return None
    runs[0].insert(0, "embedding")
    runs[-1].append("loss")
    return runs


def _activation(facts: ModelFacts) -> dict:
    if facts.glu_clamp is None:
        return {"activation_func": F.silu}
    # Megatron's quick_gelu is sigmoid(1.702 g) g.
    return {"activation_func": quick_gelu, "activation_func_clamp_value": facts.glu_clamp, "glu_linear_offset": 1.0}


def _latent_attention(facts: ModelFacts) -> dict:
    """Return the config entries for latent attention, which computes its rotary embedding itself."""
    if facts.latent is None:
        return {}
    latent, yarn = facts.latent, facts.yarn
    settings = {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": facts.rope_theta,
    }
    if yarn is None:  # without YaRN, the factor would scale the logits of plain angles too
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    named = _yarn(yarn)
    del named["correction_range_round_to_int"]  # latent attention always rounds the correction range
    return settings | named | {"rope_type": "yarn"}


def _yarn(yarn: Yarn) -> dict:
    """Return YaRN's settings under Megatron's names. In Megatron, 1 and 0 mean that mscale and mscale_all_dim are not
    set."""
    return {
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.positions,
        "beta_fast": yarn.fast,
        "beta_slow": yarn.slow,
        "mscale": 1.0 if yarn.mscale is None else yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim or 0.0,
        "correction_range_round_to_int": yarn.truncate,
    }


def _recomputation(train: TrainConfig) -> dict:
    if train.recompute == "none":
        return {}
    if train.recompute == "moe":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": train.recompute,
        "recompute_num_layers": train.recompute_layers,
    }


def moe_layers(chunks: Seq[torch.nn.Module]) -> tuple[int, ...]:
    """Return the global 0-based numbers, ascending, of the layers with experts in the `chunks` that this rank holds."""
    layers = (layer for chunk in chunks for layer in unwrap(chunk).decoder.layers)
    return tuple(layer.layer_number - 1 for layer in layers if layer.is_moe_layer)


def recomputed_layers(chunks: Seq[torch.nn.Module]) -> frozenset[int]:
    """Return the global 0-based numbers of the MoE layers of `chunks` that a training pass recomputes."""
    numbers = []
    for block in (unwrap(chunk).decoder for chunk in chunks):
        config, layers = block.config, []
        if config.recompute_granularity == "full":
            layers = block.layers[: config.recompute_num_layers if config.recompute_method == "block" else None]
        elif config.recompute_granularity == "selective" and "moe" in config.recompute_modules:
            layers = block.layers
        numbers += [layer.layer_number - 1 for layer in layers if layer.is_moe_layer]
    return frozenset(numbers)


def replay_pass(
    chunks: Seq[torch.nn.Module],
    tables: Seq[MicrobatchRoutes],
    *,
    mode: Mode = "replay",
    name: str,
    plans: Seq[dict[int, LayerPlan] | None] = (),
    watch: Watch = Watch(),  # noqa: B008 - frozen
    training: bool = False,
    agreed: Callable[[], AbstractContextManager] = nullcontext,
    lr: float | None = None,
) -> ReplayPass:
    """Make one pass of a model over its microbatches, to be entered around it. Every pass is made here.

    Args:
        chunks: This rank's part of a model with layers of `replay_spec`: one GPTModel, wrapped or not, or one for each
            run of an interleaved schedule.
        tables: Routes of the microbatches, in the order of their numbers.
        mode, name, plans, watch, agreed, lr: As in `ReplayPass`.
        training: Whether the pass has a backward, in which recomputed layers run a second time.
    """
    return ReplayPass(
        list(tables),
        moe_layers(chunks),
        mode=mode,
        name=name,
        rank=dist.get_rank(),
        watch=watch,
        recomputed_layers=recomputed_layers(chunks) if training else frozenset(),
        any_stage=world.any_stage,
        sum_over_share=world.sum_over_share,
        agreed=agreed,
        lr=lr,
        plans=list(plans),
    )


def _sum_gradients(chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Sum gradients over ranks, as far as the backward pass has not."""
    finalize_model_grads(chunks, None, **kwargs)
    for chunk in chunks:
        chunk.own_gradients.check_sums()


def build_model(
    facts: ModelFacts, config: TransformerConfig, checkpoint: Path | str, lora: LoraConfig | None = None
) -> list[torch.nn.Module]:
    """Build this rank's part of the model with replay: one GPTModel for each run of layers, in the model's order.

    The models are filled from a Hugging Face checkpoint folder, and wrapped for bf16 if the config says so. With `lora`
    they get adapters, and all else is frozen.

    Raises:
        ConfigError: The config has settings under which replay is not exact.
    """
    runs = config.virtual_pipeline_model_parallel_size
    numbers = [None] if runs is None else range(runs)
    reader = CheckpointReader(checkpoint, facts)
    chunks = [_build_chunk(facts, config, reader, number) for number in numbers]
    if lora is not None:
        attach(map(unwrap, chunks), facts, lora)
    return chunks


def _build_chunk(
    facts: ModelFacts, config: TransformerConfig, reader: CheckpointReader, vp_stage: int | None
) -> torch.nn.Module:
    model = GPTModel(
        config,
        replay_spec(config, vp_stage),
        vocab_size=facts.vocab,
        max_sequence_length=facts.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope" if facts.yarn is None or facts.latent is not None else "yarn",
        rotary_percent=facts.rotary_fraction,
        rotary_base=facts.rope_theta,
        share_embeddings_and_output_weights=facts.tie_word_embeddings,
        vp_stage=vp_stage,
    )
    if torch.cuda.is_available():
        model.cuda()
    wrapped = Float16Module(config, model) if config.bf16 else model
    for module in model.modules():
        if isinstance(module, ReplayRouter) and module.expert_bias is not None:
            # Float16Module rounds the bias to bfloat16. Megatron makes it float32 again, but only when it first runs.
            module.expert_bias = module.expert_bias.float()
        sinks = getattr(module, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter) and not hasattr(sinks, "tensor_model_parallel"):
            # TransformerEngine does not mark that each tensor-parallel rank has the sinks of its own heads.
            set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    hf_map.load(model, facts, reader)
    return wrapped


def wrap_for_training(
    chunks: list[torch.nn.Module], config: TransformerConfig, train: TrainConfig
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Add data parallelism with float32 main gradients, and the optimizer, distributed or whole on every rank."""
    passed = train.megatron_optimizer
    ddp_settings = {"use_distributed_optimizer": train.distributed_optimizer, "grad_reduce_in_fp32": True}
    # A device sums gradients while it computes others.
    ddp_settings |= {"overlap_grad_reduce": torch.cuda.is_available(), "delay_wgrad_compute": train.delay_wgrad_compute}
    with _naming("train.megatron_optimizer", passed):
        ddp_config = DistributedDataParallelConfig(**ddp_settings | _of(DistributedDataParallelConfig, passed))
    # In later chunks all gradients are ready at the same time: buckets would only make more, smaller messages.
    chunks = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in chunks:
        layers = [layer for layer in unwrap(chunk).decoder.layers if layer.is_moe_layer]
        chunk.own_gradients = OwnGradients(chunk, layers)
    # Megatron sums in the backward pass of the last microbatch.
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) != 1 else chunks[0].no_sync
    if passed.get("optimizer_cpu_offload") and not next(chunks[0].parameters()).is_cuda:
        raise ConfigError(
            "the optimizer's state is in host memory already",
            where={"key": "train.megatron_optimizer.optimizer_cpu_offload"},
            got="no GPU",
            expected="false",
        )
    settings = train.optimizer
    with _naming("train.megatron_optimizer", passed):
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=train.distributed_optimizer,
            bf16=config.bf16,
            fp16=False,
            params_dtype=config.params_dtype,
            **_of(OptimizerConfig, passed),
        )
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
    return chunks, optimizer


def _of(section: type, passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are passed on to this config class."""
    names = {field.name for field in fields(section)}
    return {name: value for name, value in _values(passed).items() if name in names}


def learning_rate_schedule(
    optimizer: MegatronOptimizer, train: TrainConfig, run_updates: int
) -> OptimizerParamScheduler:
    """Return Megatron's schedule, which sets the learning rate and the weight decay of each parameter group.

    Its count starts at 0 and is the number of the update that it has set up, so step it before the update.

    Args:
        run_updates: Number of updates of the run, over which the rate falls if no `decay_steps` are set.
    """
    settings = train.optimizer
    falls_over = settings.decay_steps or max(run_updates, settings.warmup_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=falls_over + 1,  # Megatron has reached the minimum at this update
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def unwrap(model: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside data-parallel and precision wrappers."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model
