"""Defines the configuration of a run. All sections are typed and frozen, and unknown keys are errors.

The string under a field documents it. Numbers that follow from the config are computed in moe_rl/planning.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_rl.config.environment import EnvironmentConfig, GatewayConfig
from moe_rl.config.objective import AnyObjective, GspoConfig
from moe_rl.config.prompt_sources import (
    GENERATOR,
    ChatConfig,
    HeldoutSourceConfig,
    TrainSourceConfig,
    heldout_problems,
    source_problems,
)
from moe_rl.config.reward_kinds import AnyReward
from moe_rl.config.sampling_keys import PipelineConfig, ReplayConfig, RolloutConfig
from moe_rl.config.section import (
    BelowOne,
    Count,
    Few,
    Fraction,
    Location,
    NotNegative,
    Positive,
    Seconds,
    Section,
    Share,
    Whole,
)
from moe_rl.config.training import ParallelConfig, PlacementConfig, TrainConfig
from moe_rl.errors import Problem, describe, did_you_mean
from moe_rl.types import LARGEST_REWARD


class RunConfig(Section):
    """Names a run and sets its length."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the run folder, `runs_dir/name-<time>`: letters, digits, dots, dashes and underscores, at most 100."""
    runs_dir: Location = Path("runs")
    """Folder that holds the run folders, relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of every random choice: prompt order, sampling, model initialisation. It fits into 32 bits because vLLM and
    NumPy take no larger one."""
    steps: Count
    """Number of steps. Each samples one rollout batch and trains on it."""
    date: datetime.date | None = None
    """Day that a chat template writes into prompts, such as gpt-oss's. null: the day on which the run begins, if the
    model's template writes any."""
    max_hours: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Hours after its start at which the run ends, as if asked to stop: after a step, with a checkpoint. It ends
    earlier if another step as long as the longest so far would exceed them. A resumed run gets all of them again.
    null: no limit."""
    peer_timeout_seconds: Annotated[float, Field(ge=1.0, le=2e6)] = 30.0
    """Seconds without a sign of life from a rank or a sampler after which the run ends. Ranks give two signs a
    second."""
    hang_seconds: Annotated[float, Field(ge=1.0, le=2e6)] = 600.0
    """Seconds after which the run ends if all ranks live and none begins a part of the start or a step, a microbatch, a
    layer, or a piece of a checkpoint that is read or written. Three times the longest such time so far in the same part
    is always allowed, and six times this number in a part that is new. Waiting for samplers, verifiers and trackers
    does not count. Each rank writes its stacks into `hang/` of the run folder."""
    replays: Location | None = None
    """Folder of a run whose kept rollouts this run trains on again, in their order, instead of sampling any. The rest
    of the config is that run's. `--replay` sets it, see docs/howto/checkpoints.md."""


class ModelConfig(Section):
    """Says which model is trained."""

    path: Location
    """Folder of a Hugging Face checkpoint with config.json, safetensors files and a tokenizer.
    docs/reference/models.md lists the model families."""
    published: Location | None = None
    """File with the figures of the published config.json, such as those in configs/models. --plan reads the model from
    it if `path` is not on this machine. If `path` exists, both must describe the same model. null for another model,
    such as the base model: docs/howto/plan.md says what that gives up."""
    from_run: Location | None = None
    """Folder of another run of the same model, whose trained weights this run starts from. The layouts may differ. The
    reference policy of a KL stays the model in `path`."""
    from_step: Count | Literal["best"] | None = None
    """Number of steps after which the checkpoint in `from_run` was written. best: the best checkpoint of a run with
    eval.best. null: the newest checkpoint. The number of either goes into config.yaml of the run folder."""
    from_optimizer: bool = False
    """Whether the run also starts with the optimizer state of that checkpoint: float32 weights and Adam's moments. The
    schedule of the learning rate begins anew."""

    def problems(self) -> Iterator[Problem]:
        for key in ("from_step", "from_optimizer"):
            if self.from_run is None and (value := getattr(self, key)):
                yield describe(
                    "there is no run to take it from",
                    where={"key": f"model.{key}"},
                    got=value,
                    expected="model.from_run",
                    do=f"name the run, or remove model.{key}",
                )


class OverlongConfig(Section):
    """Sets DAPO's soft penalty for completions near the length limit."""

    cache_tokens: Count
    """Number of tokens before rollout.max_completion_tokens over which the penalty grows from 0 to `penalty`."""
    penalty: Annotated[float, Field(gt=0.0, le=LARGEST_REWARD)] = 1.0
    """Amount subtracted from the reward of a truncated completion."""


