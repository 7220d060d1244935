"""Makes the module specs of the GPTModel with replay, from TransformerEngine if it is installed, else from torch
ops."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from moe_rl.config.bypasses import bypasses
from moe_rl.errors import ConfigError
from moe_rl.megatron.layers import (
    ExpertOutput,
    GroupedExperts,
    LatentAttention,
    PackedAttention,
    PackedSelfAttention,
    RMSNorm,
    TorchLatentAttention,
)
from moe_rl.megatron.router import ReplayLayer, ReplayMoELayer, ReplayRouter


def replay_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Make the layer spec of a GPTModel with replay: `GPTModel(config, replay_spec(config), ...)`.

    The spec has the layers of this pipeline stage. Its model accepts packed sequences only, with the parameters from
    `Microbatch.begin_forward`.

    Args:
        vp_stage: Which run of the stage's layers; None means all.

    Raises:
        ConfigError: The config has settings under which replay is not exact, or that the layers do not implement.
    """
    _refuse_bypasses(config)
    if HAVE_TE:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
        )
    else:
        spec = _torch_block_spec(config, vp_stage)
    return _replayed_block(spec)


def with_replay(spec: TransformerBlockSubmodules, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return a block spec with replay in each layer that has experts, from a spec that another program made, such as
    Megatron-Bridge, mbridge or slime.

    Raises:
        ConfigError: The config has settings under which replay is not exact, or a layer or its router cannot be
            replaced.
    """
    _refuse_bypasses(config)
    return _replayed_block(spec)


def _refuse_bypasses(config: TransformerConfig) -> None:
    if problems := list(bypasses(vars(config))):
        raise ConfigError(problems)


def _replayed_block(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    return dataclasses.replace(spec, layer_specs=[_replayed_layer(layer) for layer in spec.layer_specs])


# Megatron's attention, and ours for packed sequences.
_PACKED = {SelfAttention: PackedSelfAttention, MLASelfAttention: LatentAttention}


def _replayed_layer(layer: ModuleSpec) -> ModuleSpec:
    """Return a new spec of a layer, with replay if its MLP has experts. New, because Megatron's layers may share a
    spec."""
    mlp, attention = layer.submodules.mlp, layer.submodules.self_attention
    if layer.module is not TransformerLayer:
        raise ConfigError(
            "a layer is of a class of its own, which a layer with replay would replace",
            where={"argument": "spec"},
            got=repr(layer.module)[:80],
            expected=TransformerLayer.__name__,
            do="use Megatron's own layers, as replay_spec does",
        )
    if getattr(attention, "module", None) in _PACKED:
        attention = dataclasses.replace(attention, module=_PACKED[attention.module])
    if not isinstance(mlp, functools.partial):
        raise ConfigError(
            "a layer's MLP has no builder, so its router cannot be replaced",
            where={"argument": "spec"},
            got=repr(mlp)[:80],
            expected="functools.partial of MoELayer or another MLP, as megatron-core 0.19 makes it",
        )
    if mlp.func is MoELayer:
        mlp = _replayed(mlp)
    submodules = dataclasses.replace(layer.submodules, mlp=mlp, self_attention=attention)
    return dataclasses.replace(layer, module=ReplayLayer, submodules=submodules)


def _replayed(mlp: functools.partial) -> functools.partial:
    submodules: MoESubmodules = mlp.keywords["submodules"]
    return functools.partial(ReplayMoELayer, submodules=dataclasses.replace(submodules, router=ReplayRouter))


# Settings that Megatron reads where it makes or runs layers that ours replace, and the values that ours implement.
_TORCH_HAS: dict[str, tuple] = {
    "normalization": ("RMSNorm",),
    "layernorm_zero_centered_gamma": (False,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla", "learnable"),
    "experimental_attention_variant": (None,),
    "moe_apply_probs_on_input": (False,),
}


def _torch_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    has = _TORCH_HAS | ({"qk_layernorm": (True,)} if config.multi_latent_attention else {})
    if lacks := [setting for setting, values in has.items() if getattr(config, setting) not in values]:
        raise ConfigError(
            "the layers that stand for those of TransformerEngine do not implement this",
            where={"setting": lacks[0]},
            got=getattr(config, lacks[0]),
            expected=" or ".join(map(str, has[lacks[0]])),
            do="change it, or install TransformerEngine",
        )
    first, every = get_transformer_layer_offset(config, vp_stage=vp_stage), config.moe_layer_freq
    flags = every if isinstance(every, list) else [layer % every == 0 for layer in range(config.num_layers)]
    here = flags[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    return TransformerBlockSubmodules(
        layer_specs=[_torch_layer_spec(config, has_experts=bool(flag)) for flag in here], layer_norm=RMSNorm
    )


class _TorchProvider(LocalSpecProvider):
    def __init__(self, *, expert_biases: bool):
        self.experts = SequentialMLP if expert_biases else GroupedExperts

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> functools.partial[SequentialMLP]:
        submodules = MLPSubmodules(linear_fc1=self.column_parallel_linear(), linear_fc2=ExpertOutput)
        return functools.partial(self.experts, submodules=submodules)


def _torch_layer_spec(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    provider = _TorchProvider(expert_biases=config.add_bias_linear)
    attention, saved_as = (_torch_latent if config.multi_latent_attention else _torch_grouped_query)(config, provider)
    if not has_experts:
        saved_as["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(provider, num_experts=config.num_moe_experts if has_experts else None),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_as,
        ),
    )


# An attention spec, and a map from our parameter names to the names in checkpoints. TransformerEngine fuses a norm into
# the projection after it, and checkpoints use its names.
_Attention = tuple[ModuleSpec, dict[str, str]]


def _torch_grouped_query(config: TransformerConfig, provider: LocalSpecProvider) -> _Attention:
    submodules = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_linear(),
        core_attention=PackedAttention,
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
        k_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
    )
    attention = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
    return attention, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _torch_latent(config: TransformerConfig, provider: LocalSpecProvider) -> _Attention:
    linear = provider.column_parallel_linear()
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=linear,
        linear_q_down_proj=linear,
        linear_q_up_proj=linear,
        linear_kv_down_proj=linear,
        linear_kv_up_proj=linear,
        core_attention=PackedAttention,
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    attention = ModuleSpec(TorchLatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
    return attention, {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }
