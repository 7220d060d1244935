"""The sections `parallel`, `placement` and `train`: how ranks share the model, and how it is updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moe_rl.config.section import BelowOne, Count, NotNegative, Number, Positive, Section, Share, Whole
from moe_rl.errors import describe


class ParallelConfig(Section):
    """Within a pipeline stage ranks are laid out twice: `tensor` x `context` x data for everything but the experts, and
    for these `expert_tensor` x `expert` x copies. Either product, times `pipeline`, is the world size."""

    tensor: Annotated[Literal[1, 2, 4, 8], Number] = 1
    """Ranks that share every dense matrix, and between the matrices the tokens of a microbatch (sequence parallelism).
    Each sees 1/tensor of the tokens at its routers."""
    context: Count = 1
    """Ranks that share the tokens of every sequence (zig-zag): each has two of 2 x `context` equal pieces, to which the
    sequence is padded. Keys and values travel between them."""
    expert: Count = 1
    """Ranks that share the experts of a layer, whole experts each."""
    expert_tensor: Count = 1
    """Ranks that share every expert's matrices."""
    pipeline: Count = 1
    """Stages that share the layers; microbatches go through them one after the other (1F1B)."""
    virtual_pipeline: Count = 1
    """Runs of layers that a stage holds, not adjacent ones (interleaved 1F1B). Microbatches of padding alone then
    fill up their number to a multiple of `pipeline`."""
    layers_per_run: tuple[Count, ...] = ()
    """Layers of each run, in the model's order: `pipeline` x `virtual_pipeline` numbers, of which stage s has the s-th,
    the (s + `pipeline`)-th and so on. None: all runs are equally long."""

    def problems(self) -> Iterator[str]:
        runs, lengths = self.pipeline * self.virtual_pipeline, self.layers_per_run
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            yield describe(
                "parallel.virtual_pipeline: there is no pipeline to interleave",
                got=self.virtual_pipeline,
                expected="1 while parallel.pipeline is 1",
            )
        elif lengths and runs == 1:
            yield describe(
                "parallel.layers_per_run: there is no pipeline that shares the layers",
                got=list(lengths),
                expected="none while parallel.pipeline is 1",
            )
        elif lengths and len(lengths) != runs:
            yield describe(
                "parallel.layers_per_run: not one number for each run of layers",
                got=f"{len(lengths)} numbers",
                expected=f"{runs} (parallel.pipeline x parallel.virtual_pipeline)",
            )


class PlacementConfig(Section):
    """Which rank of `parallel.expert` holds which experts. Only where they lie changes: numbers, names and values in
    routes, weights and checkpoints do not."""

    experts: Literal["natural", "traced"] = "natural"
    """natural: in the order of their numbers. traced: so that the recorded routes of the last steps load all ranks
    alike; experts move at the start of a step, with what the optimizer keeps of them."""
    every_steps: Count = 5
    """Steps between plans. The first step has one."""
    window_steps: Count = 4
    """Last steps whose routes a plan is made from, the one that starts included."""
    min_gain: BelowOne = 0.01
    """Experts stay where they are when the load of the fullest ranks, summed over layers, would fall by less than this
    fraction."""
    max_moved: Share = 1.0
    """Share of a layer's experts that one plan may move to other ranks, at most."""


class OptimizerConfig(Section):
    """Adam."""

    lr: Positive
    """Peak learning rate of Adam."""
    warmup_steps: Whole = 0
    """Optimizer steps of linear warm-up, then constant."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """How slowly Adam's averages of the gradient and of its square move."""
    eps: Annotated[float, Field(ge=1e-30, le=1.0)] = 1e-8
    """Added to the root of the average square, so that nothing is divided by 0."""
    weight_decay: NotNegative = 0.0
    """Share of a weight, times the learning rate, that each update takes off it."""
    clip_grad: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""


class TrainConfig(Section):
    """How the policy is updated."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the trainer's parameters. Main gradients and optimizer state are always float32."""
    updates_per_step: Count = 1
    """Optimizer updates from one rollout batch, each on its own share of the groups."""
    microbatch_tokens: Count
    """Tokens packed into one microbatch, before padding to a multiple of 8 rows for each rank of `parallel.context`."""
    packing: Literal["length", "load"] = "length"
    """Which sequences share a microbatch. length: so that the ranks have equal tokens. load: beside that, so that the
    recorded routes load all ranks of `parallel.expert` alike; a microbatch may then have up to 5% more tokens."""
    recompute: Literal["none", "uniform", "block", "moe"] = "none"
    """Activations computed again in the backward pass instead of kept. uniform: of all layers; kept is what goes into
    each run of `recompute_layers` layers. block: of the first `recompute_layers` layers of every run of adjacent layers
    that a stage holds. moe: of every layer's router and experts, not of its attention."""
    recompute_layers: Count = 1
    """Layers of a run (uniform) or at its start (block): see `recompute`."""
    overlap_expert_parallel_comm: bool = False
    """Combined 1F1B: the forward of one microbatch and the backward of another in turns, layer by layer, so that tokens
    of one travel between the ranks of `parallel.expert` while the other is computed. Holds the activations of both."""
    delay_wgrad_compute: bool = False
    """In combined 1F1B, compute the gradients of weight matrices behind those of the activations, while the latter
    travel. Needs the linear layers of TransformerEngine."""
    distributed_optimizer: bool = True
    """Share the optimizer state among data-parallel ranks. Off, each of them holds all of it."""
    router_aux_loss: NotNegative = 0.0
    """Weight of the load-balancing loss of each layer's router, added to the objective. It is of the router's own
    choice, also under replay, over each microbatch; these weigh as their tokens."""
    expert_bias_rate: NotNegative = 0.0
    """Only for models with an expert bias: added to it, with each update, for experts that got fewer tokens than the
    mean, taken off for those that got more. Counted are the routes taken, recorded ones under replay. 0: it stays."""
    optimizer: OptimizerConfig
    """The optimizer's settings."""

    def problems(self) -> Iterator[str]:
        if self.recompute_layers > 1 and self.recompute not in ("uniform", "block"):
            yield describe(
                f"train.recompute_layers: without effect where train.recompute is {self.recompute}",
                got=self.recompute_layers,
                expected="train.recompute uniform or block",
                do="remove it, or set train.recompute",
            )
        if self.delay_wgrad_compute and not self.overlap_expert_parallel_comm:
            yield describe(
                "train.delay_wgrad_compute: there is no communication that delayed work would go under",
                where="train.overlap_expert_parallel_comm is off",
                got=True,
                expected="false",
                do="turn the overlap on, or this off",
            )
        if self.overlap_expert_parallel_comm and self.recompute != "none":
            yield describe(
                "train.recompute: megatron cannot recompute layers that it runs in parts",
                where="train.overlap_expert_parallel_comm is on",
                got=self.recompute,
                expected="none",
            )