class TaskConfig(Section):
    """Says what the policy learns: the prompts, and how answers are rewarded."""

    train: tuple[TrainSourceConfig, ...]
    """Sources of training prompts."""
    heldout: tuple[HeldoutSourceConfig, ...]
    """Sources of evaluation prompts. They are never trained on."""
    train_prompts: Count | None = None
    """Number of prompts that the sources of `train` must have together. --plan uses it if the files are not on this
    machine. null: any number."""
    chat: ChatConfig | None = None
    """Settings of the model's chat template. With this section, a prompt of plain text becomes a user message. null: a
    prompt of plain text is given to the model as it is, and messages go through the template as they are."""
    rewards: dict[str, AnyReward] = {}
    """Rewards by name: at least one, unless there is an environment."""
    pass_reward: str | None = None
    """Name of the reward that decides whether a completion passes: it passes when the reward is 1. null only with an
    environment."""
    environment: EnvironmentConfig | None = None
    """Environment whose episodes are trained on instead of single completions. null: none."""
    verifier_timeout_seconds: Seconds = 5.0
    """Time limit of a verification. A slower verification is killed and counts as failed."""
    verifier_workers: Few = 1
    """Number of verifier processes."""
    max_failed_fraction: Fraction = 0.1
    """Largest fraction of a step's verifications that may fail before the run ends."""
    overlong: OverlongConfig | None = None
    """DAPO's soft penalty for completions near the length limit, added to the reward. null: no penalty."""

    @property
    def generators(self) -> dict[str, dict[str, Any]]:
        """Return the options of the generators of prompts, by the name of the generated task."""
        sources = [source for source in (*self.train, *self.heldout) if source.kind == "generator"]
        return {source.data.removeprefix(GENERATOR): source.options for source in sources}

    @property
    def pass_rates(self) -> list[str]:
        """Return the metrics that every evaluation has: pass rates, without those of levels, which are in the rows."""
        greedy = ["eval/pass_rate_greedy"] if any(source.greedy for source in self.heldout) else []
        sources = [f"eval/source/{source.name}" for source in self.heldout] if len(self.heldout) > 1 else []
        pass_at = [f"eval/pass_at/{source.name}/{k}" for source in self.heldout for k in source.pass_at]
        return ["eval/pass_rate", *greedy, *sources, *pass_at]

    def problems(self) -> Iterator[Problem]:
        yield from self._scorer_problems()
        limited = self.environment is None
        yield from source_problems("task.train", self.train, limited=limited)
        yield from source_problems("task.heldout", self.heldout, limited=limited)
        yield from heldout_problems(self.heldout)
        if self.environment is None:
            yield from self._reward_problems()

    def _reward_problems(self) -> Iterator[Problem]:
        if not self.rewards:
            yield describe(
                "nothing gives rewards",
                where={"key": "task.rewards"},
                got="none",
                expected="at least one reward",
                do="give one, or name an environment in task.environment",
            )
            return
        if self.pass_reward is None:
            yield describe(
                "nothing says which completions pass",
                where={"key": "task.pass_reward"},
                got="null",
                expected=f"one of {', '.join(self.rewards)}",
            )
        elif self.pass_reward not in self.rewards:
            yield describe(
                "no such reward",
                where={"key": "task.pass_reward"},
                got=self.pass_reward,
                expected=f"one of {', '.join(self.rewards)}",
                do=did_you_mean(self.pass_reward, self.rewards),
            )
        if all(reward.weight == 0 for reward in self.rewards.values()):
            yield describe(
                "every weight is 0, so there is nothing to learn", where={"key": "task.rewards"}, do="give one a weight"
            )

    def _scorer_problems(self) -> Iterator[Problem]:
        """Yield sources of one generator with different options: a row does not say which options its scorer needs."""
        scorer = next((name for name, reward in self.rewards.items() if reward.kind == "reasoning_gym"), None)
        if scorer is None:
            return
        generators = self.generators
        for key, sources in (("train", self.train), ("heldout", self.heldout)):
            for index, source in enumerate(sources):
                kept = generators.get(source.data.removeprefix(GENERATOR))
                if source.kind == "generator" and source.options != kept:
                    yield describe(
                        "another source of the same generator has other options, and a reward scores both",
                        where={"key": f"task.{key}.{index}.options", "given": f"task.rewards.{scorer} scores them"},
                        got=source.options,
                        expected=kept,
                        do="give both the same options, or use your own reward function",
                    )


