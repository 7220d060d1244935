"""What a weight update did not reach in vLLM's model."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo


def not_loaded(model: torch.nn.Module) -> list[str]:
    """Names of the parameters that did not come, or not all of them, of a model that is open for loading.

    To be called after the last tensor was handed to `load_weights` and before `finalize_layerwise_reload`, which would
    put their old values back, or keep memory that nothing was written to, and call the update done. vLLM sees what goes
    through a parameter's loader; what a model's `load_weights` copies into it directly is lost. Layers that were loaded
    whole are closed already. Buffers are made, not loaded, and so are an attention layer's scales.
    """
    lost = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        parameters = layer.named_parameters(recurse=False)
        own = [key for key, parameter in parameters if parameter.numel() and key not in SKIP_LOAD_TENSORS]
        lost += [f"{name}.{key}" if name else key for key in _lacking(layer, info, own)]
    return lost


def _lacking(layer: torch.nn.Module, info: LayerReloadingInfo, own: list[str]) -> list[str]:
    """Which of its own parameters a layer still waits for. What it waits for may be padding, that nobody sends: rows of
    a vocabulary, or of experts for some kernels."""
    came = {parameter for parameter, _ in info.loaded_weights}
    lacking = [key for key in own if key not in came]
    if lacking:
        return lacking
    if isinstance(layer, LinearBase):
        return own  # has no padding: of query, key and value, or gate and up, one is missing
    if isinstance(layer, RoutedExperts):
        return [key for key in own if _lacks_experts(layer, info, key)]
    return []


def _lacks_experts(layer: RoutedExperts, info: LayerReloadingInfo, key: str) -> bool:
    """Whether a parameter that came expert by expert lacks one, or its gate or up. Experts of other ranks come too."""
    calls = [bound.arguments for parameter, bound in info.loaded_weights if parameter == key]
    if not all("expert_id" in call for call in calls):
        return False  # stacked, and so came whole
    halves = 2 if key.startswith("w13") and layer.moe_config.is_act_and_mul else 1
    came = {(call["shard_id"], call["expert_id"]) for call in calls}
    return len(came) < halves * layer.moe_config.num_logical_experts
