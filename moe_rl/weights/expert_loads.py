"""Collects the tensors of a layer's experts while new weights come to vLLM.

vLLM reloads a layer when its last tensor has come. To know which is the last, it passes each tensor through its loader
once more, on the meta device, in a mode that counts copied elements. A layer has hundreds of experts' tensors, and the
model says which. So they are kept here until all have come, without counting elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

_WEIGHTS = {"w13_weight", "w2_weight"}


def collect_experts(model: torch.nn.Module) -> None:
    """Let the layers of experts of a model that is open for loading collect their tensors.

    vLLM still counts elements in layers that also have biases or scales, and in those that hold experts twice.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            own = {name for name, _ in layer.named_parameters(recurse=False)} - SKIP_LOAD_TENSORS
            if own == _WEIGHTS and layer.moe_config.num_experts == layer.moe_config.num_logical_experts:
                _collect(layer)


def experts_of(layer: RoutedExperts, parameter: str) -> set[tuple[str, int]]:
    """Return each (part, expert) that comes for a parameter. The parts of "w13_..." are w1 and, where there is a gate,
    w3."""
    gated = layer.moe_config.is_act_and_mul
    parts = ("w2",) if not parameter.startswith("w13") else ("w1", "w3") if gated else ("w1",)
    return {(part, expert) for part in parts for expert in range(layer.moe_config.num_logical_experts)}


def _collect(layer: RoutedExperts) -> None:
    """Wrap the loaders of a layer's weights, to keep the tensors until all have come."""
    info = get_layerwise_info(layer)
    missing = {(name, *one) for name in _WEIGHTS for one in experts_of(layer, name)}
    # Asked once for each expert, and not for each of its tensors: on a GPU the host waits for the answer.
    experts = range(layer.moe_config.num_logical_experts)
    here = {expert for expert in experts if layer._map_global_expert_id_to_local_expert_id(expert) != -1}

    def wrapper(name: str) -> Callable[..., bool]:
        loader = _get_original_loader(getattr(layer, name))
        signature = inspect.signature(loader)

        @wraps(loader, assigned=())
        def online_process_loader(*args: object, **kwargs: object) -> bool:  # vLLM unwraps this name
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            part, expert = bound.arguments["shard_id"], bound.arguments["expert_id"]
            if expert not in here:
                bound.arguments["loaded_weight"] = None  # another rank's: only noted, and its memory is not held
            info.loaded_weights.append((name, bound))
            missing.discard((name, part, expert))
            if not missing:
                _layerwise_process(layer, info)
            return expert in here

        return online_process_loader

    for name in _WEIGHTS:
        getattr(layer, name).weight_loader = wrapper(name)
