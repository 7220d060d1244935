"""The configuration of a run: typed, frozen, closed. Unknown keys are errors; nothing here imports torch.

Derived numbers do not live here: see `plan.py`. Each field is documented by the string under it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run folder, `runs_dir/name-<time>`."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders, relative to the working directory."""
    seed: int = 1
    """Every random choice of a run derives from it: prompt order, sampling seeds, model RNG."""
    steps: Count
    """Rollout batches to sample and learn from."""
    peer_timeout_seconds: Positive = 30.0
    """A rank or a sampler that gives no sign of life for so long ends the run."""


class ModelConfig(Section):
    path: Path
    """Folder of a Hugging Face checkpoint of a Qwen3-MoE or GLM-4.5 model: config.json, safetensors, tokenizer.json."""
    published: Path | None = None
    """The figures of the published config.json, as configs/models has them. Where `path` is not on this machine, --plan
    takes the model from here; where it is, it must be this model."""


class RewardConfig(Section):
    function: str
    """Dotted path of a callable `(prompt, completion, answer) -> float`; it is given only the parameters it names."""
    weight: float = 1.0
    """Its share in the reward, a weighted sum."""


class OverlongConfig(Section):
    cache_tokens: Count
    """Tokens before rollout.max_completion_tokens over which the punishment grows from 0 to `penalty`."""
    penalty: Positive = 1.0
    """Taken off the reward of a completion that is truncated."""


class TaskConfig(Section):
    train: Path
    """JSONL of prompts to learn from: id, prompt, answer, level."""
    heldout: Path
    """JSONL of prompts never trained on."""
    train_prompts: Count | None = None
    """Prompts that `train` must have; --plan counts with it where the file is not here. null: any number."""
    rewards: Annotated[dict[str, RewardConfig], Field(min_length=1)]
    """Reward functions by name."""
    pass_reward: str
    """The reward function whose value 1 means that a completion passes."""
    verifier_timeout_seconds: Positive = 5.0
    """A verification that takes longer is killed and counts as failed."""
    verifier_workers: Count = 1
    """Verifier processes."""
    max_failed_fraction: Fraction = 0.1
    """The run ends when more of a step's verifications fail than this."""
    overlong: OverlongConfig | None = None
    """DAPO's soft punishment of completions that come near the limit, added to the reward. null: none."""


class RolloutConfig(Section):
    prompts_per_step: Count
    """Prompts sampled from in one step."""
    group_size: Annotated[int, Field(ge=2)]
    """Completions sampled from each prompt."""
    dynamic_sampling_rounds: Count = 1
    """DAPO's dynamic sampling: as long as fewer than prompts_per_step groups have rewards that differ, as many further
    prompts are sampled from, in so many rounds at most. Trained on are the first prompts_per_step such groups. 1: off,
    all groups are trained on."""
    max_prompt_tokens: Count
    """Longer prompts are refused when the prompts are read."""
    max_completion_tokens: Count
    """Completions are truncated here."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer's logits are divided by it too."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Tokens are drawn from the `top_k` most likely ones. 0: from all. This and the next two need
    keep_sampling_mask. Evaluation samples with them too, but for its greedy half."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Tokens are drawn from the fewest that together have this probability. 1: from all."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Tokens are drawn from those at least this many times as likely as the likeliest. 0: from all."""
    keep_sampling_mask: bool = False
    """Record which tokens top_k, top_p and min_p left each sampled one to be drawn from, and have the trainer
    renormalise its distributions over the same ones in every pass (DeepSeek-V3.2, arXiv 2512.02556)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision that the sampler computes in."""
    weights: Literal["exact", "fp8_e4m3"] = "exact"
    """exact: the trainer's, in `dtype`. fp8_e4m3: of attention, experts and dense layers the matrices are rounded to
    what block-scaled float8 holds before the sampler gets them, also the first time; it still computes in `dtype`."""
    weight_transfer: Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "disk"] = "auto"
    """How new weights reach the sampler. shared_memory: of one host. cuda_ipc: of GPUs that trainer and sampler share.
    broadcast: over NCCL, or gloo without GPUs, as vLLM does it. disk: a folder that both see, the run's. auto: the one
    that --plan shows."""
    weight_bucket_mib: Positive = 256.0
    """Weights that a rank holds on their way to the sampler at a time, or one tensor that is larger."""
    sleep_level: Literal[0, 1, 2] = 0
    """What a sampler on the trainer's GPUs gives back while the trainer works. 0: nothing. 1: the KV cache; weights go
    to the host. 2: both; the weights come back with the next update. Does nothing on a CPU."""
    max_concurrent: Count = 256
    """Sequences the engine decodes at once."""
    kv_cache_mib: Count = 512
    """Memory for the engine's KV cache, on each of its GPUs."""
    capture: Literal["patch", "worker", "native"] = "patch"
    """What records routes. patch: the patched vLLM. worker: the same recorder through vLLM's worker class, in a vLLM
    that may not be patched. native: vLLM's own capture (Model Runner V2, which needs a GPU)."""
    router_logits_fraction: Fraction = 0.0
    """Of the tokens whose router logits the sampler stores with their routes. Not with native capture."""
    startup_timeout_seconds: Positive = 300.0
    """An engine that is not ready by then is given up, a server that has not loaded new weights by then too."""
    servers: tuple[str, ...] = ()
    """URLs, http://host:port, of the vLLM servers (tools/serve_vllm.py --config) that sample in place of an engine that
    rank 0 starts; each a replica of the weights, of this run alone. They write below run.runs_dir, which they and all
    ranks see. Each decodes max_concurrent sequences at once."""
    token_file: Path | None = None
    """File of mode 600 with the secret that the servers want of everyone; serve_vllm.py makes it."""
    max_lost_servers: Annotated[int, Field(ge=0)] = 0
    """Servers that may die, hang or lose their weights before the run ends; the others sample what these had not given
    back, and a resumed run wants all of them again."""


