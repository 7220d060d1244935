"""Estimates the peak memory of a training pass on a rank, in bytes, without the model itself.

The estimate counts the tensors of moe_rl's layers of torch operations: what autograd keeps of each operation, and
short-lived tensors on top. The measured peak on a CPU with one rank is within 10% of it
(tests/planning/test_activations.py). The estimate leaves out workspaces inside kernels, fragmentation of the allocator,
and buffers of collectives. TransformerEngine's layers keep less; the difference was never measured.

Legend: T rows of a microbatch on a rank (its tokens / context), S rows of them between the matrices (T / tensor,
sequence parallelism), b bytes of a number in train.dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_rl.config.layout import Layout
from moe_rl.config.training import TrainConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import layer_weights
from moe_rl.models.peft import target_of
from moe_rl.planning.memory import DTYPE_BYTES
from moe_rl.planning.parameters import local_shape
from moe_rl.types import LOGITS_AT_ONCE

FLOAT32 = 4
INT64 = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a microbatch on a rank.

    Attributes:
        rows: T.
        padded_rows: rows of the padded rectangles that attention computes on, where every sequence is as long as the
            longest of its group (`packing.alike`).
        longest: rows of the longest sequence, on all its ranks together.
        predicted: rows whose logits are used.
        dtype: the value of train.dtype.
        copies: other ranks' experts that the rank computes in each layer.
        frozen: whether the output matrix has no gradient.
    """

    rows: int
    padded_rows: int
    longest: int
    predicted: int
    dtype: str
    copies: int = 0
    frozen: bool = False

    @property
    def bytes_each(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Activations:
    """Holds the bytes that training passes need on a rank.

    Attributes:
        kept_bytes: kept by one microbatch between its forward and its backward pass.
        in_flight: microbatches that are in this state at the same time.
        head_bytes: added on the last stage after the forward pass: last norm, logits, and what is computed from them.
        backward_bytes: added by a microbatch inside the backward pass of the largest layer.
        dispatched_rows: (token, expert) pairs that the experts of a rank get in a layer, if the load is even.
        adapter_bytes: the most bytes that the adapters of one layer take. The other numbers include it.
    """

    kept_bytes: int
    in_flight: float
    head_bytes: int
    backward_bytes: int
    dispatched_rows: int
    adapter_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the peak: all other microbatches in flight, plus one at the end of its forward pass or inside its
        backward pass."""
        others = round(self.kept_bytes * (self.in_flight - 1))
        return others + max(self.kept_bytes + self.head_bytes, self.backward_bytes)


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """Holds the bytes of a layer's adapters: kept in the attention, kept after it, and the gradients of the experts'
    stacked matrices."""

    attention: int
    behind: int
    gradients: int


def norm_bytes(width: int, rows: int, shape: Shape) -> int:
    """Return the bytes of a norm: rows x (2 b x width + 4), for the input, the output, and a factor for each row."""
    return rows * (2 * shape.bytes_each * width + FLOAT32)


def head_norm_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes that the norms of queries and keys keep: T x (4 heads, for a factor, + b x q, where several
    queries share a key).

    Nothing keeps their outputs. Their inputs are those of the projections, but queries that share a key are a copy. A
    model without these norms has 0.
    """
    if not facts.qk_norm:
        return 0
    copied = facts.heads * facts.head_dim * shape.bytes_each if facts.heads != facts.kv_heads else 0
    return shape.rows * (FLOAT32 * (facts.heads + facts.kv_heads) + copied) // layout.tensor


def attention_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes of attention.

    T x b x (output of the projections q + k + v, rotated q and k, the attention output, a cosine and a sine for each
    head dimension). For the padded rectangles add b x (q, its output, context x (k + v)), one number wider per head for
    sinks; a float32 for each head; and the mask: `longest` bytes where context ranks share a sequence, `longest` x b
    for windows and sinks.
    """
    query = facts.heads * facts.head_dim // layout.tensor
    key = facts.kv_heads * facts.head_dim // layout.tensor
    value, output = key, query
    latents = 0
    if facts.latent is not None:
        value = output = facts.heads * facts.latent.value_dim // layout.tensor
        ranks = [rank for rank in (facts.latent.q_rank, facts.latent.kv_rank) if rank]
        latents = sum(norm_bytes(rank, shape.rows, shape) + shape.rows * rank * shape.bytes_each for rank in ranks)
    packed = (query + key + value) + (query + key) + output + 2 * facts.head_dim
    rectangles = query + output + layout.context * (key + value)
    if facts.sinks:
        rectangles += 2 * (facts.heads + layout.context * facts.kv_heads) // layout.tensor
    masked = facts.sinks or facts.window
    mask = shape.longest * (shape.bytes_each if masked else 1 if layout.context > 1 else 0)
    return (
        shape.bytes_each * (shape.rows * packed + shape.padded_rows * rectangles)
        + shape.padded_rows * (FLOAT32 * facts.heads // layout.tensor + mask)
        + latents
    )


def mlp_bytes(width: int, rows: int, shape: Shape) -> int:
    """Return the bytes of an MLP: rows x width x b x 5, for gate, up, silu of the gate, the shifted up, and their
    product."""
    return 5 * rows * width * shape.bytes_each


def dispatched_rows(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the rows dispatched to a rank's experts if the load is even: S x top_k x expert_tensor.

    Ranks that share an expert's matrices receive each other's rows.
    """
    return -(-shape.rows // layout.tensor) * facts.top_k * layout.expert_tensor


def expert_row_bytes(facts: ModelFacts, expert_tensor: int, bytes_each: int) -> int:
    """Return the bytes of one dispatched row: b x (hidden + 6 x the expert's width).

    These are its input, what the MLP keeps, and the product with the router's weight. A clamped SwiGLU has 8 instead of
    6.
    """
    times = 6 if facts.glu_clamp is None else 8
    return bytes_each * (facts.hidden_size + times * (facts.moe_intermediate_size // expert_tensor))


def copies_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes of the copies of experts in a layer: copies x 3 matrices x b."""
    width = facts.moe_intermediate_size // layout.expert_tensor
    return shape.copies * 3 * facts.hidden_size * width * shape.bytes_each


def experts_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes that the experts keep of all rows dispatched to a rank, and those of copied experts."""
    rows = dispatched_rows(facts, layout, shape) * expert_row_bytes(facts, layout.expert_tensor, shape.bytes_each)
    return rows + copies_bytes(facts, layout, shape)


def router_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes of the router: S x experts x (weights 4, order 8, map 1, sigmoid scores 4) + S x top_k x (ids 8,
    positions 8)."""
    scores = FLOAT32 * (facts.score_function == "sigmoid")
    per_row = facts.num_experts * (FLOAT32 + INT64 + 1 + scores) + 2 * INT64 * facts.top_k
    return -(-shape.rows // layout.tensor) * per_row


def held_by_router_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes of the router that remain when the layer is recomputed: S x (5 experts + 8 top_k)."""
    return -(-shape.rows // layout.tensor) * (facts.num_experts * (FLOAT32 + 1) + INT64 * facts.top_k)


def hidden_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes passed from layer to layer: S x hidden x b."""
    return -(-shape.rows // layout.tensor) * facts.hidden_size * shape.bytes_each


def moe_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes after the second norm of a layer with experts."""
    shared = mlp_bytes(facts.shared_intermediate_size // layout.tensor, shape.rows, shape)
    return router_bytes(facts, layout, shape) + experts_bytes(facts, layout, shape) + shared


def layer_bytes(facts: ModelFacts, layout: Layout, shape: Shape, *, has_experts: bool) -> int:
    """Return the bytes that a layer keeps when nothing in it is recomputed."""
    norms = 2 * norm_bytes(facts.hidden_size, -(-shape.rows // layout.tensor), shape)
    attention = head_norm_bytes(facts, layout, shape) + attention_bytes(facts, layout, shape)
    if has_experts:
        return norms + attention + moe_bytes(facts, layout, shape)
    return norms + attention + mlp_bytes(facts.intermediate_size // layout.tensor, shape.rows, shape)


def adapter_bytes(facts: ModelFacts, layout: Layout, train: TrainConfig, shape: Shape, layer: int) -> AdapterBytes:
    """Return the bytes that a layer keeps of its adapters: for each row b x columns, which are rank x the tensors in a
    matrix, and copies of the matrices.

    The experts' A and B are stacked for their products, but not the one that all experts share. The B of several
    tensors is widened with zeros to all columns.
    """
    if train.lora is None:
        return AdapterBytes(0, 0, 0)
    kept = {"attention": 0, "mlp": 0, "experts": 0}
    stacked = 0
    for weight in layer_weights(facts, layer):
        if (target := target_of(weight)) not in train.lora.targets:
            continue
        columns, (outputs, inputs) = len(weight.tensors) * train.lora.rank, local_shape(weight, layout)
        rows, matrices = shape.rows, outputs * columns if len(weight.tensors) > 1 else 0
        if weight.experts:
            rows = dispatched_rows(facts, layout, shape)
            matrices = layout.experts_per_rank * columns * (inputs + outputs)
            stacked += matrices
            if train.lora.shared_outer:
                matrices -= layout.experts_per_rank * columns * (inputs if weight.axis == 0 else outputs)
        kept[target] += shape.bytes_each * (rows * columns + matrices)
    return AdapterBytes(kept["attention"], kept["mlp"] + kept["experts"], shape.bytes_each * stacked)


def head_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes of the head: the last norm, logits, and what is computed from them.

    Where all rows have at most LOGITS_AT_ONCE logits, these are made at once: vocabulary / tensor x the larger of
    b (2 T + predicted rows), for the gradient when it is spread over all rows, and predicted rows x (12 + 2 b, for
    bfloat16 + b), for the logits, three float32 of each between the softmax and its gradient, and the gradient.

    Otherwise one chunk of LOGITS_AT_ONCE exists beside the gradient of the output matrix of M elements: the larger of
    chunk x (20, for bfloat16 + 2 b) + 4 M, because the last chunk is alive while the next one is made, and 16 x chunk +
    (4 + b) M. A frozen matrix has no gradient: M is 0. The hidden states of all rows and their gradient are added.

    Entropies (objective.entropy_coef) are not counted.
    """
    norm = norm_bytes(facts.hidden_size, -(-shape.rows // layout.tensor), shape)
    size, element_bytes = facts.vocab // layout.tensor, shape.bytes_each
    copies = element_bytes if element_bytes < FLOAT32 else 0
    if shape.rows * size <= LOGITS_AT_ONCE:
        softmax = (3 * FLOAT32 + 2 * element_bytes + copies) * shape.predicted
        return norm + size * max(softmax, element_bytes * (2 * shape.rows + shape.predicted))
    chunk = min(shape.predicted * size, LOGITS_AT_ONCE)
    matrix, hidden = 0 if shape.frozen else size * facts.hidden_size, shape.rows * facts.hidden_size
    made = (5 * FLOAT32 + 2 * copies) * chunk + FLOAT32 * matrix
    added = 4 * FLOAT32 * chunk + (FLOAT32 + element_bytes) * matrix
    return norm + max(made, added) + 2 * element_bytes * hidden


def passing_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Return the bytes in flight inside a layer with experts: b x hidden x (3 x dispatched rows + 4 S), and the
    gradients of copied experts.

    Dispatched rows exist three times: before the experts, after them, and sorted back.
    """
    rows = 3 * dispatched_rows(facts, layout, shape) + 4 * -(-shape.rows // layout.tensor)
    return rows * facts.hidden_size * shape.bytes_each + copies_bytes(facts, layout, shape)


def in_flight(layout: Layout, stage: int, microbatches: int) -> float:
    """Return the number of microbatches of a stage whose backward pass is still to come, as fractions of the stage's
    layers.

    1F1B: pipeline - stage, at most all microbatches. Interleaved schedule, in runs of layers: 2 (pipeline - stage - 1)
    + (runs - 1) x pipeline + 1 passes of one run each. Runs of different lengths are treated as equally long.
    """
    runs = layout.virtual_pipeline
    if runs == 1:
        return min(layout.pipeline - stage, microbatches)
    passes = 2 * (layout.pipeline - stage - 1) + (runs - 1) * layout.pipeline + 1
    return min(passes / runs, microbatches)


def stage_activations(
    facts: ModelFacts,
    layout: Layout,
    train: TrainConfig,
    shape: Shape,
    *,
    stage: int,
    runs: list[range],
    microbatches: int,
) -> Activations:
    """Estimate the activations of a rank of a pipeline stage.

    Args:
        runs: the layers of the stage, as runs of adjacent layers.
        microbatches: the number of microbatches in an update.
    """
    shape = replace(shape, frozen=train.lora is not None)
    kept = again = behind = of_adapters = gradients = 0
    hidden, held = hidden_bytes(facts, layout, shape), held_by_router_bytes(facts, layout, shape)
    for run in runs:
        plain = 0  # kept by the layers of the run after the recomputed ones
        for number, layer in enumerate(run):
            has_experts = layer in facts.moe_layers
            adapters = adapter_bytes(facts, layout, train, shape, layer)
            gradients = max(gradients, adapters.gradients)
            of_adapters = max(of_adapters, adapters.attention + adapters.behind + adapters.gradients)
            whole = layer_bytes(facts, layout, shape, has_experts=has_experts) + adapters.attention + adapters.behind
            if train.recompute == "uniform":
                # Only the input of each group of layers is kept. The backward pass runs the whole group again.
                kept += (hidden if number % train.recompute_layers == 0 else 0) + held * has_experts
                again = max(again, whole * train.recompute_layers)
            elif train.recompute == "block" and number < train.recompute_layers:
                kept, again = kept + hidden + held * has_experts, max(again, whole)
            elif train.recompute == "moe" and has_experts:
                inside = moe_bytes(facts, layout, shape) + adapters.behind
                kept, again = kept + whole - inside + held, max(again, inside)
            else:
                kept, plain = kept + whole, plain + whole
        behind = max(behind, plain)
    # When the backward pass reaches the recomputed layers, it has freed the layers after them.
    freed = behind if train.recompute == "block" else 0
    passing = passing_bytes(facts, layout, shape) + gradients
    return Activations(
        kept_bytes=kept,
        in_flight=in_flight(layout, stage, microbatches) + train.overlap_expert_parallel_comm,
        head_bytes=head_bytes(facts, layout, shape) if stage == layout.pipeline - 1 else 0,
        backward_bytes=max(kept + passing, kept - freed + again + passing),
        dispatched_rows=dispatched_rows(facts, layout, shape),
        adapter_bytes=of_adapters,
    )
