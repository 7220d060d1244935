"""A run folder taken over, the run put back to a checkpoint, and what an ended process left for the step after it.

Rollouts that were sampled, judged and entered for that step are from the weights that the run goes on with, so it is
trained on them instead of sampling once more: where sampling is not deterministic, only that gives the step which the
first process would have made. Whatever is not proven whole is sampled again. Later steps' rollouts go: their weights
are no more.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.schema import Config
from moe_rl.errors import CheckpointError, ConfigError, DataError, MoeRLError, describe
from moe_rl.megatron import checkpoint, world
from moe_rl.replay.routes import RowPolicy, read_routes
from moe_rl.tasks.prompt_ledger import PromptLedger, StepPrompts
from moe_rl.tasks.prompts import PromptSource
from moe_rl.trace import TraceSpec
from moe_rl.train import run_folder
from moe_rl.train.kept import KeptRollouts, RolloutBatch, shards_of
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.sampling_support import read_support
from moe_rl.train.trainer import RankZero, Trainer

# What a step does about routes that are missing is decided when it is trained on.
_ROWS = RowPolicy(missing="native", stale="refuse", max_staleness=0)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What rank 0 tells the others of the run folder: its path and the steps done to go on from, or what is wrong."""

    path: str = ""
    done: int = 0
    problem: str = ""


def open_folder(config: Config, folder: RunFolder | None, step: int | None, stack: ExitStack) -> tuple[RunFolder, int]:
    """The run's folder, new or, if it is given, taken over, and the steps done to go on from: `step`, or those of the
    newest checkpoint. Every rank holds the folder until the stack is left. All ranks call it.

    Raises ConfigError on all ranks when the run that the folder is of is still going.
    """
    opened = None
    if dist.get_rank() == 0:
        resumed = folder is not None
        try:
            folder = folder or run_folder.create(config)
            stack.enter_context(run_folder.held(folder, first=True))
            if resumed and step is None:
                step, _ = checkpoints.complete(folder.checkpoints)[-1]  # there when the ranks looked
            if resumed:
                run_folder.take_over(folder, config)
            opened = _Opened(str(folder.path), step or 0)
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
    """All ranks call it. Raises ConfigError on each when one does not see what rank 0 has written into the folder."""
    config = world.broadcast(folder.config.read_text() if dist.get_rank() == 0 else None, str)
    seen = folder.config.is_file() and folder.config.read_text() == config
    (blind,) = world.all_reduce([float(not seen)])
    if blind:
        raise ConfigError(
            describe(
                "run.runs_dir: not all ranks see the folder that rank 0 made",
                where=f"rank {dist.get_rank()} on {socket.gethostname()}: {folder.path.absolute()}",
                got=f"{'not here and ' if not seen else ''}not on {blind:.0f} ranks",
                do="put it on a filesystem that all nodes mount at the same path",
            )
        )


def restore(trainer: Trainer, done: int) -> None:
    """Put every part of a run back to the checkpoint after `done` steps, with 0 to its beginning. All ranks call it."""
    parallel, cursor = trainer.config.parallel, 0
    before: dict[str, int] | None = None
    if done:
        path = checkpoints.find(trainer.folder.checkpoints, done)
        state = checkpoint.load(path, trainer.policy, parallel=parallel, seed=trainer.config.run.seed)
        trainer.train_step.guards.restore(state["guards"])
        trainer.train_step.placement.restore(checkpoint.run_tensors(path))
        cursor, before = state["cursor"], state["layout"]
        trainer.checkpoints.last = done
        if trainer.main is not None:
            check_of_this_run(path, state["ledger"], trainer.main.rollouts.ledger.digest(done))
    if (main := trainer.main) is not None:
        checkpoints.sweep(trainer.folder.checkpoints)
        for aside in checkpoints.abandon_newer(trainer.folder.checkpoints, done):
            main.log.note(f"a newer checkpoint was put aside: {aside}")
        main.rollouts.source.seek(cursor)
        main.left_behind = _take_left_behind(trainer, main, done)
        entered = done + (main.left_behind is not None)
        main.rollouts.ledger.verify(main.rollouts.source, steps=entered)
        trainer.kept.retain(range(entered + 1))
        trainer.store.collect_garbage()
        for shard in trainer.store.unpublished():
            main.log.note(f"the manifest of the trace has lost the line of shard {shard}, which nothing is trained on")
        main.log.rewind(done + 1)
        now = checkpoint.layout(parallel)
        if before is not None and before != now:
            changed = [f"{name} {before.get(name)} -> {n}" for name, n in now.items() if before.get(name) != n]
            main.log.note(f"another layout: {', '.join(changed)}; random generators derived from run.seed anew")