class ReplayConfig(Section):
    mode: Literal["r3", "r2", "off"] = "r3"
    """r3: the trainer takes the sampler's routes in every forward pass of the policy. r2: it routes natively where it
    computes the old log-probabilities, and takes these routes in the updates. off: it routes natively."""
    native_every: Annotated[int, Field(ge=0)] = 5
    """Every so many steps the disagreement of the routers is logged for each layer, and under r3 one extra pass routes
    natively, to measure what replay removes. 0: never."""
    keep_shards: Count = 4
    """Last steps whose rollouts, trace shards included, stay on disk. So do those sampled from the checkpoints that are
    kept (checkpoint.keep) and from the initial model; others are removed."""
    missing: Literal["refuse", "drop", "native"] = "refuse"
    """What becomes of a sequence with forwarded tokens that have no recorded route. refuse: the run ends. drop: it is
    not trained on. native: the router chooses for these tokens. Damaged or wrong routes always end the run."""
    stale: Literal["refuse", "replay", "native"] = "refuse"
    """What becomes of routes recorded under older weights than those the trainer has."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Updates that routes may be older; with stale replay or native only. Older ones end the run."""
    plan: bool | None = None
    """Whether what each rank sends to which expert is computed from the routes once a step, so that no MoE layer asks
    the other ranks for counts or waits for them. The results are the same bit for bit. null: yes where routes are
    replayed (mode r3 and r2)."""
    overlap_chunks: Annotated[int, Field(ge=0)] = 0
    """With plans, the rows of an MoE layer leave for the ranks of `parallel.expert` before its router has run, and the
    layer computes while they travel, forward and backward. 1: all at once, the router and shared experts under way; the
    results are the same bit for bit. More: in so many chunks, one in the experts while another travels; the gradients
    of the experts are then sums over chunks. 0: off, Megatron's order."""
    max_rows: Count | None = None
    """Rows, (token, expert) pairs with padding among them, that the experts of a rank may get in a layer of a
    microbatch. A step whose routes would bring more ends the run before the first pass under them. null: any number."""
    max_fallback_fraction: Fraction = 0.0
    """The run ends when more of a step's (token, layer) positions are routed natively, or more of its sequences are
    dropped, than this."""


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
    min_gain: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Experts stay where they are when the load of the fullest ranks, summed over layers, would fall by less than this
    fraction."""
    max_moved: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of a layer's experts that one plan may move to other ranks, at most."""


class ParallelConfig(Section):
    """Within a pipeline stage ranks are laid out twice: `tensor` x `context` x data for everything but the experts, and
    for these `expert_tensor` x `expert` x copies. Either product, times `pipeline`, is the world size."""

    tensor: Literal[1, 2, 4, 8] = 1
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


