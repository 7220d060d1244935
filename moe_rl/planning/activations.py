"""What a training pass holds beside the model: an estimate of its peak on a rank, in bytes.

Counted are the tensors that the passes make, as moe_rl's layers of torch operations make them: what autograd keeps of
each operation, and what is alive for a moment on top. On a CPU, on one rank, that peak was measured and lies within 10%
(tests/planning/test_activations.py). Not counted: workspaces inside kernels, the allocator's fragments, buffers of
collectives. TransformerEngine's layers keep less; how much was never measured.

Legend: T rows of a microbatch on a rank (its tokens / context), S of them between the matrices (T / tensor, sequence
parallelism), b bytes of a number in train.dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.layout import Layout
from moe_rl.config.training import TrainConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.planning.memory import DTYPE_BYTES

FLOAT32 = 4
INT64 = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A microbatch on a rank. rows: T. padded_rows: of the rectangles that attention is computed in, the sequences as
    long as the longest, which has `longest` rows on all ranks together. predicted: rows whose logits are used. dtype:
    as train.dtype."""

    rows: int
    padded_rows: int
    longest: int
    predicted: int
    dtype: str

    @property
    def bytes_each(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Activations:
    """kept_bytes: by one microbatch between its forward and its backward pass. in_flight: microbatches that have such
    at the same time. head_bytes: on top on the last stage, behind the forward pass: the last norm, logits and what
    becomes of them. backward_bytes: of a microbatch inside the fullest layer's backward pass. dispatched_rows: (token,
    expert) pairs that a rank's experts get in a layer, when these are loaded evenly."""

    kept_bytes: int
    in_flight: float
    head_bytes: int
    backward_bytes: int
    dispatched_rows: int

    @property
    def peak_bytes(self) -> int:
        """The other microbatches in flight, and one behind its forward pass or inside its backward pass."""
        others = round(self.kept_bytes * (self.in_flight - 1))
        return others + max(self.kept_bytes + self.head_bytes, self.backward_bytes)


def norm_bytes(width: int, rows: int, shape: Shape) -> int:
    """rows x width x (8 + b) + 4 rows. In bfloat16: input and normalised in float32, and the output; in float32: the
    input and two products."""
    return rows * (width * (2 * FLOAT32 + shape.bytes_each) + FLOAT32)


def head_norm_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Norms of queries and keys: T x 8 of each number, and a factor of each head; 0 without them."""
    if not facts.qk_norm:
        return 0
    heads = (facts.heads + facts.kv_heads) // layout.tensor
    return shape.rows * heads * (2 * FLOAT32 * facts.head_dim + FLOAT32)


def attention_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """T x b x (the projections' output q + k + v, rotated q and k, the output, rotary angles of 4 head dimensions), and
    in rectangles b x (q, its output, context x (k + v)), wider by one a head for sinks, a float32 of each head, and the
    mask, `longest` bytes where context ranks share a sequence, `longest` x b for windows and sinks."""
    query = facts.heads * facts.head_dim // layout.tensor
    key = facts.kv_heads * facts.head_dim // layout.tensor
    value, output = key, query
    latents = 0
    if facts.latent is not None:
        value = output = facts.heads * facts.latent.value_dim // layout.tensor
        ranks = [rank for rank in (facts.latent.q_rank, facts.latent.kv_rank) if rank]
        latents = sum(norm_bytes(rank, shape.rows, shape) + shape.rows * rank * shape.bytes_each for rank in ranks)
    packed = (query + key + value) + (query + key) + output + 4 * facts.head_dim
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
    """rows x width x b x 5: gate and up, silu of the gate, the shifted up, their product."""
    return 5 * rows * width * shape.bytes_each


def dispatched_rows(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """S x top_k x expert_tensor: what is sent when experts are loaded evenly; the ranks that share an expert's matrices
    see each other's rows."""
    return -(-shape.rows // layout.tensor) * facts.top_k * layout.expert_tensor


def expert_row_bytes(facts: ModelFacts, expert_tensor: int, bytes_each: int) -> int:
    """Bytes of one dispatched row, b x (hidden + 6 x the expert's width): input, what an MLP keeps, the product with
    the router's weight. 8 x where the SwiGLU is clamped."""
    times = 6 if facts.glu_clamp is None else 8
    return bytes_each * (facts.hidden_size + times * (facts.moe_intermediate_size // expert_tensor))


def experts_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """What the experts keep of all rows that are dispatched to a rank."""
    return dispatched_rows(facts, layout, shape) * expert_row_bytes(facts, layout.expert_tensor, shape.bytes_each)


def router_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """S x experts x (weights 4, order 8, map 1, sigmoid's scores 4) + S x top_k x (ids 8, positions 8)."""
    scores = FLOAT32 * (facts.score_function == "sigmoid")
    per_row = facts.num_experts * (FLOAT32 + INT64 + 1 + scores) + 2 * INT64 * facts.top_k
    return -(-shape.rows // layout.tensor) * per_row


def held_by_router_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """Bytes of the router that stay also where the layer is recomputed: S x (5 experts + 8 top_k)."""
    return -(-shape.rows // layout.tensor) * (facts.num_experts * (FLOAT32 + 1) + INT64 * facts.top_k)


def hidden_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """S x hidden x b: what goes from layer to layer."""
    return -(-shape.rows // layout.tensor) * facts.hidden_size * shape.bytes_each


def moe_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """What stands behind the norm of a layer with experts."""
    shared = mlp_bytes(facts.shared_intermediate_size // layout.tensor, shape.rows, shape)
    return router_bytes(facts, layout, shape) + experts_bytes(facts, layout, shape) + shared


def layer_bytes(facts: ModelFacts, layout: Layout, shape: Shape, *, has_experts: bool) -> int:
    """What a layer keeps when nothing of it is recomputed."""
    norms = 2 * norm_bytes(facts.hidden_size, -(-shape.rows // layout.tensor), shape)
    attention = head_norm_bytes(facts, layout, shape) + attention_bytes(facts, layout, shape)
    if has_experts:
        return norms + attention + moe_bytes(facts, layout, shape)
    return norms + attention + mlp_bytes(facts.intermediate_size // layout.tensor, shape.rows, shape)


def head_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """The last norm, and vocabulary / tensor x the larger of 20 x predicted rows, five float32 of each logit between
    softmax and its gradient, and 8 T + 4 x predicted rows, the gradient where it is spread over all rows. Entropies
    (objective.entropy_coef) are not counted."""
    norm = norm_bytes(facts.hidden_size, -(-shape.rows // layout.tensor), shape)
    softmax = 5 * FLOAT32 * shape.predicted
    spread = 2 * FLOAT32 * shape.rows + FLOAT32 * shape.predicted
    return norm + facts.vocab // layout.tensor * max(softmax, spread)


def passing_bytes(facts: ModelFacts, layout: Layout, shape: Shape) -> int:
    """b x hidden x (3 x dispatched rows, in front of the experts, behind them and sorted back, + 4 S)."""
    rows = 3 * dispatched_rows(facts, layout, shape) + 4 * -(-shape.rows // layout.tensor)
    return rows * facts.hidden_size * shape.bytes_each


def in_flight(layout: Layout, stage: int, microbatches: int) -> float:
    """Microbatches of which a stage has forward passes without their backward, in parts of its layers.

    1F1B: pipeline - stage, at most all. Interleaved, in runs of layers: 2 (pipeline - stage - 1) + (runs - 1) x
    pipeline + 1 passes of one run each; runs of different lengths are taken as equally long.
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
    """Estimate a rank of a pipeline stage. runs: its layers, in runs of adjacent ones. microbatches: of an update."""
    kept = again = behind = 0
    hidden, held = hidden_bytes(facts, layout, shape), held_by_router_bytes(facts, layout, shape)
    for run in runs:
        plain = 0  # what the layers of the run keep that stand behind its recomputed ones
        for number, layer in enumerate(run):
            has_experts = layer in facts.moe_layers
            whole = layer_bytes(facts, layout, shape, has_experts=has_experts)
            if train.recompute == "uniform":
                # The input of each group of layers is kept; the group is run again as a whole.
                kept += (hidden if number % train.recompute_layers == 0 else 0) + held * has_experts
                again = max(again, whole * train.recompute_layers)
            elif train.recompute == "block" and number < train.recompute_layers:
                kept, again = kept + hidden + held * has_experts, max(again, whole)
            elif train.recompute == "moe" and has_experts:
                inside = moe_bytes(facts, layout, shape)
                kept, again = kept + whole - inside + held, max(again, inside)
            else:
                kept, plain = kept + whole, plain + whole
        behind = max(behind, plain)
    # The backward pass has freed the layers behind when it comes to those that are recomputed.
    freed = behind if train.recompute == "block" else 0
    passing = passing_bytes(facts, layout, shape)
    return Activations(
        kept_bytes=kept,
        in_flight=in_flight(layout, stage, microbatches) + train.overlap_expert_parallel_comm,
        head_bytes=head_bytes(facts, layout, shape) if stage == layout.pipeline - 1 else 0,
        backward_bytes=max(kept + passing, kept - freed + again + passing),
        dispatched_rows=dispatched_rows(facts, layout, shape),
    )
