"""Lists the parameters of a rank as megatron builds them, and the flat buffers that hold them.

In megatron-core 0.19, DistributedDataParallel gives each run of adjacent layers one buffer for the dense parameters and
one for the experts that several ranks share. With the distributed optimizer, parameters start at multiples of 64
elements. A buffer ends at a multiple of 128 and of the number of ranks that share its optimizer state; each of these
ranks owns an equal piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moe_rl.config.layout import Layout
from moe_rl.config.training import LoraConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import layer_weights
from moe_rl.models.peft import target_of
from moe_rl.models.weight_table import EMBEDDING, Weight, ends

# Order of a layer's modules in megatron; it decides where a buffer's padding is.
MODULES = (
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.kv_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts",
    "mlp.shared_experts", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
START, END = 64, 128


@dataclass(frozen=True, slots=True)
class Buffer:
    """Describes a flat buffer.

    Attributes:
        sizes: the elements of each parameter, in the order of the buffer.
        copies: the number of ranks with the same parameters, which share their optimizer state.
        ranks_between: the distance of these ranks in rank numbers.
    """

    sizes: tuple[int, ...]
    copies: int
    ranks_between: int

    @property
    def elements(self) -> int:
        """Return the number of elements without padding."""
        return sum(self.sizes)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Return (start, end) of each piece of padding under the distributed optimizer, including that at the end."""
        end = 0
        for size in self.sizes:
            start = _up(end, START)
            if start > end:
                yield end, start
            end = start + size
        yield end, _up(end, math.lcm(END, self.copies))

    @property
    def padded_elements(self) -> int:
        """Return the number of elements with padding."""
        return self.elements + sum(end - start for start, end in self.gaps())

    def pieces(self) -> list[list[int]]:
        """Return the elements of each parameter in the piece of each of the `copies`."""
        piece, end = self.padded_elements // self.copies, 0
        pieces: list[list[int]] = [[] for _ in range(self.copies)]
        for size in self.sizes:
            start = _up(end, START)
            end = start + size
            for rank in range(start // piece, -(-end // piece)):
                pieces[rank].append(min(end, (rank + 1) * piece) - max(start, rank * piece))
        return pieces

    def owned(self) -> list[int]:
        """Return the number of parameter elements in the piece of each of the `copies`."""
        return [sum(sizes) for sizes in self.pieces()]


Sizes = Callable[[Weight], tuple[tuple[int, bool], ...]]
"""Returns how many elements of a weight, or of one expert's, a rank trains, in the weight itself or in its adapter;
with each number, whether all experts of the layer share the elements."""


def adapter_buffers(facts: ModelFacts, layout: Layout, layers: range, lora: LoraConfig) -> list[Buffer]:
    """Return the buffers of the adapters of a rank for a run of adjacent layers."""

    def sizes(weight: Weight) -> tuple[tuple[int, bool], ...]:
        if target_of(weight) not in lora.targets:
            return ()
        (outputs, inputs), shares = local_shape(weight, layout), bool(weight.experts) and lora.shared_outer
        a, b = len(weight.tensors) * lora.rank * inputs, lora.rank * outputs
        return (a, shares and weight.axis == 0), (b, shares and weight.axis == 1)

    parameters = [pair for layer in layers for pair in _layer_parameters(facts, layout, layer, sizes)]
    dense, expert = ([size for size, of_experts in parameters if of_experts is which] for which in (False, True))
    return _buffers(layout, dense, expert)


def chunk_buffers(facts: ModelFacts, layout: Layout, layers: range) -> list[Buffer]:
    """Return the buffers of a rank for a run of adjacent layers, with the model's first or last modules if they belong
    to it.

    A bucket that Megatron pads by itself is a buffer here.
    """

    def sizes(weight: Weight) -> tuple[tuple[int, bool], ...]:
        return ((_elements(facts, weight, layout), False),)

    front, back = ends(facts, first=0 in layers, last=facts.layers - 1 in layers)
    # Stages sum the gradients of their copies of a tied embedding, which is therefore a bucket of its own.
    shared = facts.tie_word_embeddings and layout.pipeline > 1
    apart = [weight for weight in (*front, *back) if shared and EMBEDDING in weight.tensors]
    dense = [_elements(facts, weight, layout) for weight in front if weight not in apart]
    expert: list[int] = []
    for size, of_experts in (pair for layer in layers for pair in _layer_parameters(facts, layout, layer, sizes)):
        (expert if of_experts else dense).append(size)
    dense += [_elements(facts, weight, layout) for weight in back if weight not in apart]
    alone = Buffer(tuple(_elements(facts, weight, layout) for weight in apart), layout.dense_copies, layout.tensor)
    return ([alone] if alone.sizes else []) + _buffers(layout, dense, expert)


def _buffers(layout: Layout, dense: list[int], expert: list[int]) -> list[Buffer]:
    # Megatron fills the buffers in the order of the backward pass.
    buffers = (
        Buffer(tuple(reversed(dense)), layout.dense_copies, layout.tensor),
        Buffer(tuple(reversed(expert)), layout.expert_data, layout.expert * layout.expert_tensor),
    )
    return [buffer for buffer in buffers if buffer.sizes]


def _layer_parameters(facts: ModelFacts, layout: Layout, layer: int, trained: Sizes) -> Iterator[tuple[int, bool]]:
    weights = sorted(layer_weights(facts, layer), key=lambda weight: MODULES.index(_module(weight)))
    experts = [weight for weight in weights if weight.experts]
    done = False
    for weight in weights:
        # The expert bias is state of the router, not a parameter.
        if weight.parameter.endswith("expert_bias"):
            continue
        if not weight.experts:
            yield from ((size, False) for size, _ in trained(weight))
        elif not done:
            # Experts follow one by one. Where they are cut as the dense parameters are, Megatron keeps them together.
            sizes = [size for expert in experts for size in trained(expert)]
            apart = layout.expert > 1 or layout.expert_tensor != layout.tensor
            for number in range(layout.experts_per_rank):
                yield from ((size, apart and not shared) for size, shared in sizes if not (shared and number))
            done = True


def _module(weight: Weight) -> str:
    return next(module for module in MODULES if weight.parameter.startswith(f"{module}."))


def _elements(facts: ModelFacts, weight: Weight, layout: Layout) -> int:
    """Return the elements of a parameter, or of that of one expert, on a rank, which holds all or a part of it."""
    total = sum(map(math.prod, weight.tensors.values())) // (facts.num_experts if weight.experts == "stacked" else 1)
    ranks = layout.expert_tensor if weight.experts else layout.tensor
    return total if weight.axis is None else -(-total // ranks)


def local_shape(weight: Weight, layout: Layout) -> tuple[int, int]:
    """Return how many outputs, of all its tensors together, and inputs of a matrix a rank holds."""
    ranks = layout.expert_tensor if weight.experts else layout.tensor
    outputs, inputs = sum(shape[0] for shape in weight.tensors.values()), next(iter(weight.tensors.values()))[1]
    return outputs // (ranks if weight.axis == 0 else 1), inputs // (ranks if weight.axis == 1 else 1)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