def check_of_this_run(path: Path, expected: str, got: str) -> None:
    """Raises CheckpointError unless the prompt ledger, up to its step, is the one that the checkpoint was written with.

    expected: the ledger's digest then; got: now.
    """
    if got != expected:
        raise CheckpointError(
            describe(
                "a checkpoint and the prompt ledger are of different runs, or the ledger was changed",
                where=str(path),
                got=f"{got}, the digest of the ledger's lines up to its step",
                expected=expected,
                do=checkpoints.to_resume_instead(path),
            )
        )


def _take_left_behind(trainer: Trainer, main: RankZero, done: int) -> RolloutBatch | None:
    """The rollouts of the next step, if they are there and whole. The ledger is cut behind them, else before."""
    rollouts, step = main.rollouts, done + 1
    begun = f"resumed after step {done}" if done else "begun again"
    vocabulary = trainer.facts.vocab if trainer.config.rollout.keep_sampling_mask else None
    try:
        entry, batch = left_behind(
            step, rollouts.ledger, rollouts.source, trainer.kept, trainer.train_step.spec, vocabulary=vocabulary
        )
    except MoeRLError as error:
        dropped = rollouts.ledger.rewind(done)
        main.log.note(f"{begun}; {dropped} steps are done again. Step {step} is sampled: {error}")
        return None
    dropped = rollouts.ledger.rewind(step)
    rollouts.source.seek(entry.next_cursor)
    found = f"{len(batch.sequences)} sequences that were sampled for it before and are whole"
    main.log.note(f"{begun}; {dropped + 1} steps are done again. Step {step} is trained on the {found}")
    return batch


def left_behind(
    step: int,
    ledger: PromptLedger,
    source: PromptSource,
    kept: KeptRollouts,
    spec: TraceSpec,
    *,
    vocabulary: int | None,
) -> tuple[StepPrompts, RolloutBatch]:
    """The ledger's line and the rollouts of `step`, which follows the checkpoint that the run goes on from.

    source: at that checkpoint's cursor. vocabulary: its size, where sampling supports are needed.
    Raises MoeRLError with what is missing, damaged, or of other prompts, tokens, weights or model.
    """
    entry = ledger.find(step - 1)
    if entry is None:
        raise DataError(describe("nothing was sampled for it to the end", got="no line of it in the prompt ledger"))
    prompts = [prompt.id for prompt in source.peek(source.cursor, len(entry.prompts))]
    if (entry.cursor, entry.prompts) != (source.cursor, prompts):
        got, expected = ((at, ids[:1]) for at, ids in ((entry.cursor, entry.prompts), (source.cursor, prompts)))
        raise _other("prompts", f"{got[1]} from cursor {got[0]}", f"{expected[1]} from cursor {expected[0]}")
    batch = kept.load(step)
    if batch.digest != entry.completions:
        raise _other("completions", f"digest {batch.digest}", f"{entry.completions}, as the prompt ledger has it")
    kept.store.check_published(shards_of(batch))
    for sequence in batch.sequences:
        if sequence.weight_version != step - 1:
            raise _other("weights", f"version {sequence.weight_version} in {sequence.key}", f"version {step - 1}")
        fed = np.array([*sequence.prompt_token_ids, *sequence.token_ids[:-1]], np.int64)
        read_routes(
            kept.store,
            sequence,
            spec,
            layers=spec.moe_layers,
            fed=fed,
            here=np.ones(len(fed), bool),
            weight_version=step - 1,
            policy=_ROWS,
        )
        if vocabulary is not None:
            read_support(kept.store, sequence, vocabulary)
    return entry, batch


def _other(what: str, got: str, expected: str) -> DataError:
    return DataError(describe(f"what was sampled for it is of other {what}", got=got, expected=expected))
