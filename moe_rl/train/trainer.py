"""Defines the objects that a rank holds during a run, and the steps that the loop calls on them.

All ranks hold the policy. Rank 0 also has the log, and the sampler, the reward verifiers and the prompts, or the pool
that owns these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from moe_rl import checkpoint_folder
from moe_rl.clock import Clock
from moe_rl.config.check_cluster import overlap_problem
from moe_rl.config.schema import Config
from moe_rl.errors import CollapseError, ConfigError, MoeRLError, Stopped
from moe_rl.gateway.session_sequences import check_trained
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.adapters import without_adapters
from moe_rl.megatron.cpu import without_mode
from moe_rl.megatron.frozen_policy import BaseOfAdapters, ReferencePolicy
from moe_rl.megatron.hf_files import Trained
from moe_rl.megatron.lora import check_counts
from moe_rl.megatron.model import DTYPES, unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.planning.model_flops import peak_flops, training_flops
from moe_rl.rollout.kept import ReplayedRollouts, RolloutBatch, kept_steps
from moe_rl.rollout.pool_client import PooledRollouts
from moe_rl.rollout.rollouts import Environment, OwnRollouts, Rollouts, canary_runs
from moe_rl.tasks.prompts import TaskPrompts
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train import samples
from moe_rl.train.canary import Canary, Native
from moe_rl.train.keep_evidence import Concerned, EvidenceKeeper, of_canary
from moe_rl.train.keeping import Keeping
from moe_rl.train.peers import Peers, StopRequested
from moe_rl.train.rank_zero import RankZero, open_rank_zero
from moe_rl.train.replayed_run import last_step
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step import TrainStep
from moe_rl.train.step_profiler import StepProfiler
from moe_rl.weights.sender import WeightSender

# The timed parts of a step that every rank runs. A run that is asked to stop finishes these first.
_TRAINING = ("placement", "routes", "logprobs", "train", "sync")
_ASKED = "the run was asked to stop"


class Trainer:
    """Holds everything one rank needs for a run: opened once, then driven by the loop.

    Args:
        task: the prompts; on rank 0 only.

    Attributes:
        replay_ends: the last step of the run that this one replays; None if it samples.
        sessions: the folder with the sessions of the trained episodes.
    """

    def __init__(self, config: Config, folder: RunFolder, task: TaskPrompts | None, peers: Peers, stack: ExitStack):
        self.config, self.folder, self.peers = config, folder, peers
        self.began = time.monotonic()
        self.facts = read_model(config.model.path)
        replayed = config.run.replays
        sampled = folder if replayed is None else RunFolder(replayed)
        self.store, self.sessions = TraceStore(sampled.trace), sampled.rollouts
        self.replay_ends = None if replayed is None else last_step(replayed)
        self.keeping = Keeping(config, folder, self.facts, peers, self._tell, self.timed, stack)
        self.main: RankZero | None = None
        if dist.get_rank() == 0:
            assert task is not None
            self.main = open_rank_zero(config, folder, self.facts, task, self._start_rollouts, stack)
        peers.part("model")
        build = (self.facts, config.train, config.parallel, config.model.path)
        updates = config.run.steps * config.train.updates_per_step
        self.policy = Policy(*build, temperature=config.rollout.temperature, run_updates=updates)
        reference: ReferencePolicy | BaseOfAdapters | None = None
        if config.objective.kl_coef > 0 and config.train.lora is not None:
            reference = BaseOfAdapters(self.policy)
        elif config.objective.kl_coef > 0:
            reference = ReferencePolicy(*build, temperature=config.rollout.temperature)
        spec = TraceSpec.of(self.facts)
        self.train_step = TrainStep(config, self.policy, reference, self.store, spec)
        self.unproven_adapters = config.train.lora is not None
        in_turn = config.pipeline.mode == "sync"
        self.sender = WeightSender(self.policy, config.rollout, folder.sync, world, train=config.train, in_turn=in_turn)
        self.peak_flops = peak_flops(world.device_name(), config.train.dtype)  # of every rank
        self.longest_step, self.step_ended = 0.0, time.monotonic()
        self.train_seconds = 0.0  # duration of the last step, including its weight sync
        runs = None if task is None else canary_runs(config, task)
        self.canary = Canary(world.broadcast(runs, list[tuple[int, ...]]), self.store, spec)
        note: Callable[[str], object] = partial(print, flush=True) if self.main is None else self._tell
        self.profiler = StepProfiler(config.report.profile, folder.profiles, dist.get_rank(), note)
        self.evidence = EvidenceKeeper(config, folder, self.policy, self.store, spec, self._tell)

    def _tell(self, text: str) -> None:
        if self.main is not None:
            self.main.log.note(text)

    def timed(self, part: str, begin: float, end: float) -> None:
        """Write a part of a step that has ended into the time line of the run, on rank 0."""
        if self.main is not None:
            self.main.timeline.add(part, begin, end)

    def _start_rollouts(self, task: TaskPrompts, stack: ExitStack) -> OwnRollouts | PooledRollouts | ReplayedRollouts:
        """Start the sampler and the verifiers, in a separate pool process if they work while the ranks train. A run
        that replays another needs neither."""
        config, run_dir = self.config, self.folder.path
        if config.run.replays is not None:
            return ReplayedRollouts(config, task, run_dir, config.run.replays, self.store)
        if config.pipeline.mode != "sync":
            if world.device().type == "cuda" and not config.rollout.servers:
                raise ConfigError([overlap_problem(config.pipeline.mode)])
            return stack.enter_context(closing(PooledRollouts(config, task, run_dir, self.folder.config, self.store)))
        world.give_back()  # an engine may start on this GPU
        environment: Environment | None = None
        if config.task.environment is not None:
            from moe_rl.gateway.episode_gateway import EpisodeGateway  # needs the extra `serve`

            environment = EpisodeGateway
        rollouts = Rollouts.start(config, self.facts, task, run_dir, stack, environment)
        return stack.enter_context(OwnRollouts(rollouts))

    def sample(self, step: int, clock: Clock) -> RolloutBatch | None:
        """Take the batch of a step on rank 0, and send its tokens to all ranks. Routes stay in the trace store.

        The batch is sampled and verified now, or was so during the last step, or by an earlier process of this run.

        Returns:
            The batch, or None if the run was asked to stop meanwhile.
        """
        batch: RolloutBatch | None = None
        if (main := self.main) is not None:
            saying = main.log.phase(f"step {step}: sampling")
            with self.peers.phase("rollout", step), suppress(StopRequested), self.peers.to_be_left(), saying:
                batch = main.rollouts.take(step, clock)
            if self.peers.asked:
                batch = None
            for unusable in main.rollouts.unusable:
                main.log.note(unusable)
            main.rollouts.unusable.clear()
            if batch is not None:
                self._rest(main, clock)
        with self.peers.phase("receive rollout", step):
            batch = world.broadcast(batch, RolloutBatch | None)
            if batch is not None and self.config.task.environment is not None:
                sequences, mine = batch.sequences, (dist.get_rank(), dist.get_world_size())
                with world.agreed("sessions of its episodes"):
                    check_trained(sequences, self.sessions, mine)
        if batch is not None:
            self.keeping.poll(step)
            if main is not None:
                self._retain_rollouts(main, step)
        return batch

    def _rest(self, main: RankZero, clock: Clock) -> None:
        """Let the sampler free its memory until the next weight sync."""
        engine = main.rollouts.engine
        if engine is not None and (level := self.config.rollout.sleep_level):
            with clock("sleep"):
                gave_back = engine.sleep(level)
            if not gave_back and not main.kept_awake:
                main.log.note(
                    "rollout.sleep_level has no effect: vLLM cannot sleep on a CPU, so the sampler keeps its memory"
                )
            main.kept_awake = not gave_back

    def finish(self, step: int, batch: RolloutBatch, metrics: dict[str, float], clock: Clock) -> CollapseError | None:
        """Log a finished step.

        Args:
            metrics: Metrics of training and sync; those of the rollout and the timings are added. If both have a
                metric, that of training counts.

        Returns:
            The error to end the run with if it has collapsed, else None.
        """
        lengths = [sequence.forwarded for sequence in batch.sequences]
        if self.peak_flops is not None:
            needed = training_flops(self.facts, lengths, adapters=self.config.train.lora is not None)
            metrics["throughput/mfu"] = needed / (clock.seconds["train"] * dist.get_world_size() * self.peak_flops)
        metrics = (
            batch.metrics
            | metrics
            | world.peak_memory()
            | {
                "throughput/trained_tokens_per_second": sum(lengths) / clock.seconds["train"],
                **{f"time/{name}": seconds for name, seconds in (clock.seconds | self.keeping.spent()).items()},
            }
        )
        self.train_seconds = sum(clock.seconds[part] for part in _TRAINING)
        if self.main is not None:
            lines = samples.lines(step, batch.samples, batch.sequences, self.train_step.views)
            self.main.finish_step(step, metrics, lines)
        with self.evidence.of(step, step, lambda: _concerned(batch), alike=True):
            collapse = self.train_step.guards.after_step(step, metrics)
        if collapse is not None:
            self.evidence.keep(collapse, step, step, 0, lambda: _concerned(batch))
        return collapse

    def judging(self, step: int, batch: RolloutBatch) -> AbstractContextManager[None]:
        """Keep evidence if a check ends the body, which trains a step."""
        return self.evidence.of(step, step - 1, lambda: _concerned(batch), lambda: self.train_step.work)

    def check_start(self) -> None:
        """Check before the first update that the trainer would send the sampler exactly the checkpoint, bit for bit.

        Adapters that a run begins with are left out.
        """
        started = time.monotonic()
        trained = Trained(self.config.model.path, self.facts, DTYPES[self.config.train.dtype])
        with without_adapters(map(unwrap, self.policy.chunks)):
            tensors = self.sender.check_start(trained)
        if self.main is not None:
            took = time.monotonic() - started
            self.main.log.note(f"version 0: {tensors} exported tensors are equal to the checkpoint's ({took:.1f} s)")

    def take_start(self) -> None:
        """Take the weights that model.from_run names, and the optimizer if requested, before the first step."""
        start = self.config.model
        if start.from_run is None:
            return
        path = checkpoint_folder.find(start.from_run / checkpoint_folder.FOLDER, start.from_step)
        state = checkpoint.load_start(path, self.policy, optimizer=start.from_optimizer)
        if start.from_optimizer:
            checkpoint.check_optimizer(path, self.policy, state["optimizer"])
        if self.main is not None:
            what = "weights and optimizer" if start.from_optimizer else "weights"
            self.main.log.note(f"version 0: the {what} of {path}")

    def settle(self, step: int, clock: Clock) -> bool:
        """Wait until the sampler no longer needs its current weights.

        Returns:
            Whether it is so, the same on all ranks. False if the run was asked to stop and cannot wait so long: then
            this step is the last, and the resumed run samples the next batch with the weights of this step.
        """
        if not self.config.pipeline.ahead:
            return True
        settled = False
        if self.main is not None:
            with self.peers.phase("wait for rollout", step), suppress(StopRequested), self.peers.to_be_left(late=True):
                self.main.rollouts.settle(clock)
                settled = True
        with self.peers.phase("agree", step):
            return world.broadcast(settled, bool)

    def sync(self, version: int) -> dict[str, float]:
        """Send the trainer's weights to the sampler as `version`, then let both score the canary with them.

        Returns:
            The metrics; none where there is no sampler.
        """
        if self.replay_ends is not None:
            return {}
        engine = None if self.main is None else self.main.rollouts.engine
        guards = self.train_step.guards
        if self.unproven_adapters and self.policy.moves:
            check_counts(map(unwrap, self.policy.chunks), self.facts)
            self.unproven_adapters = False
        exact = guards.canary_limit if guards.exact else 0.0
        native: list[Native] = []

        def score() -> None:
            native.append(self.canary.natively(self.policy, version))

        with without_mode():
            sent = self.sender.send(engine, version, beside=score)
        with self.evidence.of(version, version, lambda: of_canary(self.canary, version)), without_mode():
            heard = self.canary.compare(native[0], engine, version, exact=exact)
        by = heard.by
        with self.evidence.of(version, version, lambda: of_canary(self.canary, version, by), alike=True):
            try:
                guards.after_sync(version, heard)
            except MoeRLError as error:
                by = str(error.about.get("sampler", by))
                raise
        return {"sync/bytes": sent} | heard.metrics()

    def evaluate(self, step: int, *, last: bool) -> str:
        """Evaluate on held-out prompts if that is due and not yet done for this step. All ranks call this.

        A run that is asked to stop during an evaluation repeats it after it is resumed.

        Returns:
            Why the run ends early, after this step; "" if it continues. The same on all ranks.
        """
        if self.replay_ends is not None:  # there is no sampler to evaluate with
            ended = not last and step >= self.replay_ends
            return f"{self.config.run.replays} has trained no further step" if ended else ""
        due = last or step % self.config.eval.every_steps == 0
        due = due and step not in self.keeping.progress.evaluations
        metrics: Mapping[str, float | None] | None = None
        with self.peers.phase("evaluate", step):
            if self.main is not None:
                self.main.trackers.look()
                metrics = self._evaluated(self.main, step) if due else None
        with self.peers.phase("agree", step):  # lasts until `reason_to_stop`: no rank waits for a sampler any more
            if due:
                metrics = world.broadcast(metrics, dict[str, float | None] | None)
                if metrics is not None:
                    self.keeping.progress.add(step, metrics)
        return "" if last else self.keeping.progress.why_end()

    def _evaluated(self, main: RankZero, step: int) -> Mapping[str, float | None] | None:
        """Return the logged metrics of this step's evaluation, or evaluate now; None if the run was asked to stop."""
        if (logged := main.log.evaluation(step)) is not None:
            return logged
        clock, metrics = Clock(self.peers.part, self.timed), None
        saying = main.log.phase("evaluating on held-out prompts")
        with suppress(StopRequested), self.peers.to_be_left(), clock("eval"), saying:
            assert not isinstance(main.rollouts, ReplayedRollouts)
            metrics = main.rollouts.evaluate(step)
        if metrics is not None:
            main.log.eval_row(step, metrics | {"time/eval": clock.seconds["eval"]})
            main.newest = {**main.newest, **metrics}
        return metrics

    def save(self, step: int, *, whole: bool, retain: bool = True) -> None:
        """Start writing a checkpoint. With `whole`, wait until it is complete; otherwise it may be written in the
        background. With `retain`, delete the rollouts that are no longer needed."""
        ledger = None if self.main is None else self.main.rollouts.ledger.digest(step)
        with self.keeping.part("checkpoint", step):
            self.keeping.save(step, self.train_step, ledger, whole=whole)
            if retain and self.main is not None:
                self._retain_rollouts(self.main, step)

    def reason_to_stop(self, *, last: bool) -> str:
        """Return why the run ends after this step with `Stopped`: a rank was asked to stop, or another step would not
        fit into run.max_hours; else "".

        All ranks call this together, once a step, and get the same answer. `last`: no other step follows.
        """
        now, hours = time.monotonic(), self.config.run.max_hours
        self.longest_step, self.step_ended = max(self.longest_step, now - self.step_ended), now
        used = not last and hours is not None and now - self.began + self.longest_step > 3600 * hours
        asked, late = world.all_reduce([self.peers.asked, used], dist.ReduceOp.MAX)
        if asked:
            return _ASKED
        return f"the run was to end within run.max_hours = {hours:g}" if late else ""

    def stop(self, done: int, why: str = _ASKED) -> NoReturn:
        """Save a checkpoint of the last finished step and end the run with `Stopped`."""
        if done not in (self.keeping.checkpoints.last, self.keeping.checkpoints.pending):
            # The request may have left the pool in the middle of a call. A resumed run deletes the rollouts.
            self.save(done, whole=True, retain=False)
        with self.peers.phase("checkpoint", done):
            self.peers.part("finish")
            self.keeping.checkpoints.finish()
            self.peers.part("finish export")
            self.keeping.exports.finish()
        self.peers.stopped()
        kept = "a checkpoint" if done else "nothing to save yet"
        raise Stopped(f"{why} and did after step {done}, with {kept}")

    def _retain_rollouts(self, main: RankZero, step: int) -> None:
        last, ahead = self.config.replay.keep_shards, self.config.pipeline.ahead
        main.rollouts.retain(kept_steps(step, last, self.keeping.checkpoints.steps(), ahead))

    def report(self, done: int, collapse: CollapseError | None, early: str) -> None:
        """End the run: verify the prompt ledger, write summary.json and report.html.

        early: why the run ends before its last step, or "".
        """
        with self.peers.phase("export", done):
            self.peers.part("finish")
            self.keeping.exports.finish()
        if self.main is not None:
            with self.peers.phase("report", done):
                progress = self.keeping.progress
                self.main.end_run(self.config, self.folder, progress, done=done, collapse=collapse, early=early)
        with self.peers.phase("end", done):
            dist.barrier()  # if a rank ended with an error now, torchrun would kill rank 0 while it writes


def _concerned(batch: RolloutBatch) -> list[Concerned]:
    return [Concerned.of(sequence) for sequence in batch.sequences]
