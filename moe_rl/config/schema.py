"""The configuration of a run: typed, frozen, closed. Unknown keys are errors; nothing here imports torch.

Derived numbers do not live here: see moe_rl/planning. Each field is documented by the string under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pydantic import Field

from moe_rl.config.objective import AnyObjective, GspoConfig
from moe_rl.config.sampling_keys import ReplayConfig, RolloutConfig
from moe_rl.config.section import (
    Count,
    Few,
    Fraction,
    Location,
    NotNegative,
    Positive,
    Reward,
    Seconds,
    Section,
    Share,
    Whole,
)
from moe_rl.config.training import ParallelConfig, PlacementConfig, TrainConfig
from moe_rl.errors import describe
from moe_rl.types import LARGEST_REWARD


class RunConfig(Section):
    """Names a run and says how long it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the run folder, `runs_dir/name-<time>`: letters, digits, dots, dashes and underscores, at most 100."""
    runs_dir: Location = Path("runs")
    """Folder that holds the run folders, relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Every random choice of a run derives from it: prompt order, sampling seeds, model RNG. vLLM and NumPy take no
    larger one."""
    steps: Count
    """Rollout batches to sample and learn from."""
    peer_timeout_seconds: Annotated[float, Field(ge=1.0, le=2e6)] = 30.0
    """A rank or a sampler that gives no sign of life for so long ends the run. Ranks give two a second."""


class ModelConfig(Section):
    """The policy."""

    path: Location
    """Folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer.json. For families see
    docs/reference/models.md."""
    published: Location | None = None
    """The figures of the published config.json, as configs/models has them. Where `path` is not on this machine, --plan
    takes the model from here; where it is, it must be this model."""


class RewardConfig(Section):
    """A reward function."""

    function: str
    """Dotted path of a callable `(prompt, completion, answer, finish_reason, stop_token_id) -> float`; it is given only
    the parameters it names."""
    weight: Reward = 1.0
    """Its share in the reward, a weighted sum."""


class OverlongConfig(Section):
    """DAPO's soft punishment of completions that come near the limit."""

    cache_tokens: Count
    """Tokens before rollout.max_completion_tokens over which the punishment grows from 0 to `penalty`."""
    penalty: Annotated[float, Field(gt=0.0, le=LARGEST_REWARD)] = 1.0
    """Taken off the reward of a completion that is truncated."""


class TaskConfig(Section):
    """What is learned: prompts, and what an answer is worth."""

    train: Location
    """JSONL of prompts to learn from: id, prompt, answer, level."""
    heldout: Location
    """JSONL of prompts never trained on."""
    train_prompts: Count | None = None
    """Prompts that `train` must have; --plan counts with it where the file is not here. null: any number."""
    rewards: Annotated[dict[str, RewardConfig], Field(min_length=1)]
    """Reward functions by name."""
    pass_reward: str
    """The reward function whose value 1 means that a completion passes."""
    verifier_timeout_seconds: Seconds = 5.0
    """A verification that takes longer is killed and counts as failed."""
    verifier_workers: Few = 1
    """Verifier processes."""
    max_failed_fraction: Fraction = 0.1
    """The run ends when more of a step's verifications fail than this."""
    overlong: OverlongConfig | None = None
    """DAPO's soft punishment of completions that come near the limit, added to the reward. null: none."""

    def problems(self) -> Iterator[str]:
        if self.pass_reward not in self.rewards:
            close = get_close_matches(self.pass_reward, self.rewards, n=1)
            yield describe(
                "task.pass_reward: no such reward",
                got=self.pass_reward,
                expected=f"one of {', '.join(self.rewards)}",
                do=f"did you mean {close[0]}?" if close else "",
            )
        if all(reward.weight == 0 for reward in self.rewards.values()):
            yield describe("task.rewards: every weight is 0, so there is nothing to learn", do="give one a weight")


class GuardsConfig(Section):
    """When a run that goes wrong is ended."""

    max_skipped_updates: Count = 3
    """The run ends with so many updates in a row that were skipped because a loss or gradient was not finite."""
    collapse_steps: Whole = 3
    """The run ends with so many steps in a row that say that it is lost: all completions truncated and no reward at
    all, or one of the limits below exceeded. 0: never."""
    max_policy_kl: Positive = 0.5
    """Limit of policy_kl/k3, in nats per token. Healthy runs are below 0.01."""
    max_extreme_fraction: Share = 0.5
    """Limit of policy/extreme_fraction. Healthy runs are below 0.001, runs that are about to collapse at 0.1."""
    alignment: bool = True
    """Refuse routes that the trainer's routers agree with less than with those of another token, layer or sequence,
    before the first update under them (replay.mode r3). false: replay routes that other weights or tokens are known to
    have made."""
    max_canary_difference: Positive | None = None
    """Limit of sync/canary_abs_diff, in nats: a run whose sampler and trainer differ by more after a sync ends before
    the next token is sampled. null: 1e-4 where both compute in float32 on the same weights, whose rounding is 1e-6 to
    1e-5; otherwise 1, as tiny bfloat16 models stay below 0.3, and layers or experts that changed places give 1 to 6.
    With null a run also ends, below the limit, when the difference is far above what its own last syncs had
    (docs/internals/weight_sync.md)."""


class ClusterConfig(Section):
    """The machines a run is planned for: `--plan` says whether it fits there, a run that does not is not started."""

    gpus: Count
    """GPUs that train: the number of ranks of --plan, unless --world-size says another."""
    gpus_per_node: Count = 8
    """GPUs of one machine."""
    gpu_memory_gib: Positive
    """Memory of one GPU, as its driver tells it: 79 of an "80 GB" one, 140 of a "141 GB" one."""
    reserved_gib: NotNegative = 8.0
    """The part of it that the plan does not count on: CUDA's context, NCCL's buffers, kernels' workspaces,
    fragmentation."""
    engines: Count = 1
    """Sampling engines. They have GPUs of their own, of the same size."""
    gpus_per_engine: Count = 1
    """GPUs that share the weights and the key-value heads of an engine."""
    links_gb_per_second: dict[str, Positive] = {"network": 50.0}
    """Ways by which weights may reach an engine, by name, in 10^9 bytes a second."""


class CheckpointConfig(Section):
    """When the state of a run is saved."""

    every_steps: Count = 10
    """Steps between checkpoints. The last step always writes one."""
    keep: Count = 2
    """Checkpoints kept."""
    asynchronous: bool = True
    """Copy to host memory what a checkpoint holds, and write it while the run goes on. Off, the run waits."""
    grace_seconds: Seconds = 25.0
    """A run that is asked to stop (SIGTERM) leaves its sampling, or ends its training step, and saves. It has ended so
    many seconds later, at the latest. Less than what the scheduler and torchrun (--shutdown-timeout, 30) wait."""


class EvalConfig(Section):
    """The evaluation on held-out prompts."""

    every_steps: Count = 10
    """Steps between evaluations on the held-out prompts. Before the first step and after the last always."""
    prompts: Count = 256
    """Held-out prompts used, the same ones each time."""


class Config(Section):
    """A whole config."""

    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig
    replay: ReplayConfig = ReplayConfig()
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()
    cluster: ClusterConfig | None = None
    train: TrainConfig
    objective: AnyObjective = GspoConfig()
    guards: GuardsConfig = GuardsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
