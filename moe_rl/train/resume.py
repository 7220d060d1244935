"""Resumes a run: takes over its folder, restores a checkpoint, and reuses rollouts that an earlier process left.

Rollouts of the step after the checkpoint were sampled with the checkpoint's weights, or with older ones where sampling
runs ahead. If they are complete, the step trains on them instead of sampling again: where sampling is not
deterministic, or its weights are gone, this is the only way to repeat the step as the first process would have made it.
If only the completions are there, they are judged again. Rollouts that cannot be proven complete are sampled again,
with the checkpoint's weights. Rollouts of later steps are deleted, because the weights that sampled them may be lost.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import CheckpointError, ConfigError, DataError, MoeRLError
from moe_rl.megatron import checkpoint, world
from moe_rl.replay.routes import RowPolicy, read_routes
from moe_rl.report import history
from moe_rl.rollout.kept import KeptRollouts, ReplayedRollouts, RolloutBatch, SampledStep, of_others
from moe_rl.rollout.pool_client import PooledRollouts
from moe_rl.rollout.rollouts import OwnRollouts
from moe_rl.tasks.prompt_ledger import PromptLedger, StepPrompts
from moe_rl.tasks.prompts import PromptSource
from moe_rl.trace import TraceSpec
from moe_rl.train import run_folder
from moe_rl.train.rank_zero import RankZero
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.run_inputs import RunInput, changed_inputs, write_inputs
from moe_rl.train.sampling_support import read_head, read_support
from moe_rl.train.trainer import Trainer
from moe_rl.types import held_together

# What `Trainer.save` gives to a checkpoint and `restore` reads.
_FIELDS = ("guards", "evaluations", "ledger")


@dataclass(frozen=True, slots=True)
class _Opened:
    """Tells the other ranks what rank 0 found in the run folder: its path and the step to continue from, or the
    problem."""

    path: str = ""
    done: int = 0
    problem: str = ""


def open_folder(
    config: Config,
    folder: RunFolder | None,
    inputs: Sequence[RunInput],
    step: int | Literal["best"] | None,
    stack: ExitStack,
) -> tuple[RunFolder, int]:
    """Create or take over the run folder, and lock it until `stack` is left. All ranks call this together.

    Args:
        folder: The folder of an earlier run; None creates a new one.
        inputs: What the run reads; on rank 0 only.
        step: Step of the checkpoint to continue from; None means the newest one, "best" the best one.

    Returns:
        The folder, and the number of finished steps to continue from.

    Raises:
        ConfigError: The run in this folder is still going. Raised on all ranks.
    """
    opened = None
    if dist.get_rank() == 0:
        resumed, done = folder is not None, 0
        try:
            inputs_changed = changed_inputs(folder, config, inputs)
            folder = folder or run_folder.create(config)
            stack.enter_context(run_folder.held(folder, first=True))
            if resumed and step != 0:
                done = checkpoints.step_of(checkpoints.find(folder.checkpoints, step))
            now = config if resumed else load_config(folder.config)
            changed = run_folder.changes(load_config(folder.config), now) | inputs_changed
            # Before the config is written: a process that dies in between leaves a config that the history knows.
            history.record(
                folder.path,
                after=done,
                ranks=dist.get_world_size(),
                device=world.device_name(),
                changed=changed,
                config=now.model_dump(mode="json"),
            )
            if resumed:
                run_folder.take_over(folder, config)
            write_inputs(folder, inputs)
            opened = _Opened(str(folder.path), done)
        except ConfigError as error:
            opened = _Opened(problem=str(error))
    opened = world.broadcast(opened, _Opened)
    if opened.problem:
        raise ConfigError(opened.problem)
    folder = RunFolder(Path(opened.path))
    _check_seen(folder)
    if dist.get_rank():
        stack.enter_context(run_folder.held(folder, first=False))
    return folder, opened.done


def _check_seen(folder: RunFolder) -> None:
    """Check that all ranks see the config that rank 0 wrote into the folder. All ranks call this together.

    Raises:
        ConfigError: A rank does not see it. Raised on all ranks.
    """
    config = world.broadcast(folder.config.read_text() if dist.get_rank() == 0 else None, str)
    seen = folder.config.is_file() and folder.config.read_text() == config
    (blind,) = world.all_reduce([float(not seen)])
    if blind:
        raise ConfigError(
            "some ranks do not see the folder that rank 0 created",
            where={
                "key": "run.runs_dir",
                "rank": dist.get_rank(),
                "host": socket.gethostname(),
                "folder": folder.path.absolute(),
            },
            got=f"missing on {blind:.0f} ranks{'' if seen else ', this rank included'}",
            do="put run.runs_dir on a filesystem that all nodes mount at the same path",
        )


def restore(trainer: Trainer, done: int) -> None:
    """Restore every part of a run to the checkpoint after `done` steps; 0 restores the beginning. All ranks call
    this."""
    parallel = trainer.config.parallel
    path: Path | None = None
    if done:
        path = checkpoints.find(trainer.folder.checkpoints, done)
        seed = trainer.config.run.seed
        state = checkpoint.load(path, trainer.policy, parallel=parallel, seed=seed, fields=_FIELDS)
        trainer.train_step.guards.restore(state["guards"])
        trainer.keeping.progress.restore(state["evaluations"])
        trainer.train_step.placement.restore(checkpoint.run_tensors(path))
        trainer.keeping.checkpoints.last = done
        if trainer.main is not None:
            check_of_this_run(path, state["ledger"], trainer.main.rollouts.ledger.digest(done))
    if (main := trainer.main) is not None:
        for what, folder in (("checkpoint", trainer.folder.checkpoints), ("export", trainer.folder.exports)):
            checkpoints.sweep(folder)
            for aside in checkpoints.abandon_newer(folder, done):
                main.log.note(f"a newer {what} was renamed and is not used: {aside}")
        checkpoints.name_best(trainer.folder.checkpoints, trainer.keeping.progress.best_step)
        _restore_rollouts(trainer, main, done)
        main.log.rewind(done + 1)
        main.samples.rewind(done + 1)
        main.timeline.rewind(done + 1)
        if path is not None and state["seeded"]:
            before, now = state["layout"], checkpoint.layout(parallel)
            changed = [f"{name} {before.get(name)} -> {n}" for name, n in now.items() if before.get(name) != n]
            why = f"the parallel layout changed: {', '.join(changed)}" if changed else "the kind of device changed"
            main.log.note(f"{why}; random generators are seeded again from run.seed")
    if path is not None:  # last, because nothing may have changed the optimizer since it was loaded
        checkpoint.check_optimizer(path, trainer.policy, state["optimizer"])


def _restore_rollouts(trainer: Trainer, main: RankZero, done: int) -> None:
    """Bring the prompt ledger and the kept rollouts to the end of step `done`, or of the next one if it was sampled."""
    rollouts = main.rollouts
    if isinstance(rollouts, ReplayedRollouts):  # the kept rollouts are another run's
        rollouts.ledger.rewind(done)
        return
    batch = _take_left_behind(trainer, main, rollouts, done)
    rollouts.left_behind = None if isinstance(batch, SampledStep) else batch
    entered = done + (rollouts.left_behind is not None)
    by_group = trainer.config.pipeline.by_group
    rollouts.ledger.verify(rollouts.source, steps=entered, whole=not by_group)
    main.whole = not by_group or entered < trainer.config.run.steps
    rollouts.retain(set(range(done + 1 + (batch is not None))))
    trainer.store.collect_garbage()
    for shard in trainer.store.unpublished():
        main.log.note(f"shard {shard} is not in the trace manifest; it is not used for training")


def check_of_this_run(path: Path, expected: str, got: str) -> None:
    """Check that a checkpoint was written with this prompt ledger.

    Args:
        expected: Digest of the ledger that the checkpoint recorded.
        got: Digest of the ledger now, up to the checkpoint's step.

    Raises:
        CheckpointError: The digests differ.
    """
    if got != expected:
        raise CheckpointError(
            "a checkpoint does not belong to this prompt ledger, or the ledger was changed",
            where={"file": path},
            got=f"{got} as the digest of the ledger up to the checkpoint's step",
            expected=expected,
            do=checkpoints.to_resume_instead(path),
        )


def _take_left_behind(
    trainer: Trainer, main: RankZero, rollouts: OwnRollouts | PooledRollouts, done: int
) -> RolloutBatch | SampledStep | None:
    """Return the rollouts of the next step if they are complete, or its completions if these are, else None.

    Later lines are cut from the prompt ledger. Completions that are judged again get a new line.
    """
    step = done + 1
    begun = f"resumed after step {done}" if done else "restarted from the beginning"
    config, vocabulary = trainer.config, trainer.facts.vocab
    if done == config.run.steps:
        rollouts.ledger.rewind(done)
        main.log.note(f"the run has made all its {done} steps; run.steps=N makes it longer")
        return None
    try:
        _, batch = left_behind(
            step,
            rollouts.ledger,
            rollouts.source,
            rollouts.kept,
            trainer.train_step.spec,
            lag=config.pipeline.lag,
            microbatch_tokens=config.train.microbatch_tokens,
            credit=None if config.task.environment is None else config.task.environment.credit,
            support=vocabulary if config.rollout.keep_sampling_mask else None,
            head=(vocabulary, config.objective.score_centering) if config.objective.score_centering else None,
        )
    except MoeRLError as error:
        dropped = rollouts.ledger.rewind(done)
        how = f"again: {error}" if dropped else "next: no rollouts of it were finished"
        main.log.note(f"{begun}; steps repeated: {dropped}. Step {step} is sampled {how}")
        return None
    judged = isinstance(batch, RolloutBatch)
    dropped = rollouts.ledger.rewind(step if judged else done)
    what = f"{len(batch.sequences)} sequences that were sampled for it before"
    then = f"is trained on the {what}" if judged else f"judges the {what} again"
    main.log.note(f"{begun}; steps repeated: {dropped + judged}. Step {step} {then}")
    return batch


def left_behind(
    step: int,
    ledger: PromptLedger,
    source: PromptSource,
    kept: KeptRollouts,
    spec: TraceSpec,
    *,
    lag: int,
    microbatch_tokens: int,
    credit: str | None = None,
    support: int | None = None,
    head: tuple[int, int] | None = None,
) -> tuple[StepPrompts, RolloutBatch | SampledStep]:
    """Read and check the rollouts of `step`, the step after the checkpoint that the run continues from.

    Args:
        lag: How many versions older than the checkpoint's weights the sampling weights may be.
        microbatch_tokens: As in the config now; it may have been larger.
        credit: That of the environment, if there is one.
        support: Vocabulary size, if sampling supports are needed; else None.
        head: Vocabulary size and number of tokens, if sampler heads are needed; else None.

    Returns:
        The step's line of the prompt ledger, and its rollouts, or its completions if it has no batch.

    Raises:
        MoeRLError: Something is missing or damaged, fits into no microbatch, or belongs to other prompts, tokens,
            weights or another model.
    """
    entry, batch = kept.entered(step, ledger, source, kept.load_sampled)
    ledger.check(step)
    if isinstance(batch, SampledStep):
        _check_texts(batch, source)
    if too_long := _too_long(batch, microbatch_tokens, credit):
        raise DataError(
            "its kept rollouts do not fit into a microbatch",
            got=f"{len(too_long)} too long, such as {too_long[0]}",
            expected=f"at most train.microbatch_tokens = {microbatch_tokens}",
        )
    # Missing routes are accepted here; the step decides what to do about them when it trains.
    rows = RowPolicy(missing="native", max_staleness=lag)
    for sequence in batch.sequences:
        versions = sorted({span.weight_version for span in sequence.versions})
        if not step - 1 - lag <= versions[0] <= versions[-1] <= step - 1:
            bound = f"version {step - 1}" + (f", or up to {lag} older" if lag else "")
            raise of_others("weights", f"versions {versions} in {sequence.key}", bound)
        fed = np.array(sequence.ids[:-1], np.int64)
        read_routes(
            kept.store,
            [sequence],
            spec,
            layers=spec.moe_layers,
            fed=[fed],
            here=[np.ones(len(fed), bool)],
            weight_version=step - 1,
            policy=rows,
        )
        if support is not None:
            read_support(kept.store, sequence, support)
        if head is not None:
            read_head(kept.store, sequence, *head)
    return entry, batch


def _check_texts(sampled: SampledStep, source: PromptSource) -> None:
    """Check that completions which are judged again belong to the present texts of their prompts: an accepted change of
    the prompts leaves their ids. Rows of an environment have no text."""
    prompts = source.at(sampled.first, len(sampled.completions))
    for prompt, group in zip(prompts, sampled.completions, strict=True):
        if any(completion.prompt_token_ids != prompt.token_ids for completion in group):
            raise of_others("texts of their prompts", f"an older one of {prompt.id}", "the present ones")


def _too_long(batch: RolloutBatch | SampledStep, microbatch_tokens: int, credit: str | None) -> list[str]:
    """Return the keys of the completions or episodes that must be in one microbatch and do not fit."""
    if isinstance(batch, SampledStep):
        played = (trajectory for group in batch.trajectories for trajectory in group)
        return [trajectory.name for trajectory in played if not trajectory.fits(credit, microbatch_tokens)]
    return [
        batch.sequences[places[0]].completion
        for places in held_together(batch.sequences)
        if sum(batch.sequences[place].forwarded for place in places) > microbatch_tokens
    ]
