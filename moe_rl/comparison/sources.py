"""Finds what to compare: rollouts that a run kept, with the checkpoints that can score them, or rollouts sampled
now."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.schema import Config
from moe_rl.errors import DataError
from moe_rl.megatron import world
from moe_rl.megatron.model import DTYPES
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import ModelFacts
from moe_rl.replay.routes import missing_rows
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch, shard_name
from moe_rl.rollout.rollouts import engine_settings, generate_request
from moe_rl.rollout.sampler import Blocking
from moe_rl.tasks.prompts import PromptSource, load_task
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
from moe_rl.trace import TraceStore
from moe_rl.train.run_folder import RunFolder
from moe_rl.types import Prompt, Sequence
from moe_rl.weights.digest import tensor_digests, total_digest
from moe_rl.weights.sender import WeightSender


@dataclass(frozen=True, slots=True)
class Source:
    """Holds sequences with routes from one sampler.

    Attributes:
        sampler: The sampler's precision, in words.
        left_out: Number of sequences not compared, because some of their routes are missing.
    """

    name: str
    sampler: str
    sequences: list[Sequence]
    left_out: int
    store: TraceStore


@dataclass(frozen=True, slots=True)
class Weights:
    """Names weights that can score rollouts. `version` is the number of finished steps; `path` None is model.path, with
    the adapters of train.lora.start if there are any."""

    version: int
    path: Path | None


def initial(config: Config) -> Weights:
    """Return the weights that a run of this config starts from. Raises CheckpointError: model.from_run lacks them."""
    start = config.model
    if start.from_run is None:
        return Weights(0, None)
    return Weights(0, checkpoints.find(start.from_run / checkpoints.FOLDER, start.from_step))


def of_run(folder: RunFolder, config: Config) -> tuple[int, list[Weights]]:
    """Find the newest step whose rollouts are kept together with the weights that sampled them.

    Returns:
        The step, and a list of these weights and all later checkpoints.

    Raises:
        DataError: There is no such step.
    """
    saved = dict(checkpoints.complete(folder.checkpoints))
    steps = KeptRollouts(folder.rollouts, TraceStore(folder.trace)).steps() if folder.trace.is_dir() else []
    lag = config.pipeline.lag
    if config.pipeline.by_group:
        steps = [step for step in steps if step == 1]  # the rollouts of later steps mix several versions
    versions = {step: max(0, step - 1 - lag) for step in steps}
    scorable = [step for step, version in versions.items() if not version or version in saved]
    if not scorable:
        raise DataError(
            "the run kept no rollouts together with the weights that sampled them",
            where={"folder": folder.path},
            got=f"rollouts of steps {steps}, checkpoints after steps {sorted(saved)}",
            expected=f"rollouts of step 1, or of the step {1 + lag} steps after a checkpoint",
            do="train the run for a step, or pass --config to sample now",
        )
    step = scorable[-1]
    version = versions[step]
    first = Weights(version, saved[version]) if version else initial(config)
    return step, [first, *(Weights(done, path) for done, path in sorted(saved.items()) if done > version)]


def stored(config: Config, folder: RunFolder, step: int) -> Source:
    """Return the rollouts of one step of a run, which rank 0 reads."""
    store = TraceStore(folder.trace)
    batch = KeptRollouts(folder.rollouts, store).load(step) if dist.get_rank() == 0 else None
    batch = world.broadcast(batch, RolloutBatch)
    return _complete(f"rollouts of step {step}", precision_of(config.rollout), batch.sequences, store)


def precision_of(rollout: RolloutConfig) -> str:
    """Describe the precision of a sampler's weights and computation."""
    return rollout.dtype if rollout.weights == "exact" else f"fp8 weights, {rollout.dtype}"


def own_precision(rollout: RolloutConfig) -> str:
    """Return the name for `in_precision` of the sampler with these settings."""
    return rollout.dtype if rollout.weights == "exact" else "fp8"