class GuardsConfig(Section):
    """Sets the limits at which a failing run is ended."""

    max_skipped_updates: Count = 3
    """Number of skipped updates in a row after which the run ends. An update is skipped when a loss or gradient is not
    finite."""
    collapse_steps: Whole = 3
    """Number of collapsed steps in a row after which the run ends. A step counts as collapsed when all completions are
    truncated and earn no reward, or when one of the next two limits is exceeded. 0: never."""
    max_policy_kl: Positive = 0.5
    """Upper limit of policy_kl/k3, in nats per token. Healthy runs stay below 0.01."""
    max_extreme_fraction: Share = 0.5
    """Upper limit of policy/extreme_fraction. Healthy runs stay below 0.001. Runs about to collapse reach 0.1."""
    alignment: bool = True
    """Whether recorded routes are tested before the first update that uses them (replay.mode r3). The test refuses
    routes that fit another token, layer or sequence better than their own. Set it to false to replay routes that are
    known to come from other weights or tokens."""
    max_canary_difference: Positive | None = None
    """Upper limit of sync/canary_abs_diff, in nats. A run above it ends before the next token is sampled. null: the
    limit is 1e-4 where sampler and trainer compute in float32 on the same weights (rounding gives 1e-6 to 1e-5), and 1
    otherwise (tiny bfloat16 models stay below 0.3, and so do faults of a single expert: docs/measurements/costs.md).
    With null the run also ends when the difference is far above that of its own last syncs: see
    docs/internals/weight_sync.md."""
    same_version: bool = True
    """Whether a run that samples ahead of training ends when tokens of lag 0, which the trainer's own version sampled,
    disagree with the trainer as tokens of other weights do. That is a fault, not drift: see docs/howto/guards.md. If
    objective.old_logprobs is not trainer, it sees only a step's first update, which has the oldest groups."""
    evidence_mib: Whole = 4096
    """Largest size in MiB of the evidence that a run keeps for `moe-rl explain` when a check ends it: the trainer's
    weights, some sequences, and both engines' routes. Weights that do not fit are left out; then `explain` needs a
    checkpoint. 0: nothing is kept."""


