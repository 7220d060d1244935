"""The whole story of a run, read from top to bottom.

Every rank trains. Rank 0 also owns the sampler (a vLLM engine in a child process), the verifiers, the prompts and the
log. One step: sample a batch with routes, judge it, learn from it under the recorded routes, give the sampler the new
weights.

    prompts -> rollout (tokens, logprobs, routes) -> rewards -> packing -> old and reference logprobs -> advantages
            -> replay around the forward and backward pass -> loss -> optimizer -> sync -> the next prompts
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from moe_rl.config.hf import ModelFacts, read_model
from moe_rl.config.schema import Config
from moe_rl.errors import CollapseError
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.policy import Policy, ReferencePolicy
from moe_rl.report.html import write_report
from moe_rl.report.log import RunLog
from moe_rl.report.summary import summarize
from moe_rl.rewards.pool import VerifierPool
from moe_rl.rollout.engine import EngineSettings, VllmEngine
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train import run_folder
from moe_rl.train.kept import KeptRollouts, RolloutBatch, kept_steps
from moe_rl.train.peers import Peers
from moe_rl.train.rollouts import Rollouts
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step import Clock, TrainStep
from moe_rl.train.weights import Canary, WeightSender, way_of


def train(config: Config, folder: RunFolder | None) -> Path:
    """Run, or with `folder` resume, a training run. All ranks call it; returns the run's folder on each.

    The config has been checked (`config.check.problems`), so that what fails here is not the user's writing.
    """
    world.start(config.parallel, seed=config.run.seed, timeout_seconds=24 * 3600)
    with ExitStack() as stack:
        stack.callback(world.stop)
        resumed = folder is not None
        folder = _open_folder(config, folder)
        peers = stack.enter_context(
            Peers(folder.ranks, dist.get_rank(), dist.get_world_size(), timeout_seconds=config.run.peer_timeout_seconds)
        )
        Run(config, folder, peers, stack).steps(resumed)
    return folder.path


class Run:
    """What a rank holds for the length of a run."""

    def __init__(self, config: Config, folder: RunFolder, peers: Peers, stack: ExitStack):
        self.config, self.folder, self.peers = config, folder, peers
        self.is_main = dist.get_rank() == 0
        self.facts = read_model(config.model.path)
        self.store = TraceStore(folder.trace)
        self.kept = KeptRollouts(folder.rollouts, self.store)
        self.log = self.rollouts = None
        self.kept_awake = False
        if self.is_main:
            self.log = RunLog(folder.path, total_steps=config.run.steps, mode=config.replay.mode)
            stack.callback(self.log.close)
            self.log.note(f"run folder: {folder.path}")
            if self.facts.mtp_layers:
                self.log.note("the model's multi-token-prediction layers are left alone: not trained, not sent")
            self.log.note("starting the sampler and the verifiers ...")
            verifiers = stack.enter_context(
                VerifierPool(
                    config.task.rewards,
                    timeout_seconds=config.task.verifier_timeout_seconds,
                    workers=config.task.verifier_workers,
                )
            )
            engine = stack.enter_context(VllmEngine.start(engine_settings(config, self.facts, folder)))
            self.rollouts = Rollouts(config, self.facts, engine, verifiers, folder.path, self.store)
        build = (self.facts, config.train, config.parallel, config.model.path)
        self.policy = Policy(*build, temperature=config.rollout.temperature)
        reference = None
        if config.objective.kl_coef > 0:
            reference = ReferencePolicy(*build, temperature=config.rollout.temperature)
        facts = self.facts
        spec = TraceSpec.from_layers(facts.fingerprint, facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
        self.train_step = TrainStep(config, self.policy, reference, self.store, spec)
        self.sender = WeightSender(self.policy, config.rollout, way_of(config.rollout), folder.sync)
        self.canary = Canary(world.broadcast(self.rollouts.canary_tokens() if self.is_main else None, tuple[int, ...]))

    def steps(self, resumed: bool) -> None:
        """From the first step, or the last checkpoint, to the end of the run and its report."""
        config, done, saved, collapse = self.config, 0, {}, None
        if resumed:
            done = self._restore()
        if not done and config.rollout.weights != "exact":
            self._sync(version=0)  # the sampler started with the checkpoint's
        if not resumed:
            self._evaluate(0)
        for step in range(done + 1, config.run.steps + 1):
            clock = Clock()
            with clock("step"):
                batch = self._rollout(step, clock)
                with self.peers.phase("train", step):
                    metrics = self.train_step.run(
                        batch.sequences,
                        batch.group_ids,
                        step=step,
                        weight_version=step - 1,
                        clock=clock,
                        measure_native=config.replay.native_every > 0 and (step - 1) % config.replay.native_every == 0,
                    )
                with self.peers.phase("sync", step), clock("sync"):
                    metrics |= self._sync(version=step)
            trained = sum(s.forwarded for s in batch.sequences) / clock.seconds["train"]
            metrics |= batch.metrics | {
                "throughput/trained_tokens_per_second": trained,
                **{f"time/{name}": seconds for name, seconds in clock.seconds.items()},
            }
            metrics |= saved
            if self.is_main:
                self.log.step(step, metrics)
            collapse = self.train_step.guards.after_step(step, metrics)
            # The checkpoint comes last: what it stands for has been logged when it appears.
            last = step == config.run.steps or collapse is not None
            if last or step % config.eval.every_steps == 0:
                self._evaluate(step)
            saved = {}
            if last or step % config.checkpoint.every_steps == 0:
                saved = self._save(step)
            done = step
            if collapse is not None:
                break
        with self.peers.phase("report", done):
            if self.is_main:
                self._report(done, collapse)
            dist.barrier()  # a rank that ended with an error now would take the one that writes with it
        if collapse is not None:
            raise collapse

    def _rollout(self, step: int, clock: Clock) -> RolloutBatch:
        """Rank 0 samples and judges; every rank gets the tokens. Routes stay in the trace store."""
        batch = None
        if self.is_main:
            with self.peers.phase("rollout", step), self.log.phase(f"step {step}: sampling"):
                batch = self.rollouts.collect(step, clock)
                self._rest(clock)
        with self.peers.phase("receive rollout", step):
            batch = world.broadcast(batch, RolloutBatch)
        if self.is_main:
            self.kept.save(step, batch)
            self._retain_rollouts(step)
        return batch

    def _rest(self, clock: Clock) -> None:
        """Let the sampler give its memory back until it gets weights again."""
        if level := self.config.rollout.sleep_level:
            with clock("sleep"):
                gave_back = self.rollouts.engine.sleep(level)
            if not gave_back and not self.kept_awake:
                self.log.note("rollout.sleep_level: the sampler keeps its memory, vLLM does not sleep on a CPU")
            self.kept_awake = not gave_back

    def _sync(self, version: int) -> dict[str, float]:
        """Give the sampler the trainer's weights as `version`, and let both score the canary with them."""
        engine = self.rollouts.engine if self.is_main else None
        sent = self.sender.send(engine, version)
        difference = self.canary.difference(self.policy, engine)
        self.train_step.guards.after_sync(version, difference)
        return {"sync/bytes": sent, "sync/canary_abs_diff": difference}

    def _evaluate(self, step: int) -> None:
        with self.peers.phase("evaluate", step):
            if self.is_main:
                clock = Clock()
                with clock("eval"), self.log.phase("evaluating on held-out prompts"):
                    metrics = self.rollouts.evaluate(step)
                self.log.eval_row(step, metrics | {"time/eval": clock.seconds["eval"]})

    def _save(self, step: int) -> dict[str, float]:
        """Write a checkpoint; what it cost is logged with the next step."""
        clock, cursor = Clock(), self.rollouts.source.cursor if self.is_main else 0
        with self.peers.phase("checkpoint", step), clock("checkpoint"):
            checkpoint.save(
                self.folder.checkpoints,
                step,
                self.policy,
                {"cursor": cursor, "guards": self.train_step.guards.state()},
                parallel=self.config.parallel,
                keep=self.config.checkpoint.keep,
                tensors=self.train_step.placement.tensors(),
            )
            if self.is_main:
                self._retain_rollouts(step)
        return {"time/checkpoint": clock.seconds["checkpoint"]}

    def _retain_rollouts(self, step: int) -> None:
        checkpoints = [done for done, _ in checkpoint.complete(self.folder.checkpoints)]
        self.kept.retain(kept_steps(step, self.config.replay.keep_shards, checkpoints))

    def _restore(self) -> int:
        """Put every part of the run back to the newest checkpoint; returns the steps it had done."""
        config, path = self.config, checkpoint.latest(self.folder.checkpoints)
        state = checkpoint.load(path, self.policy, parallel=config.parallel, seed=config.run.seed)
        done = state["step"]
        self.train_step.guards.restore(state["guards"])
        self.train_step.placement.restore(checkpoint.run_tensors(path))
        if self.is_main:
            self.rollouts.source.seek(state["cursor"])
            dropped = self.rollouts.ledger.rewind(done)
            self.rollouts.ledger.verify(self.rollouts.source, steps=done)
            self.log.rewind(done + 1)
            self.kept.retain(range(done + 1))
            self.store.collect_garbage()
            self.log.note(f"resumed from {path} after step {done}; {dropped} steps are done again")
            if (before := state["layout"]) != (now := checkpoint.layout(config.parallel)):
                changed = [f"{name} {before.get(name)} -> {n}" for name, n in now.items() if before.get(name) != n]
                self.log.note(f"another layout: {', '.join(changed)}; random generators derived from run.seed anew")
        if done:
            self._sync(version=done)
        return done

    def _report(self, done: int, collapse: CollapseError | None) -> None:
        self.rollouts.ledger.verify(self.rollouts.source, steps=done)
        summarize(self.folder.path, self._facts() | {"collapse": collapse and str(collapse)})
        report = write_report(self.folder.path)
        self.log.note(f"report: {report}")

    def _facts(self) -> dict[str, object]:
        """What summary.json says besides what was measured."""
        config = self.config
        return {
            "vllm_version": self.rollouts.engine.vllm_version,
            "megatron_core_version": version("megatron-core"),
            "torch_version": version("torch"),
            "replay_mode": config.replay.mode,
            "objective": config.objective.name,
            "seed": config.run.seed,
            **{f"{dimension}_parallel": ranks for dimension, ranks in config.parallel},
            "trainer_dtype": config.train.dtype,
            "sampler_dtype": config.rollout.dtype,
        }


def _open_folder(config: Config, folder: RunFolder | None) -> RunFolder:
    """Rank 0 makes the run folder, or takes over one that an earlier process left; every rank learns its path."""
    path = ""
    if dist.get_rank() == 0:
        folder = run_folder.take_over(folder, config) if folder else run_folder.create(config)
        path = str(folder.path)
    return RunFolder(Path(world.broadcast(path, str)))


def engine_settings(config: Config, facts: ModelFacts, folder: RunFolder) -> EngineSettings:
    """What the run's engine is started with; trace and log go into the folder."""
    rollout = config.rollout
    return EngineSettings(
        model_path=config.model.path,
        dtype=rollout.dtype,
        max_model_len=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        max_concurrent=rollout.max_concurrent,
        kv_cache_mib=rollout.kv_cache_mib,
        trace_root=folder.trace,
        model_fingerprint=facts.fingerprint,
        log_path=folder.engine_log,
        startup_timeout_seconds=rollout.startup_timeout_seconds,
        seed=config.run.seed,
        silence_seconds=config.run.peer_timeout_seconds,
        capture=rollout.capture,
        support=rollout.keep_sampling_mask,
        router_logits_fraction=rollout.router_logits_fraction,
        sleeps=rollout.sleep_level > 0,
    )