def in_precision(rollout: RolloutConfig, precision: str) -> RolloutConfig:
    """Return the settings with a sampler in "bfloat16", "float32" or "fp8". "fp8" has float8 weights and keeps the
    config's dtype for computation."""
    update = {"weights": "fp8_e4m3"} if precision == "fp8" else {"weights": "exact", "dtype": precision}
    return rollout.model_copy(update=update)


def prompts_of_config(config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Return (key, prompt tokens) for each completion of the config's first step."""
    chosen = prompt_source(config, config.run.seed).at(0, config.rollout.prompts_per_step)
    return asked_of("s1", chosen, config)


def prompt_source(config: Config, seed: int) -> PromptSource:
    """Return the training prompts in the order of this seed."""
    return PromptSource(load_task(config, TextCodec(config.model.path, ())).train, seed)


def asked_of(name: str, prompts: list[Prompt], config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Return (key, prompt tokens) for each completion of these prompts."""
    size = config.rollout.group_size
    return [(f"{name}/p{p}/c{c}", prompt.token_ids) for p, prompt in enumerate(prompts) for c in range(size)]


class LiveSampler:
    """Samples from its own engine, which gets the policy's weights. All ranks construct and call it together.

    The engine runs until `close`.

    Args:
        precision: See `in_precision`.
        folder: For traces and log; replaces those of an earlier comparison.

    Raises:
        EngineError: On rank 0.
    """

    def __init__(
        self, config: Config, facts: ModelFacts, policy: Policy, *, version: int, precision: str, folder: Path
    ):
        rollout = in_precision(config.rollout, precision)
        self._config, self._facts, self._version = config.model_copy(update={"rollout": rollout}), facts, version
        self._folder, self._rounds = RunFolder(folder), 0
        self._engine: Blocking | None = None
        try:
            if dist.get_rank() == 0:
                shutil.rmtree(self._folder.path, ignore_errors=True)
                self._folder.trace.mkdir(parents=True)
                self._engine = Blocking(VllmEngine(engine_settings(self._config, facts, self._folder.path)))
            world.broadcast("ready" if self._engine else None, str)
            other = not config.starts_from_model or rollout.weights != "exact"
            if version or other:  # otherwise the engine has already loaded the initial model
                WeightSender(policy, rollout, self._folder.sync, world).send(self._engine, version)
        except BaseException:
            self.close()
            raise

    def sample(self, prompts: list[tuple[str, tuple[int, ...]]]) -> Source:
        """Sample one completion for each (key, prompt tokens)."""
        sequences = None
        if self._engine is not None:
            config = self._config
            requests = [
                generate_request(config, key, tokens, stop_tokens(config, self._facts), config.rollout.temperature)
                for key, tokens in prompts
            ]
            completions = self._engine.generate(requests, shard=shard_name(self._version + 1, self._rounds))
            sequences = [Sequence.of(completion, reward=0.0) for completion in completions]
        self._rounds += 1
        sequences = world.broadcast(sequences, list[Sequence])
        sampler = precision_of(self._config.rollout)
        return _complete("sampled now", sampler, sequences, TraceStore(self._folder.trace))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def weights_digest(policy: Policy, dtype: str) -> str:
    """Return the xxh3-128 digest of all weights under their Hugging Face names in this precision.

    The digest does not depend on the parallel layout. All ranks call this together.
    """
    dense, experts = world.holds_first_replica()
    mine = tensor_digests(policy.export(DTYPES[dtype], dense=dense, experts=experts))
    everything = [world.broadcast(mine, dict[str, str], source=rank) for rank in range(dist.get_world_size())]
    return total_digest({name: digest for part in everything for name, digest in part.items()})


def _complete(name: str, sampler: str, sequences: list[Sequence], store: TraceStore) -> Source:
    whole = [s for s in sequences if s.token_ids and s.routes is not None and not missing_rows(s)]
    if len(whole) < 2:
        raise DataError(
            "too few sequences have all their routes",
            where={"run": name},
            got=f"{len(whole)} of {len(sequences)}",
            expected="at least 2",
            do="sample with recording on",
        )
    return Source(name, sampler, whole, len(sequences) - len(whole), store)