class ClusterConfig(Section):
    """Describes the machines of a run. `--plan` says whether the run fits, and a run that does not fit is not
    started."""

    gpus: Count
    """Number of GPUs that train. --plan uses it as the number of ranks, unless --ranks is given."""
    gpus_per_node: Count = 8
    """Number of GPUs in one machine."""
    gpu_memory_gib: Positive
    """Memory of one GPU as its driver reports it: 79 for an "80 GB" GPU, 140 for a "141 GB" GPU."""
    reserved_gib: NotNegative = 8.0
    """GPU memory that the planner leaves free for the CUDA context, NCCL buffers, kernel workspaces and
    fragmentation."""
    engines: Count = 1
    """Number of sampling engines. They run on their own GPUs, with as much memory, or beside ranks: rollout.engines.
    One engine of one GPU, where no server is named, is started by rank 0 on its GPU."""
    gpus_per_engine: Count = 1
    """Number of GPUs of one engine (tensor parallelism). If one machine has fewer, the engine takes all GPUs of several
    (moe-rl serve --nnodes)."""
    links_gb_per_second: dict[str, Positive] = {"network": 50.0}
    """Bandwidth of each link that can carry weights to an engine, by name, in 10^9 bytes per second."""

    @property
    def nodes_per_engine(self) -> int:
        return -(-self.gpus_per_engine // self.gpus_per_node)


class CheckpointConfig(Section):
    """Says when the state of a run is saved."""

    every_steps: Count = 10
    """Number of steps between checkpoints. The last step always writes one."""
    keep: Count = 2
    """Number of checkpoints that are kept."""
    asynchronous: bool = True
    """Whether a checkpoint is copied to host memory and written while the run continues. false: the run waits."""
    grace_seconds: Seconds = 25.0
    """Longest time between a request to stop (SIGTERM) and the end of the run. Within it the run abandons its sampling
    or finishes its training step, and saves. Set it below the limits of the scheduler and of torchrun
    (--shutdown-timeout, 30 seconds)."""


class ExportConfig(Section):
    """Says when a run writes its weights for others, as a Hugging Face checkpoint that transformers and vLLM load."""

    every_steps: Count | None = None
    """Number of steps between exports. The last step writes one too. null: none; `moe-rl export` writes one from a
    checkpoint."""
    keep_last: Count | None = None
    """Number of exports that are kept. null: all."""

    def problems(self) -> Iterator[Problem]:
        if self.every_steps is None and self.keep_last is not None:
            yield describe(
                "nothing is exported",
                where={"key": "export.keep_last", "given": "export.every_steps is null"},
                got=self.keep_last,
                expected="null, or a number of steps in export.every_steps",
            )


class EvalConfig(Section):
    """Sets the evaluation on held-out prompts."""

    every_steps: Count = 10
    """Number of steps between evaluations. The run also evaluates before the first step and after the last."""
    prompts: Count = 256
    """Number of held-out prompts of each source without its own number. Each evaluation uses the same prompts."""
    best: str | None = None
    """Metric that says which evaluated policy is the best, such as eval/pass_rate or eval/pass_at/NAME/4. The best
    policy's checkpoint is kept besides the newest `checkpoint.keep`, and --step best names it. null: none."""
    patience: Count | None = None
    """Number of evaluations in a row without a gain after which the run ends. null: the run never ends early."""
    min_gain: BelowOne = 0.0
    """Amount by which `best` must rise above its value at the last gain to count as a gain. 0: any rise counts."""

    def problems(self) -> Iterator[Problem]:
        if self.best is None and self.patience is not None:
            yield describe(
                "there is no metric to wait for",
                where={"key": "eval.patience"},
                got=self.patience,
                expected="eval.best",
                do="name the metric, or remove eval.patience",
            )
        if self.patience is None and self.min_gain:
            yield describe(
                "has no effect if nothing waits for a gain",
                where={"key": "eval.min_gain"},
                got=self.min_gain,
                expected="eval.patience",
                do="set eval.patience, or remove eval.min_gain",
            )


TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class ProfileConfig(Section):
    """Chooses steps that are recorded with torch.profiler, from sampling to weight sync. `moe-rl show RUN --profile`
    lists the files."""

    steps: Annotated[tuple[Count, ...], Field(min_length=1, max_length=16)]
    """Steps to record, of each pass the first 8 microbatches. A recorded step is slower."""
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1, max_length=64)] = (0,)
    """Ranks that record."""
    mib: Count = 1024
    """Largest size in MiB of a file. A larger one is removed, and the run says so."""


class ReportConfig(Section):
    """Says what a run keeps for its readers, and where else it goes."""

    samples_per_step: Annotated[int, Field(ge=0, le=1024)] = 8
    """Number of trained sequences of each step that samples.jsonl keeps, drawn at random. `moe-rl show` prints them.
    0: none."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that get the config, metrics, samples and report of the run: tensorboard (files in the run
    folder), wandb (Weights & Biases) and mlflow. Keys and addresses come from the environment, as these libraries
    expect. See docs/howto/report.md."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "moe_rl"
    """Project in Weights & Biases, and experiment in MLflow, that the run belongs to."""
    tracker_seconds: Seconds = 30.0
    """Longest time that a call to a tracker may take, and longest time that the end of a run waits for all trackers. A
    slower tracker counts as failed. A failure never ends the run."""
    profile: ProfileConfig | None = None
    """Steps that are recorded with torch.profiler. null: none."""
    prometheus_port: Annotated[int, Field(ge=1, le=65534)] | None = None
    """Port of 127.0.0.1 at which rank 0 serves the newest metrics as Prometheus text. In mode async, unless
    max_staleness is 0, the next port serves how many groups are in which state. null: none."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.trackers)) < len(self.trackers):
            yield describe(
                "a tracker is named twice",
                where={"key": "report.trackers"},
                got=", ".join(self.trackers),
                expected="each tracker once",
            )


class Config(Section):
    """Holds all sections of a config."""

    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig
    pipeline: PipelineConfig = PipelineConfig()
    gateway: GatewayConfig = GatewayConfig()
    replay: ReplayConfig = ReplayConfig()
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()
    cluster: ClusterConfig | None = None
    train: TrainConfig
    objective: AnyObjective = GspoConfig()
    guards: GuardsConfig = GuardsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()

    @property
    def starts_from_model(self) -> bool:
        """Return whether the run's first weights are those in model.path: not another run's, and without adapters that
        already change them."""
        return self.model.from_run is None and (self.train.lora is None or self.train.lora.start is None)

    @property
    def reads_text(self) -> bool:
        """Return whether the sampler must find stop strings. An environment may send some."""
        return bool(self.rollout.stop) or self.task.environment is not None