class OptimizerConfig(Section):
    lr: Positive
    """Peak learning rate of Adam."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up, then constant."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    clip_grad: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""


class TrainConfig(Section):
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
    router_aux_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the load-balancing loss of each layer's router, added to the objective. It is of the router's own
    choice, also under replay, over each microbatch; these weigh as their tokens."""
    expert_bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Only for models with an expert bias: added to it, with each update, for experts that got fewer tokens than the
    mean, taken off for those that got more. Counted are the routes taken, recorded ones under replay. 0: it stays."""
    optimizer: OptimizerConfig


# What each policy loss is given of the section `objective`, with the values that were published or are usual.
LOSS_PARAMETERS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {"weight_cap": 5.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "gmpo": {"clip_low": 0.33, "clip_high": 0.49},
    "dppo_tv": {"delta_low": 0.2, "delta_high": 0.2, "weight_cap": 20.0},
    "minirl": {"clip_low": 0.2, "clip_high": 0.27, "weight_cap": 5.0},
    "decoupled": {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 5.0},
}


class CorrectionConfig(Section):
    """A weight for what separates the sampler from the trainer before the step; formulas in objectives/corrections."""

    level: Literal["token", "sequence", "geometric"]
    """The ratio, trainer's old policy / sampler, that it looks at: of the token; of its sequence, as the product of the
    tokens' ratios; or as their geometric mean."""
    rule: Literal["truncate", "mask", "reject", "veto"]
    """truncate: the ratio, at most `high`. mask: the ratio where it is within the bounds, else 0. reject: 1 where it is
    within them, else 0. veto: 0 for the whole sequence when the ratio of any of its tokens is below `low`."""
    low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Lower bound of the ratio: mask and reject may have it, veto needs it. 1 is always within the bounds."""
    high: Annotated[float, Field(ge=1.0)] | None = None
    """Upper bound of the ratio: truncate and mask need it, reject may have it."""


class ObjectiveConfig(Section):
    """A loss takes some of the parameters that have no value by default. They must be set, but for gspo and gspo_token,
    which have the published range then; those it does not take must not be."""

    name: Literal[
        "gspo",
        "gspo_token",
        "grpo",
        "dr_grpo",
        "dapo",
        "cispo",
        "sapo",
        "gmpo",
        "dppo_tv",
        "minirl",
        "decoupled",
    ] = "gspo"
    """The policy loss; formulas and denominators stand in moe_rl/objectives.
    gspo: one ratio per sequence, clipped; mean over sequences. gspo_token: the same, counted by token.
    grpo: one clipped ratio per token; mean over a sequence, then over sequences. dr_grpo: the same summed over tokens,
    divided by sequences x rollout.max_completion_tokens. dapo: the same as mean over all tokens.
    cispo: log-likelihood weighted by the truncated ratio; mean over all tokens.
    sapo: one ratio per token, faded out softly; mean as in grpo.
    gmpo: one ratio per sequence, of ratios clipped by token; mean over sequences.
    dppo_tv: as cispo, without tokens whose probability moved too far; needs old_logprobs: sampler.
    minirl: as cispo with the ratio to the sampler, without tokens whose ratio to the trainer's old policy is outside
    the clip range; sum over a sequence, mean over sequences; needs old_logprobs: trainer.
    decoupled: as dapo, times the truncated ratio of the trainer's old policy to the sampler; needs
    old_logprobs: trainer."""
    clip_low: Positive | None = None
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. Not for cispo, sapo, dppo_tv."""
    clip_high: Positive | None = None
    weight_cap: Annotated[float, Field(ge=1.0)] | None = None
    """The weight is truncated here. Only for cispo, dppo_tv, minirl, decoupled."""
    tau_positive: Positive | None = None
    """How fast sapo fades a token out where the advantage is positive."""
    tau_negative: Positive | None = None
    """The same where it is negative."""
    delta_low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Only for dppo_tv: probability that a token may lose before its gradient is taken away."""
    delta_high: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """The same for what it may gain."""
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "reinforce_pp"] = "group_std"
    """What a reward is compared with; formulas and special cases stand in moe_rl/objectives/advantages.py.
    group_std: its group's mean, divided by the group's standard deviation. group_mean: the same undivided; dr_grpo and
    minirl need it. leave_one_out: the mean of the others of its group. batch_std: its group's mean, divided by the
    standard deviation of the batch. reinforce_pp: mean and standard deviation over all tokens of the batch."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Denominator of the ratio: recomputed by the trainer before a step's first update, or as the sampler gave it."""
    corrections: tuple[CorrectionConfig, ...] = ()
    """Weights of tokens and sequences against the mismatch of sampler and trainer; they multiply. Tokens of weight 0
    stay in the denominator."""
    off_policy_delta: Positive | None = None
    """Nats per token: a sequence with a negative advantage is masked when the policy as it is now finds its tokens less
    likely than the sampler did by more than this, on average (DeepSeek-V3.2). null: none is."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL to the frozen initial policy, which routes natively: mean over a sequence, then over
    sequences, beside every loss. 0: no reference model is built."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How a token estimates it; value and gradient of each stand in moe_rl/objectives/penalties.py."""
    kl_unbiased: bool = False
    """Multiply each token's estimate by the ratio of new to old policy, through which the gradient flows too
    (DeepSeek-V3.2). k1 and k3 then have the gradient of KL(policy || reference) on average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the KL is a term of the loss. reward: kl_coef times the sum of the KL over a completion's tokens, of the
    policy before the step's first update, is taken off its reward before rewards are compared."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the policy's entropy, mean over the completion tokens of an update, which is taken off the loss: raises
    it. In nats, at the sampling temperature, over the tokens that keep_sampling_mask leaves. 0: not computed there."""

    @model_validator(mode="after")
    def _gspo_range(self) -> Self:
        """The only defaults that depend on another key, filled in here so that the resolved config has them."""
        if self.name in ("gspo", "gspo_token"):
            for key, value in LOSS_PARAMETERS[self.name].items():
                if getattr(self, key) is None:
                    object.__setattr__(self, key, value)  # frozen for everybody else
        return self

    @property
    def corrected(self) -> bool:
        """Whether tokens have weights."""
        return bool(self.corrections) or self.off_policy_delta is not None

    @property
    def parameters(self) -> dict[str, float]:
        """What the chosen loss is given, by name."""
        return {key: getattr(self, key) for key in LOSS_PARAMETERS[self.name]}


