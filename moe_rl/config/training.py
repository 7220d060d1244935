"""Defines the sections `parallel`, `placement` and `train`: how ranks share the model, and how it is updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_rl.config.section import BelowOne, Count, Location, NotNegative, Number, Positive, Section, Share, Whole
from moe_rl.errors import Problem, describe


class ParallelConfig(Section):
    """Sets the sizes of the parallel groups.

    The ranks of a pipeline stage form two layouts: `tensor` x `context` x data for all but the experts, and
    `expert_tensor` x `expert` x copies for the experts. Each product times `pipeline` is the world size.
    """

    tensor: Annotated[Literal[1, 2, 4, 8], Number] = 1
    """Number of ranks that share every dense matrix. Between the matrices they share the tokens of a microbatch
    (sequence parallelism), so that the routers of each rank see 1/tensor of the tokens."""
    context: Count = 1
    """Number of ranks that share the tokens of every sequence. A sequence is padded and cut into 2 x `context` equal
    pieces, of which each rank holds two (zig-zag). The ranks exchange keys and values."""
    expert: Count = 1
    """Number of ranks that share the experts of a layer. Each holds whole experts."""
    expert_tensor: Count = 1
    """Number of ranks that share the matrices of each expert."""
    pipeline: Count = 1
    """Number of pipeline stages that share the layers (1F1B schedule)."""
    virtual_pipeline: Count = 1
    """Number of separate runs of layers that a stage holds (interleaved 1F1B). Microbatches that hold only padding make
    the number of microbatches a multiple of `pipeline`."""
    layers_per_run: tuple[Count, ...] = ()
    """Number of layers in each run, in the model's order: `pipeline` x `virtual_pipeline` numbers. Stage s holds run s,
    run s + `pipeline`, and so on. Empty: all runs have the same length."""

    def problems(self) -> Iterator[Problem]:
        runs, lengths = self.pipeline * self.virtual_pipeline, self.layers_per_run
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            yield describe(
                "there is no pipeline to interleave",
                where={"key": "parallel.virtual_pipeline"},
                got=self.virtual_pipeline,
                expected="1 while parallel.pipeline is 1",
            )
        elif lengths and runs == 1:
            yield describe(
                "there is no pipeline that shares the layers",
                where={"key": "parallel.layers_per_run"},
                got=list(lengths),
                expected="none while parallel.pipeline is 1",
            )
        elif lengths and len(lengths) != runs:
            yield describe(
                "not one number for each run of layers",
                where={"key": "parallel.layers_per_run"},
                got=f"{len(lengths)} numbers",
                expected=f"{runs} (parallel.pipeline x parallel.virtual_pipeline)",
            )


class PlacementConfig(Section):
    """Says which rank of `parallel.expert` holds which experts.

    Placement changes only where an expert is. Its number in routes and its name in weights and checkpoints stay.
    """

    experts: Literal["natural", "traced"] = "natural"
    """natural: experts are in the order of their numbers. traced: experts are placed so that the recorded routes of the
    last steps load all ranks evenly. They move at the start of a step, together with their optimizer state."""
    every_steps: Count = 5
    """Number of steps between placement plans. The first step makes one."""
    window_steps: Count = 4
    """Number of steps whose routes a plan uses: the step that starts, and those before it."""
    min_gain: BelowOne = 0.01
    """Smallest gain for which experts are moved: the fraction by which the load of the fullest ranks falls, summed over
    layers."""
    max_moved: Share = 1.0
    """Largest share of a layer's experts that one plan may move to other ranks."""
    copies: Annotated[int, Field(ge=0, le=2**10)] = 0
    """Number of other ranks' experts that a rank may also compute, in each layer of a microbatch. An expert with more
    rows than a rank's share is copied to ranks with fewer rows, just for this layer and microbatch. Across hosts
    (`node_ranks`), copies also keep rows within a host. Gradients of copies are added to those of the expert. Needs
    dispatch plans, and experts without TransformerEngine. 0: none."""
    least_copied_rows: Count | None = None
    """Fewest rows for which an expert is copied. A row is a (token, expert) pair. null: as many as take about as long
    to exchange as the expert's weights and gradients: 1.5 times the width of an expert."""
    node_ranks: Count | None = None
    """Number of neighbouring ranks whose links to each other are fast, such as NVLink. Experts are also copied for
    rows that would otherwise leave these ranks. null: the ranks of a host."""


