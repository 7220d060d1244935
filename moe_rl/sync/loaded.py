"""What a weight update did not reach in vLLM's model."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS


def not_loaded(model: torch.nn.Module) -> list[str]:
    """Names of the parameters for which nothing came, of a model that is open for loading.

    To be called after the last tensor was handed to `load_weights` and before `finalize_layerwise_reload`, which would
    put their old values back and call the update done. vLLM sees what goes through a parameter's loader; what a model's
    `load_weights` copies into it directly is lost. Layers that were loaded whole are closed already. Buffers are made,
    not loaded, and so are an attention layer's scales.
    """
    lost = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        came = {parameter for parameter, _ in info.loaded_weights} | SKIP_LOAD_TENSORS
        own = [key for key, parameter in layer.named_parameters(recurse=False) if parameter.numel()]
        lost += [f"{name}.{key}" if name else key for key in own if key not in came]
    return lost