class GuardsConfig(Section):
    max_skipped_updates: Count = 3
    """The run ends with so many updates in a row that were skipped because a loss or gradient was not finite."""
    collapse_steps: Annotated[int, Field(ge=0)] = 3
    """The run ends with so many steps in a row that say that it is lost: all completions truncated and no reward at
    all, or one of the limits below exceeded. 0: never."""
    max_policy_kl: Positive = 0.5
    """Limit of policy_kl/k3, in nats per token. Healthy runs are below 0.01."""
    max_extreme_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Limit of policy/extreme_fraction. Healthy runs are below 0.001, runs that are about to collapse at 0.1."""
    max_canary_difference: Positive = 1.0
    """Limit of sync/canary_abs_diff, in nats: a run whose sampler and trainer differ by more after a sync ends before
    the next token is sampled. Tiny bfloat16 models stay below 0.3; layers or experts that changed places give 1 to 6,
    two exchanged experts of one layer too little to be seen (docs/weight_sync.md)."""


class ClusterConfig(Section):
    """The machines a run is planned for: `--plan` says whether it fits there, a run that does not is not started."""

    gpus: Count
    """GPUs that train: the number of ranks of --plan, unless --world-size says another."""
    gpus_per_node: Count = 8
    gpu_memory_gib: Positive
    """Of one GPU, as its driver tells it: 79 of an "80 GB" one, 140 of a "141 GB" one."""
    reserved_gib: Annotated[float, Field(ge=0.0)] = 8.0
    """Of it that the plan does not count on: CUDA's context, NCCL's buffers, kernels' workspaces, fragmentation."""
    engines: Count = 1
    """Sampling engines. They have GPUs of their own, of the same size."""
    gpus_per_engine: Count = 1
    """GPUs that share the weights and the key-value heads of an engine."""
    links_gb_per_second: dict[str, Positive] = {"network": 50.0}
    """Ways by which weights may reach an engine, by name, in 10^9 bytes a second."""


class CheckpointConfig(Section):
    every_steps: Count = 10
    """Steps between checkpoints. The last step always writes one."""
    keep: Count = 2
    """Checkpoints kept."""
    asynchronous: bool = True
    """Copy to host memory what a checkpoint holds, and write it while the run goes on. Off, the run waits."""
    grace_seconds: Positive = 25.0
    """A run that is asked to stop (SIGTERM) leaves its sampling, or ends its training step, and saves. It has ended so
    many seconds later, at the latest. Less than what the scheduler and torchrun (--shutdown-timeout, 30) wait."""


class EvalConfig(Section):
    every_steps: Count = 10
    """Steps between evaluations on the held-out prompts. Before the first step and after the last always."""
    prompts: Count = 256
    """Held-out prompts used, the same ones each time."""


class Config(Section):
    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig
    replay: ReplayConfig = ReplayConfig()
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()
    cluster: ClusterConfig | None = None
    train: TrainConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    guards: GuardsConfig = GuardsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