class OptimizerConfig(Section):
    """Sets the optimizer, which is Adam."""

    lr: Annotated[float, Field(gt=0.0, le=0.1)]
    """Peak learning rate. Adam moves each weight by up to about this much in an update. Most weights of a model are
    smaller than 0.1, so a higher rate would replace the model and is refused."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate continues after the warm-up. linear and cosine: it falls to `min_lr`. The fall begins with
    the first update after the warm-up. So without a warm-up no update has `lr`: with linear, the first of n updates has
    lr x (1 - 1/(n + 1))."""
    warmup_steps: Whole = 0
    """Number of updates over which the learning rate rises linearly from 0 to `lr`."""
    decay_steps: Count | None = None
    """Number of updates, warm-up included, over which a linear or cosine schedule falls. All later updates use
    `min_lr`. null: all updates of the run, run.steps x train.updates_per_step."""
    min_lr: NotNegative = 0.0
    """Learning rate to which a linear or cosine schedule falls."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of Adam's running averages of the gradient and of its square."""
    eps: Annotated[float, Field(ge=1e-30, le=1.0)] = 1e-8
    """Term added to Adam's denominator to avoid a division by 0."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay: each update subtracts this times the learning rate times the weight. Biases and the
    weights of norms do not decay."""
    clip_grad: Positive = 1.0
    """Largest global gradient norm. Larger gradients are scaled down to it."""

    def problems(self) -> Iterator[Problem]:
        if self.schedule == "constant":
            for key, value, unset in (("decay_steps", self.decay_steps, None), ("min_lr", self.min_lr, 0.0)):
                if value != unset:
                    yield describe(
                        "a constant learning rate does not fall",
                        where={"key": f"train.optimizer.{key}"},
                        got=value,
                        expected="train.optimizer.schedule linear or cosine",
                        do="remove it, or set the schedule",
                    )
        if self.min_lr > self.lr:
            yield describe(
                "the learning rate would rise to its minimum",
                where={"key": "train.optimizer.min_lr"},
                got=self.min_lr,
                expected=f"at most train.optimizer.lr = {self.lr}",
            )
        if self.decay_steps is not None and self.warmup_steps > self.decay_steps:
            yield describe(
                "the learning rate would fall before the warm-up ends",
                where={"key": "train.optimizer.decay_steps"},
                got=self.decay_steps,
                expected=f"at least train.optimizer.warmup_steps = {self.warmup_steps}",
            )


class LoraConfig(Section):
    """Sets the adapters of low rank that are trained in place of the model's weights (LoRA, arXiv 2106.09685).

    A matrix W of the checkpoint stays as it is and acts as W + alpha / rank * B A, with A [rank, inputs] and B
    [outputs, rank]. Routers, embeddings and norms have none.
    """

    rank: Annotated[int, Field(ge=1, le=1024)]
    """Rank of every adapter."""
    alpha: Positive
    """Scale of the adapters: alpha / rank times B A is added to a matrix."""
    targets: tuple[Literal["attention", "mlp", "experts"], ...] = ("attention", "experts")
    """Which matrices get an adapter. attention: all projections of the attention. mlp: those of dense layers and of
    shared experts. experts: those of routed experts."""
    shared_outer: bool = False
    """Whether all experts of a layer share the matrix that faces the layer's hidden states: A of gate and up, B of
    down. Its gradient is the sum over all experts; nothing is divided by their number or by top-k. false: each expert
    has its own."""
    start: Location | None = None
    """Folder of adapters that the run begins with, as peft or `moe-rl export --adapter` writes it. null: A is random
    and B is 0, so that the first weights are those of the model."""
    sync: Literal["merged", "adapter"] = "merged"
    """What an update sends to the sampler. merged: all weights, with the adapters merged into them. adapter: only the
    adapters. The sampler reads the weights of its checkpoint again, and merges the adapters into them itself."""

    def problems(self) -> Iterator[Problem]:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            yield describe("names no target, or one twice", where={"key": "train.lora.targets"}, got=list(self.targets))
        if self.shared_outer and "experts" not in self.targets:
            yield describe(
                "has no effect without adapters of experts",
                where={"key": "train.lora.shared_outer"},
                got=True,
                expected="false",
                do="remove it, or add experts to train.lora.targets",
            )


