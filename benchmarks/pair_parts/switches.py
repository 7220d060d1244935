"""Lists the switches of a run that `pairs.py` combines, and asks the checks of the config which combinations they
accept.

A row is {switch: level}. The first level of a switch is its default. The switches in ON_KEPT change what a step
computes from its rollouts, and neither the sampler nor the model: many of their levels can be tried on the rollouts of
one run.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

from moe_rl.config.check import config_problems
from moe_rl.config.load import config_of
from moe_rl.config.strict_yaml import parse
from moe_rl.errors import ConfigError, Problem
from moe_rl.models.hf import read_model

Row = dict[str, str]
ROOT = Path(__file__).parents[2]
RANKS, STEPS = 2, 3
FAMILIES = ("qwen-mixed", "glm-groups", "deepseek", "gpt-oss")
COMPLETIONS, EPISODES = "configs/tiny_moe_cpu.yaml", "configs/tool_use_cpu.yaml"
# By task: the config, and the key that names what gives the rewards.
TASKS = {
    "completions": (COMPLETIONS, "task.rewards.exact_match.function"),
    "episodes": (EPISODES, "task.environment.run"),
    "turns": (EPISODES, "task.environment.run"),
}
USUAL = {
    COMPLETIONS: (
        "rollout.max_prompt_tokens=24",
        "rollout.max_completion_tokens=12",
    ),
    EPISODES: (
        "task.environment.concurrent=8",
        "rollout.max_prompt_tokens=40",
        "rollout.max_completion_tokens=88",
    ),
}
"""Settings of every row, by its config: small and quick."""
ALL = (
    f"run.steps={STEPS}",
    "run.name=pair",
    "run.peer_timeout_seconds=120",  # other runs may keep the machine busy
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.kv_cache_mib=32",
    "train.microbatch_tokens=256",
    "train.optimizer.warmup_steps=0",
    "train.optimizer.lr=1e-6",
    "checkpoint.every_steps=1",
    "eval.prompts=4",
    "objective.clip_low=null",
    "objective.clip_high=null",
    "guards.collapse_steps=0",  # the models are random
)
LOSSES = {
    "gspo": ("clip_low=0.1", "clip_high=0.15"),
    "gspo_token": ("clip_low=0.1", "clip_high=0.15"),
    "grpo": ("clip_low=0.2", "clip_high=0.2", "dual_clip=3.0"),
    "dr_grpo": ("clip_low=0.2", "clip_high=0.2"),
    "dapo": ("clip_low=0.2", "clip_high=0.28"),
    "cispo": ("weight_cap=5.0",),
    "sapo": ("tau_positive=1.0", "tau_negative=1.05"),
    "gmpo": ("clip_low=0.33", "clip_high=0.49"),
    "dppo_tv": ("delta_low=0.2", "delta_high=0.2", "weight_cap=20.0"),
    "minirl": ("clip_low=0.2", "clip_high=0.27", "weight_cap=5.0"),
    "topr": ("weight_cap=1.0",),
    "decoupled": ("clip_low=0.2", "clip_high=0.2", "weight_cap=5.0", "dual_clip=3.0"),
}
_TRUNCATE, _REJECT = (
    "{level: token, rule: truncate, high: 2.0}",
    "{level: geometric, rule: reject, low: 0.5, high: 2.0}",
)
_KL = "objective.kl_coef=0.01"
SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "task": {
        "completions": (),
        "episodes": ("task.environment.credit=trajectory",),
        "turns": ("task.environment.credit=turn",),
    },
    "prompts": {"plain": (), "chat": ("task.chat={}",)},
    "family": dict.fromkeys(FAMILIES, ()),
    "tied": {"no": (), "yes": ()},
    "layout": {
        "expert": ("parallel.expert=2",),
        "tensor": ("parallel.tensor=2", "parallel.expert=2"),
        "pipeline": ("parallel.pipeline=2", "parallel.expert=1"),
    },
    "mode": {name: (f"pipeline.mode={name}",) for name in ("sync", "one_step_off", "async")},
    "staleness": {"default": (), "0": ("pipeline.max_staleness=0",), "2": ("pipeline.max_staleness=2",)},
    "kv": {"keep": (), "recompute": ("pipeline.kv=recompute",)},
    "segments": {"exact": (), "first": ("pipeline.segments=first",)},
    "late": {"wait": (), "drop": ("pipeline.late=drop",)},
    "oversample": {"0": (), "0.5": ("pipeline.oversample=0.5",)},
    "dynamic": {"1": (), "3": ("rollout.dynamic_sampling_rounds=3",)},
    "groups": {"all": (), "some fail": ("task.max_failed_fraction=1.0",)},
    "sampling": {
        "all tokens": (),
        "top_p": ("rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.keep_sampling_mask=true"),
        "stop": ("rollout.stop=['7']",),
    },
    "capture": {"patch": (), "worker": ("rollout.capture=worker",)},
    "logits": {"none": (), "half": ("rollout.router_logits_fraction=0.5",)},
    "centering": {"off": (), "8": ("objective.score_centering=8",)},
    "transfer": {
        "shared_memory": ("rollout.weight_transfer=shared_memory",),
        "disk": ("rollout.weight_transfer=disk",),
        "broadcast": ("rollout.weight_transfer=broadcast",),
    },
    "sampler dtype": {"bfloat16": (), "float32": ("rollout.dtype=float32",)},
    "weights": {"exact": (), "fp8": ("rollout.weights=fp8_e4m3",)},
    "trainer dtype": {"float32": ("train.dtype=float32",), "bfloat16": ("train.dtype=bfloat16",)},
    "eval": {
        "ends": ("eval.every_steps=100",),
        "steps": ("eval.every_steps=1", "task.heldout.0.samples=2", "task.heldout.0.pass_at=[1, 2]"),
        "best": ("eval.every_steps=1", "eval.best=eval/pass_rate", "eval.patience=2"),
    },
    "export": {"no": (), "steps": ("export.every_steps=1", "export.keep_last=2")},
    "checkpoint": {"behind": (), "waits": ("checkpoint.asynchronous=false",)},
    "end": {"own": (), "killed": (), "stopped": ()},
    "trackers": {
        "none": (),
        "all": ("report.trackers=[tensorboard, wandb, mlflow]",),
    },
    "samples": {"8": (), "0": ("report.samples_per_step=0",)},
    "loss": {name: (f"objective.name={name}", *(f"objective.{key}" for key in keys)) for name, keys in LOSSES.items()},
    "advantage": {
        "the loss's": (),
        **{
            name: (f"objective.advantage={name}",)
            for name in ("group_mean", "leave_one_out", "batch_std", "reinforce_pp")
        },
    },
    "old": {"the loss's": (), "sampler": ("objective.old_logprobs=sampler",)},
    "correction": {
        "none": (),
        "truncate": (f"objective.corrections=[{_TRUNCATE}]",),
        "mask": ("objective.corrections=[{level: sequence, rule: mask, high: 4.0}]",),
        "reject": (f"objective.corrections=[{_REJECT}]",),
        "veto": ("objective.corrections=[{level: token, rule: veto, low: 1e-4}]",),
        "two": (f"objective.corrections=[{_REJECT}, {_TRUNCATE}]",),
    },
    "off-policy mask": {"no": (), "yes": ("objective.off_policy_delta=0.5",)},
    "second moment": {"no": (), "yes": ("objective.second_moment_limit=0.01",)},
    "kl": {
        "none": (),
        "k3": (_KL,),
        "k2": (_KL, "objective.kl_estimator=k2"),
        "k1 unbiased": (_KL, "objective.kl_estimator=k1", "objective.kl_unbiased=true"),
        "k3 unbiased": (_KL, "objective.kl_unbiased=true"),
        "reward": (_KL, "objective.kl_in=reward", "objective.kl_estimator=k1"),
    },
    "entropy": {"no": (), "yes": ("objective.entropy_coef=0.01",)},
    "updates": {"2": (), "1": ("train.updates_per_step=1",)},
    "packing": {"length": (), "load": ("train.packing=load",)},
    "replay": {name: (f"replay.mode={name}",) for name in ("r3", "r2", "off")},
    "missing": {
        "refuse": (),
        "drop": ("replay.missing=drop", "replay.max_fallback_fraction=1.0"),
        "native": ("replay.missing=native", "replay.max_fallback_fraction=1.0"),
        "stale native": ("replay.stale=native", "replay.max_fallback_fraction=1.0"),
    },
    "plan": {"where possible": (), "no": ("replay.plan=false",)},
    "overlap": {"0": (), "1": ("replay.overlap_chunks=1",), "2": ("replay.overlap_chunks=2",)},
    "native": {"once": (), "always": ("replay.native_every=1",), "never": ("replay.native_every=0",)},
}
ON_KEPT = tuple(itertools.dropwhile("loss".__ne__, SWITCHES))
_KEYS = {
    switch: {override.partition("=")[0] for level in levels.values() for override in level}
    for switch, levels in SWITCHES.items()
}
DEFAULTS: Row = {switch: next(iter(levels)) for switch, levels in SWITCHES.items()}


def model_name(family: str, tied: str) -> str:
    """Return the name of the folder of a model."""
    return f"{family}{'-tied' if tied == 'yes' else ''}"


def settings(row: Row, models: Path) -> tuple[str, list[str]]:
    """Return the config and the overrides of a row.

    models: the folder of the models.
    """
    config, rewarded = TASKS[row["task"]]
    what = "episode" if config == EPISODES else "chance"
    function = f"pair_parts.played.{what}{'_or_none' if row['groups'] != 'all' else ''}"
    own = [one for switch, level in row.items() for one in SWITCHES[switch][level]]
    model = models / model_name(row["family"], row["tied"])
    return config, [f"model.path={model}", f"{rewarded}={function}", *ALL, *USUAL[config], *own]


class Checks:
    """Asks the checks of the config about rows. `models` holds the models of all families."""

    def __init__(self, models: Path):
        self.models = models
        self._known: dict[tuple[str, ...], list[Problem]] = {}

    def problems(self, row: Row) -> list[Problem]:
        """Return what the checks say against a row: nothing if they accept it."""
        key = tuple(row[switch] for switch in SWITCHES)
        if key not in self._known:
            self._known[key] = self._found(row)
        return self._known[key]

    def complete(self, fixed: Row, changes: int = 4, heard: list[str] | None = None) -> Row | None:
        """Return an accepted row with these levels, and as many others as possible from DEFAULTS; None if there is
        none within this many changes.

        Only switches are changed whose keys a message names. `heard` gets all messages on the way.
        """
        row = DEFAULTS | fixed
        if not (found := self.problems(row)):
            return row
        if heard is not None:
            heard += map(str, found)
        if changes:
            for switch in named(str(found[0])):
                for level in SWITCHES[switch] if switch not in fixed else ():
                    if level != row[switch] and (done := self.complete({**fixed, switch: level}, changes - 1, heard)):
                        return done
        return None

    def _found(self, row: Row) -> list[Problem]:
        file, overrides = settings(row, self.models)
        data = json.loads(_read(file))
        for override in overrides:
            _set(data, *_parsed(override))
        try:
            config = config_of(data, {})
        except ConfigError as error:
            return error.problems
        return config_problems(config, _facts(config.model.path), RANKS)


@cache
def named(message: str) -> tuple[str, ...]:
    """Return the switches of which a message names a key."""
    return tuple(switch for switch, keys in _KEYS.items() if any(key in message for key in keys))


@cache
def _read(file: str) -> str:
    return json.dumps(parse((ROOT / file).read_text(encoding="utf-8"), {"file": file})[0])


@cache
def _parsed(override: str) -> tuple[tuple[str, ...], object]:
    key, _, value = override.partition("=")
    return tuple(key.split(".")), parse(value, {})[0]


def _set(data: dict, keys: tuple[str, ...], value: object) -> None:
    for key in keys[:-1]:
        data = data[int(key)] if isinstance(data, list) else data.setdefault(key, {})
    data[keys[-1]] = value


@cache
def _facts(path: Path):
    return read_model(path)
