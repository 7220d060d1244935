"""Building the trained model: megatron config from a Hugging Face model, GPTModel, data parallelism, optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_rl.config.hf import ModelFacts
from moe_rl.config.schema import TrainConfig
from moe_rl.megatron import hf_map
from moe_rl.megatron.layers import PackedRotaryEmbedding
from moe_rl.megatron.specs import block_spec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def transformer_config(facts: ModelFacts, train: TrainConfig, *, expert_parallel: int) -> TransformerConfig:
    """Megatron's config for a Qwen3-MoE model: every layer MoE, softmax over the top-k logits, no dropped tokens."""
    dtype = DTYPES[train.dtype]
    recompute = {}
    if train.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=facts.layers,
        hidden_size=facts.hidden_size,
        num_attention_heads=facts.heads,
        num_query_groups=facts.kv_heads,
        kv_channels=facts.head_dim,
        ffn_hidden_size=facts.moe_intermediate_size,
        num_moe_experts=facts.num_experts,
        moe_router_topk=facts.top_k,
        moe_ffn_hidden_size=facts.moe_intermediate_size,
        # norm_topk_prob: softmax over the chosen logits equals softmax over all, renormalised over the chosen.
        moe_router_pre_softmax=not facts.norm_topk_prob,
        moe_router_score_function="softmax",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=HAVE_TE,
        normalization="RMSNorm",
        layernorm_epsilon=facts.rms_norm_eps,
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        perform_initialization=False,  # every parameter is loaded from the checkpoint
        variable_seq_lengths=True,
        # The loss arrives divided by its global denominator: gradients are summed over ranks and microbatches, and
        # scaled by nothing.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_sum_gradients,
        **recompute,
    )


def _sum_gradients(model, num_tokens, **kwargs):
    finalize_model_grads(model, None, **kwargs)


def first_local_expert(facts: ModelFacts) -> int:
    """Lowest expert id this rank holds."""
    share = facts.num_experts // parallel_state.get_expert_model_parallel_world_size()
    return share * parallel_state.get_expert_model_parallel_rank()


def build_model(facts: ModelFacts, config: TransformerConfig, checkpoint) -> torch.nn.Module:
    """GPTModel with replay, filled from a Hugging Face checkpoint folder, wrapped for bf16 when the config says so."""
    model = GPTModel(
        config,
        block_spec(config),
        vocab_size=facts.vocab,
        max_sequence_length=facts.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=facts.rope_theta,
        share_embeddings_and_output_weights=facts.tie_word_embeddings,
    )
    model.rotary_pos_emb = PackedRotaryEmbedding(
        facts.head_dim, rotary_percent=1.0, rotary_base=facts.rope_theta, use_cpu_initialization=True
    )
    hf_map.load(model, facts, checkpoint, first_expert=first_local_expert(facts))
    if torch.cuda.is_available():
        model.cuda()
    return Float16Module(config, model) if config.bf16 else model


def wrap_for_training(
    model: torch.nn.Module, config: TransformerConfig, train: TrainConfig
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Data parallelism with float32 main gradients, and the distributed optimizer over it."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    model = DistributedDataParallel(config, ddp_config, model)
    settings = train.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=True,
            bf16=config.bf16,
            fp16=False,
            params_dtype=config.params_dtype,
        ),
        [model],
    )
    return model, optimizer


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside data-parallel and precision wrappers."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model