class TrainConfig(Section):
    """Sets how the policy is updated."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the trainer's parameters. Main gradients and the optimizer state are float32, unless
    `megatron_optimizer` says otherwise."""
    updates_per_step: Count = 1
    """Number of optimizer updates per rollout batch. Each uses its own share of the prompt groups."""
    microbatch_tokens: Count
    """Largest number of tokens packed into one microbatch, before padding to a multiple of 8 rows for each rank of
    `parallel.context`, with fp8 of 16 times `parallel.tensor`."""
    packing: Literal["length", "load"] = "length"
    """How sequences are distributed over microbatches. length: all ranks get about the same number of tokens. load: the
    recorded routes also load all ranks of `parallel.expert` evenly; the tokens may then differ by up to 5% more, and no
    microbatch exceeds `microbatch_tokens`."""
    recompute: Literal["none", "uniform", "block", "moe"] = "none"
    """Which activations the backward pass computes again instead of keeping them. uniform: those of all layers; only
    the input of every `recompute_layers` layers is kept. block: those of the first `recompute_layers` layers of each
    run of adjacent layers in a stage. moe: those of every layer's router and experts, but not of its attention."""
    recompute_layers: Count = 1
    """Number of layers for `recompute` uniform or block."""
    overlap_expert_parallel_comm: bool = False
    """Whether the forward pass of one microbatch and the backward pass of another alternate layer by layer (combined
    1F1B). Tokens of one microbatch then travel between the ranks of `parallel.expert` while the other is computed. It
    needs memory for the activations of both."""
    delay_wgrad_compute: bool = False
    """Whether combined 1F1B computes the gradients of weight matrices later, while the gradients of activations travel.
    Needs the linear layers of TransformerEngine."""
    distributed_optimizer: bool = True
    """Whether data-parallel ranks share the optimizer state. false: each holds all of it."""
    router_aux_loss: NotNegative = 0.0
    """Weight of the load-balancing loss that is added to the objective. It is computed for each layer and microbatch
    from the router's own choice, also under replay. Microbatches are weighted by their tokens."""
    expert_bias_rate: NotNegative = 0.0
    """Step of the expert bias in models that have one. Each update adds it for experts with fewer tokens than the mean,
    and subtracts it for experts with more. The routes that were taken count: under replay, the recorded ones. 0: the
    bias stays."""
    optimizer: OptimizerConfig
    """Settings of the optimizer."""
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights, see docs/howto/lora.md. null: all weights are trained."""
    megatron: dict[str, Any] = {}
    """Further fields of Megatron's TransformerConfig that moe_rl does not set, such as recompute_granularity and
    recompute_modules, fp8, or apply_rope_fusion. docs/howto/one_node.md says which are refused, and why."""
    megatron_optimizer: dict[str, Any] = {}
    """Further fields of Megatron's OptimizerConfig and DistributedDataParallelConfig that moe_rl does not set, such as
    use_precision_aware_optimizer, exp_avg_dtype, optimizer_cpu_offload, or grad_reduce_in_fp32
    (false: gradients are summed in the parameters' precision). Precisions are written as text: bfloat16."""

    def problems(self) -> Iterator[Problem]:
        if self.recompute_layers > 1 and self.recompute not in ("uniform", "block"):
            yield describe(
                f"has no effect if train.recompute is {self.recompute}",
                where={"key": "train.recompute_layers"},
                got=self.recompute_layers,
                expected="train.recompute uniform or block",
                do="remove it, or set train.recompute",
            )
        if self.delay_wgrad_compute and not self.overlap_expert_parallel_comm:
            yield describe(
                "there is no communication to overlap with delayed work",
                where={"key": "train.delay_wgrad_compute", "given": "train.overlap_expert_parallel_comm is off"},
                got=True,
                expected="false",
                do="turn the overlap on, or train.delay_wgrad_compute off",
            )
        if self.overlap_expert_parallel_comm and self.recompute != "none":
            yield describe(
                "megatron cannot recompute layers that it runs in parts",
                where={"key": "train.recompute", "given": "train.overlap_expert_parallel_comm is on"},
                got=self.recompute,
                expected="none",
            )
