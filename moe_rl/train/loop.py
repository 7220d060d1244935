"""The whole story of a run, read from top to bottom.

Every rank trains. Rank 0 also owns the sampler (a vLLM engine in a child process, or servers), the verifiers, the
prompts and the log. One step: sample a batch with routes, judge it, learn from it under the recorded routes, give the
sampler the new weights.

    prompts -> rollout (tokens, logprobs, routes) -> rewards -> packing -> old and reference logprobs -> advantages
            -> replay around the forward and backward pass -> loss -> optimizer -> sync -> the next prompts

How a batch is sampled: `rollouts.py`. How it is learned from: `step.py`. What a rank holds meanwhile: `trainer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.schema import Config
from moe_rl.errors import CheckpointError, CollapseError
from moe_rl.megatron import world
from moe_rl.train.peers import Peers
from moe_rl.train.resume import open_folder, restore
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step_metrics import Clock
from moe_rl.train.trainer import Trainer


@contextmanager
def _saying_how_to_go_on(run: Path) -> Iterator[None]:
    """Note on whatever ends the run how to go on with it, as what is on disk says once all else has ended."""
    try:
        yield
    except CollapseError as error:
        _, newest = checkpoints.complete(run / checkpoints.FOLDER)[-1]
        error.add_note(checkpoints.to_resume_instead(newest))
        raise
    except CheckpointError:
        raise  # which says that itself: it may be the newest one that cannot be read
    except BaseException as error:
        error.add_note(checkpoints.to_go_on(run / checkpoints.FOLDER))
        raise


def train(config: Config, folder: RunFolder | None, begin_after: int | None = None) -> Path:
    """Run, or with `folder` resume, a training run. All ranks call it; returns the run's folder on each.

    begin_after: steps of the checkpoint to go on from, by default of the newest; 0: of none. The config has been
    checked (`config.check.problems`), so that what fails here is not the user's writing.
    """
    world.start(config.parallel, seed=config.run.seed, timeout_seconds=24 * 3600)
    with ExitStack() as stack:
        stack.callback(world.stop)
        resumed = folder is not None
        folder, done = open_folder(config, folder, begin_after, stack)
        stack.enter_context(_saying_how_to_go_on(folder.path))
        peers = stack.enter_context(
            Peers(
                folder.path,
                dist.get_rank(),
                dist.get_world_size(),
                timeout_seconds=config.run.peer_timeout_seconds,
                grace_seconds=config.checkpoint.grace_seconds,
                near=world.ranks_of_this_node(),
            )
        )
        trainer = Trainer(config, folder, peers, stack)
        if resumed:
            restore(trainer, done)
        if not done:
            trainer.check_start()
        if done or config.rollout.weights != "exact" or config.rollout.servers:
            trainer.sync(version=done)  # an engine started with the model's own; servers hold nothing that counts
        trainer.evaluate(done, last=done == config.run.steps)
        collapse, native_every = None, config.replay.native_every
        for step in range(done + 1, config.run.steps + 1):
            clock = Clock(peers.part)
            with clock("step"):
                batch = trainer.sample(step, clock)
                if batch is None:
                    trainer.stop(done)
                with peers.phase("train", step, seconds=trainer.train_seconds):
                    metrics = trainer.train_step.run(
                        batch.sequences,
                        batch.group_ids,
                        step=step,
                        weight_version=step - 1,
                        clock=clock,
                        measure_native=native_every > 0 and (step - 1) % native_every == 0,
                    )
                with peers.phase("sync", step), clock("sync"):
                    metrics |= trainer.sync(version=step)
            collapse = trainer.finish(step, batch, metrics, clock)
            # The checkpoint comes last: what it stands for has been logged when it appears.
            done, last = step, step == config.run.steps or collapse is not None
            trainer.evaluate(step, last=last)
            if collapse is None and trainer.asked_to_stop():
                trainer.stop(done)
            if last or step % config.checkpoint.every_steps == 0:
                trainer.save(step, whole=last)
            if collapse is not None:
                break
        trainer.report(done, collapse)
        if collapse is not None:
            raise collapse
    return folder.path
