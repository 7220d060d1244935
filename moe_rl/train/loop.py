"""Runs the main loop of a training run, from start to report.

All ranks train. Rank 0 also owns the log and, in mode sync, the sampler (a vLLM engine in a child process, or vLLM
servers), the reward verifiers and the prompts. In the other modes the pool owns these. Each step samples completions
and records their routes, scores them with rewards, trains on them with the recorded routes replayed, and sends the new
weights to the sampler:

    prompts -> rollout (tokens, logprobs, routes) -> rewards -> packing -> old and reference logprobs -> advantages
            -> forward and backward pass with replayed routes -> loss -> optimizer -> weight sync -> next prompts

consumes    the batch of each step, from the rollouts of rank 0 or from the pool
waits for   that batch, and after training for the sampler to hold the new weights
unblocks    the pool, which then samples with the new weights
produces    weights, metrics, checkpoints, and which steps' rollouts may be deleted

Read next: `rollout/rollouts.py` (sampling a batch), `rollout/pool.py`, `step.py` (training on a batch), `trainer.py`
(the objects that a rank holds).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import CheckpointError, CollapseError
from moe_rl.megatron import world
from moe_rl.tasks.prompts import TaskPrompts
from moe_rl.train.peers import Peers
from moe_rl.train.resume import open_folder, restore
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.run_inputs import RunInput
from moe_rl.train.trainer import Trainer


@contextmanager
def _saying_how_to_go_on(run: Path) -> Iterator[None]:
    """Add a note to any error that ends the run: how to resume from the checkpoints that are on disk by then."""
    try:
        yield
    except CollapseError as error:
        _, newest = checkpoints.complete(run / checkpoints.FOLDER)[-1]
        error.add_note(checkpoints.to_resume_instead(newest))
        raise
    except CheckpointError:
        raise  # its message already says so: the newest checkpoint may be the one that cannot be read
    except BaseException as error:
        error.add_note(checkpoints.to_go_on(run / checkpoints.FOLDER))
        raise


def train(
    config: Config,
    folder: RunFolder | None,
    task: TaskPrompts | None,
    inputs: Sequence[RunInput],
    begin_after: int | Literal["best"] | None = None,
) -> Path:
    """Train from the beginning, or resume the run in `folder`. All ranks call this function together.

    Args:
        config: Checked by `config.check.problems` before, so errors raised here are not mistakes in the config file.
        folder: The run to resume; None starts a new run.
        task: The prompts of the config, whose rewards were tried; on rank 0 only.
        inputs: What the run reads; on rank 0 only. Changes since the run began are already accepted.
        begin_after: Step of the checkpoint to resume from. None means the newest one, "best" the best one, 0 means the
            beginning.

    Returns:
        The path of the run folder, on every rank.
    """
    world.start(config.parallel, seed=config.run.seed, timeout_seconds=24 * 3600)
    with ExitStack() as stack:
        stack.callback(world.stop)
        resumed = folder is not None
        folder, done = open_folder(config, folder, inputs, begin_after, stack)
        config = load_config(folder.config)  # the same on all ranks, and complete
        stack.enter_context(_saying_how_to_go_on(folder.path))
        peers = stack.enter_context(
            Peers(
                folder.path,
                dist.get_rank(),
                dist.get_world_size(),
                timeout_seconds=config.run.peer_timeout_seconds,
                grace_seconds=config.checkpoint.grace_seconds,
                hang_seconds=config.run.hang_seconds,
                evidence=world.begun_collectives,
                near=world.ranks_of_this_node(),
            )
        )
        trainer = Trainer(config, folder, task, peers, stack)
        if resumed:
            peers.part("restore")
            restore(trainer, done)
        if not done:
            peers.part("check start")
            trainer.check_start()
            trainer.take_start()
        other = not config.starts_from_model or config.rollout.weights != "exact"
        if done or other or config.rollout.servers:
            peers.part("sync")
            trainer.sync(version=done)  # a new engine holds the base model's weights, and a server may hold any weights
        early = trainer.evaluate(done, last=done == config.run.steps)
        last = done == config.run.steps or early != ""
        trainer.keeping.export(done, trainer.policy, last=last)  # the earlier process may have been cut off
        if last and (why := trainer.reason_to_stop(last=last)):
            trainer.stop(done, why)
        collapse, native_every = None, config.replay.native_every
        stack.callback(gc.unfreeze)
        gc.collect()
        gc.freeze()  # what exists now stays until the end: a collection would look at all of it for 0.2 s
        trainer.step_ended = time.monotonic()  # what came before was no step
        for step in range(done + 1, config.run.steps + 1):
            if early:
                break
            clock = Clock(peers.part, trainer.timed)
            with trainer.profiler.step(step), clock("step"):
                batch = trainer.sample(step, clock)
                if batch is None:
                    trainer.stop(done)
                with peers.phase("train", step, seconds=trainer.train_seconds), trainer.judging(step, batch):
                    metrics = trainer.train_step.run(
                        batch.sequences,
                        batch.group_ids,
                        step=step,
                        weight_version=step - 1,
                        clock=clock,
                        measure_native=native_every > 0 and (step - 1) % native_every == 0,
                        samples=[sample.key for sample in batch.samples],
                    )
                settled = trainer.settle(step, clock)
                with peers.phase("sync", step), clock("sync"):
                    metrics |= trainer.sync(version=step) if settled else {}
            collapse = trainer.finish(step, batch, metrics, clock)
            # Save last: once a checkpoint for this step appears on disk, the step is already in the log.
            done, last = step, step == config.run.steps or collapse is not None
            early = trainer.evaluate(step, last=last)
            last = last or early != ""
            if collapse is None:
                trainer.keeping.export(step, trainer.policy, last=last)
            if collapse is None and (why := trainer.reason_to_stop(last=last)):
                trainer.stop(done, why)
            if last or step % config.checkpoint.every_steps == 0 or step == trainer.keeping.progress.best_step:
                trainer.save(step, whole=last)
            if collapse is not None:
                break
        trainer.report(done, collapse, early)
        if collapse is not None:
            raise collapse
    return folder.path
