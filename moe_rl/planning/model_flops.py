"""Counts the floating-point operations that training a model needs, and knows how many a device can do.

Their ratio is the model FLOPs utilization of PaLM (arXiv 2204.02311, appendix B), with two differences: only the
parameters of a token's own experts count, and only the attention pairs that causality and windows allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import layer_weights

# Operations per second in bfloat16, without sparsity, by the name that CUDA gives the device. Sources: NVIDIA's data
# sheets of the A100 (2021), H100 and H200 (2024: "989.5 teraFLOPS" is half the figure with sparsity) and the DGX B200
# (2024: 36 petaFLOPS FP8 in eight GPUs, of which bfloat16 has half).
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the operations per second that a device can do; None if unknown.

    Args:
        device: its name, see `megatron.world.device_name`.
        dtype: that of the training. Only bfloat16 is known: float32 may be computed as TF32 or not.
    """
    return PEAK_FLOPS.get(device) if dtype == "bfloat16" else None


def active_matrix_elements(facts: ModelFacts) -> int:
    """Return the elements of the matrices by which a token is multiplied: with its own experts, and the output matrix.

    The embedding is looked up, not multiplied. Norms and biases are left out.
    """
    weights = [weight for layer in range(facts.layers) for weight in layer_weights(facts, layer)]
    elements = facts.vocab * facts.hidden_size
    for weight in weights:
        shapes = (shape[1:] if weight.experts == "stacked" else shape for shape in weight.tensors.values())
        weight_elements = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
        elements += weight_elements * (facts.top_k if weight.experts else 1)
    return elements


def forward_flops(facts: ModelFacts, lengths: Iterable[int]) -> int:
    """Return the operations of a forward pass over sequences of these numbers of tokens. A multiplication and its
    addition are two operations."""
    matrices, attention = _forward(facts, list(lengths))
    return matrices + attention


def training_flops(facts: ModelFacts, lengths: Iterable[int], *, adapters: bool = False) -> int:
    """Return the operations of a forward and a backward pass. Recomputation to save memory does not count.

    The backward pass needs twice the forward's: for the gradients of the inputs, and for those of the weights. With
    `adapters` (LoRA) the weights are frozen and need none. The adapters' own operations, a few per cent, are left out.
    """
    matrices, attention = _forward(facts, list(lengths))
    return (2 if adapters else 3) * matrices + 3 * attention


def _forward(facts: ModelFacts, lengths: list[int]) -> tuple[int, int]:
    """Return the operations of a forward pass: with weights, and between queries, keys and values."""
    queries = facts.head_dim  # of each head, also in latent attention, whose values may have fewer
    values = facts.head_dim if facts.latent is None else facts.latent.value_dim
    windowed = len(facts.windowed_layers)
    pairs = (facts.layers - windowed) * sum(_pairs(length, length) for length in lengths)
    pairs += windowed * sum(_pairs(length, facts.window) for length in lengths)
    return 2 * active_matrix_elements(facts) * sum(lengths), 2 * facts.heads * (queries + values) * pairs


def _pairs(length: int, window: int) -> int:
    """Return the number of (token, token it attends to) pairs in a sequence."""
    full = min(length, window)
    return full * (full + 1) // 2 + (length - full) * window
