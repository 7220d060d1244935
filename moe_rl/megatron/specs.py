"""Module specs: the same GPTModel with replay, from TransformerEngine where it is installed, else from torch ops."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from moe_rl.megatron.layers import PackedAttention, RMSNorm
from moe_rl.megatron.router import ReplayLayer, ReplayMoELayer, ReplayRouter


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Spec of this pipeline stage's layers, all MoE, with replay plugged in. vp_stage: which run of them; None: all."""
    if HAVE_TE:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        spec = _torch_block_spec(config, vp_stage)
    for layer in spec.layer_specs:
        layer.module = ReplayLayer
        layer.submodules.mlp = _with_replay(layer.submodules.mlp)
    return spec


def _with_replay(mlp: functools.partial) -> functools.partial:
    if not (isinstance(mlp, functools.partial) and mlp.func is MoELayer):
        raise TypeError(f"expected the spec of an MoE layer, got {mlp!r}")
    submodules: MoESubmodules = mlp.keywords["submodules"]
    return functools.partial(ReplayMoELayer, submodules=dataclasses.replace(submodules, router=ReplayRouter))


def _torch_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    provider = LocalSpecProvider()
    layer = ModuleSpec(
        module=ReplayLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=provider.column_parallel_linear(),
                    core_attention=PackedAttention,
                    linear_proj=provider.row_parallel_linear(),
                    q_layernorm=RMSNorm,
                    k_layernorm=RMSNorm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_moe_module_spec_for_backend(provider, num_experts=config.num_moe_experts),
            mlp_bda=get_bias_dropout_add,
            # The name under which TransformerEngine, which fuses this norm into the projection, saves it.
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[
            dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules))
            for _ in range(get_num_layers_to_build(config, vp_stage=vp_stage))
        ],
        layer_norm=RMSNorm,
    )
