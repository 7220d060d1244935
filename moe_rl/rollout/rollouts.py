"""Does the sampling half of a step: samples completions for prompts and verifies them. Also starts the sampler: vLLM
engines in child processes, or a connection to the config's servers.

In mode sync rank 0 has the rollouts (`OwnRollouts`), else the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Self

import xxhash

from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.errors import MoeRLError
from moe_rl.models.hf import ModelFacts
from moe_rl.rollout.batches import Batches, PromptGroup, choose, digest_of, discarded, recorded
from moe_rl.rollout.colocated import start_engines
from moe_rl.rollout.episodes import Draw, Episodes, draws_of
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch, SampledStep, shard_name, shards_of
from moe_rl.rollout.pass_rates import PromptResult, eval_metrics
from moe_rl.rollout.sampler import Blocking, Sampler, sample_all
from moe_rl.rollout.trajectories import EpisodePlayer
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.tasks.tokenizer import stop_tokens
from moe_rl.tasks.verifiers import Judging, VerifierPool
from moe_rl.trace import TraceStore
from moe_rl.types import Completion, GenerateRequest, Prompt, Verdict
from moe_rl.vllm.wire import EngineSettings

Environment = Callable[[Config, ModelFacts, Sampler, Path], EpisodePlayer]
"""Makes the player of a run's episodes. The gateway has it, as this room may not import that one."""


def start_sampler(config: Config, facts: ModelFacts, run_dir: Path) -> Sampler:
    """Start the vLLM engines, or connect to the configured servers. Call it from the main thread.

    Raises:
        EngineError: An engine does not start, or a server does not see the run's folder.
        SamplerGone: A server does not answer.
    """
    if config.rollout.servers:
        return ServerFleet.attach(config, run_dir / "trace")
    return start_engines(engine_settings(config, facts, run_dir), config.rollout.engines)


def engine_settings(config: Config, facts: ModelFacts, run_dir: Path) -> EngineSettings:
    """Return the settings that the run's engines start with. Their trace and logs go into the run folder."""
    rollout = config.rollout
    return EngineSettings(
        model_path=config.model.path,
        dtype=rollout.dtype,
        max_model_len=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        max_concurrent=rollout.max_concurrent,
        kv_cache_mib=rollout.kv_cache_mib,
        trace_root=run_dir / "trace",
        model_fingerprint=facts.fingerprint,
        log_path=run_dir / "engine.log",
        startup_timeout_seconds=rollout.startup_timeout_seconds,
        seed=config.run.seed,
        silence_seconds=config.run.peer_timeout_seconds,
        capture=rollout.capture,
        support=rollout.keep_sampling_mask,
        router_logits_fraction=rollout.router_logits_fraction,
        head=config.objective.score_centering or 0,
        sleeps=rollout.sleep_level > 0,
        reads_text=config.reads_text,
        yields=config.pipeline.mode != "sync",
        cuda_graphs=bool(rollout.cuda_graphs),
        passed=rollout.vllm,
    )


@dataclass(frozen=True, slots=True)
class Unjudged:
    """Holds a step whose completions are sampled and perhaps not all judged.

    Attributes:
        prompts: those of all rounds so far.
        judging: each round's verdicts, begun already; empty for episodes, which come with their verdicts.
    """

    step: int
    sampled: SampledStep
    prompts: list[Prompt] = field(default_factory=list)
    judging: list[Judging] = field(default_factory=list)


class Rollouts:
    """Owns the prompts, and the verifiers or the environment, and calls the sampler. Exists in one process of a run.

    Attributes:
        verifiers: judge completions, if there is no environment.
        episodes: makes episode requests, if there is an environment.
        player: plays the episodes.
    """

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        task: TaskPrompts,
        sampler: Sampler,
        verifiers: VerifierPool | None,
        run_dir: Path,
        store: TraceStore,
        player: EpisodePlayer | None = None,
    ):
        """verifiers: None if there is an environment. player: None if there is none."""
        self.config, self.sampler, self.store = config, sampler, store
        if verifiers is not None:
            self.verifiers = verifiers
        self.player = player
        self.episodes = None if config.task.environment is None else Episodes(config)
        self.stop_tokens = stop_tokens(config, facts)
        self.batches = Batches(config, task.codec, run_dir / "trace")
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger.of_run(run_dir, config.pipeline)
        self.kept = KeptRollouts(run_dir / "rollouts", store)
        self.heldout = task.evaluated(config)

    @classmethod
    def start(
        cls,
        config: Config,
        facts: ModelFacts,
        task: TaskPrompts,
        run_dir: Path,
        stack: ExitStack,
        environment: Environment | None,
    ) -> Self:
        """Start the sampler, and the verifiers or the player, until `stack` is left. Call it from the main thread.

        Args:
            environment: needed if the config has one.
        """
        store, player, verifiers = TraceStore(run_dir / "trace"), None, None
        if config.task.environment is None:
            verifiers = stack.enter_context(VerifierPool.of(config.task))
        sampler = stack.enter_context(closing(start_sampler(config, facts, run_dir)))
        if config.task.environment is not None:
            assert environment is not None  # given by whoever starts a run with one
            player = environment(config, facts, sampler, run_dir)
        return cls(config, facts, task, sampler, verifiers, run_dir, store, player)

    async def open(self) -> None:
        """Begin to serve episodes, in this event loop."""
        if self.player is not None:
            await self.player.open()

    async def close(self) -> None:
        """End all episodes."""
        if self.player is not None:
            await self.player.close()

    async def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Collect the batch of a step, and keep it on disk with its routes."""
        return await self.keep(await self.sample(step, clock), clock)

    async def keep(self, unjudged: Unjudged, clock: Clock) -> RolloutBatch:
        """Wait for the verdicts of a sampled step, and keep its batch on disk with its routes."""
        batch = await self.judge(unjudged, clock)
        self.store.check_published(shards_of(batch.sequences))
        self.kept.save(unjudged.step, batch)
        return batch

    async def sample(self, step: int, clock: Clock) -> Unjudged:
        """Sample the completions of a step, and record its prompts in the prompt ledger.

        Judging has begun on return. Rounds that decide whether another round follows are already judged.
        """
        if (before := self.kept.sampled(step)) is not None:
            unjudged = self._judged_again(step, before)
        else:
            unjudged = await self._sampled(step, clock)
        sampled = unjudged.sampled
        prompts = range(sampled.first, sampled.first + sampled.prompts)
        ids = [prompt.id for prompt in unjudged.prompts]
        self.ledger.record(step - 1, prompts, ids, sampled.digest)
        return unjudged

    async def judge(self, unjudged: Unjudged, clock: Clock) -> RolloutBatch:
        """Wait for the verdicts of a sampled step, and choose the groups to train on. The next step may be sampled
        meanwhile."""
        rollout = self.config.rollout
        groups = await self._groups(unjudged, clock)
        discards = rollout.dynamic_sampling_rounds > 1
        chosen = choose(groups, rollout.prompts_per_step) if discards else groups
        batch = self.batches.make(unjudged.step, groups, chosen)
        batch.metrics.update(unjudged.sampled.metrics)
        if discards:
            lacking = rollout.prompts_per_step - sum(group.informative for group in groups)
            batch.metrics.update(discarded(len(groups), len(chosen), max(0, lacking)))
        return batch

    async def _sampled(self, step: int, clock: Clock) -> Unjudged:
        """Sample the groups of a step in rounds. Keep them on disk if the weights may be gone when they are judged."""
        rollout, before = self.config.rollout, await self.sampler.counts()
        sampled = SampledStep(self.ledger.ended(step - 1).floor, [], {}, "")
        unjudged = Unjudged(step, sampled)
        for number in range(rollout.dynamic_sampling_rounds):
            await self._round(unjudged, number, clock)
            if number + 1 == rollout.dynamic_sampling_rounds:
                break  # no round follows, whatever the verdicts
            if sum(group.informative for group in await self._groups(unjudged, clock)) >= rollout.prompts_per_step:
                break
        played = [[trajectory.whole for trajectory in group] for group in sampled.trajectories]
        flat = [completion for group in played or sampled.completions for completion in group]
        sampled.digest = digest_of(flat)
        sampled.metrics |= {
            "throughput/sampled_tokens_per_second": sum(len(c.token_ids) for c in flat) / clock.seconds["sample"],
            **recorded(before, await self.sampler.counts()),
            **self.lost_servers(),
        }
        if self.config.pipeline.ahead:
            self.store.check_published(shards_of(sampled.sequences))
            self.kept.save_sampled(step, sampled)
        return unjudged

    def _judged_again(self, step: int, sampled: SampledStep) -> Unjudged:
        """Begin judging the completions that an earlier process of this run sampled for a step."""
        unjudged = Unjudged(step, sampled, list(self.source.at(sampled.first, sampled.prompts)))
        if not sampled.trajectories:
            judging = self.verifiers.judging()
            repeated = [(p, c) for p, group in zip(unjudged.prompts, sampled.completions, strict=True) for c in group]
            for index, (prompt, completion) in enumerate(repeated):
                judging.add(index, self.batches.item(prompt, completion))
            judging.calls()
            unjudged.judging.append(judging)
        return unjudged

    def lost_servers(self) -> dict[str, int]:
        """Return how many servers are lost, as a metric; nothing for an engine."""
        return {"rollout/lost_servers": len(self.sampler.lost)} if self.config.rollout.servers else {}

    async def _round(self, unjudged: Unjudged, number: int, clock: Clock) -> None:
        """Sample one round of prompts of a step, and begin to judge the completions. number: the round's, from 0."""
        step, sampled, done = unjudged.step, unjudged.sampled, len(unjudged.prompts)
        rollout, size = self.config.rollout, self.config.rollout.group_size
        prompts = self.source.at(sampled.first + done, rollout.prompts_per_step)
        unjudged.prompts.extend(prompts)
        members = range(0, len(prompts) * size, size)
        if self.episodes is not None:
            assert self.player is not None
            with clock("sample"):
                played = await self.player.play(self.episodes.round(step, number, prompts, first=done))
            sampled.trajectories.extend(played[start : start + size] for start in members)
            return
        requests = [
            self.request(f"s{step}/p{p}/c{c}", prompt.token_ids, rollout.temperature)
            for p, prompt in enumerate(prompts, start=done)
            for c in range(size)
        ]
        repeated = [prompt for prompt in prompts for _ in range(size)]
        with clock("sample"):
            completions, judging = await self._answered(repeated, requests, shard_name(step, number))
        sampled.completions.extend(completions[start : start + size] for start in members)
        unjudged.judging.append(judging)

    async def _groups(self, unjudged: Unjudged, clock: Clock) -> list[PromptGroup]:
        """Wait for all verdicts of a step, and return its judged groups."""
        sampled, all_verdicts = unjudged.sampled, list[Verdict]()
        with clock("reward"):
            for judging in unjudged.judging:
                with judging:
                    all_verdicts += await judging.awaited()
            if sampled.trajectories:
                played = zip(unjudged.prompts, sampled.trajectories, strict=True)
                return [self.batches.played(n, *group) for n, group in enumerate(played)]
            verdicts, groups = iter(all_verdicts), zip(unjudged.prompts, sampled.completions, strict=True)
            return [
                self.batches.group(n, prompt, [[c] for c in completions], list(islice(verdicts, len(completions))))
                for n, (prompt, completions) in enumerate(groups)
            ]

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return pass rates on held-out prompts, as each source requests them. Prompts and seeds are the same at every
        call. Groups may be sampled meanwhile in mode async."""
        passed: list[list[list[bool | None]]] = []
        for kind, draws in zip(("sampled", "greedy"), draws_of(self.heldout, self.config.rollout), strict=True):
            prompts = [self.heldout[draw.place][1] for draw in draws]
            if self.episodes is not None:
                assert self.player is not None
                asked = [self.episodes.evaluation(kind, *drawn) for drawn in zip(draws, prompts, strict=True)]
                verdicts = [trajectory.verdict for trajectory in await self.player.play(asked)]
            else:
                requests = [self._held_out(kind, *drawn) for drawn in zip(draws, prompts, strict=True)]
                _, judging = await self._answered(prompts, requests, f"eval-{kind}-step{step:06d}")
                with judging:
                    verdicts = await judging.awaited()
            passed.append([[] for _ in self.heldout])
            for draw, verdict in zip(draws, verdicts, strict=True):
                passed[-1][draw.place].append(self.batches.passes(verdict))
        return eval_metrics(
            [
                PromptResult(source, prompt.level, samples or at_zero, at_zero)
                for (source, prompt), samples, at_zero in zip(self.heldout, *passed, strict=True)
            ]
        )

    def _held_out(self, kind: str, draw: Draw, prompt: Prompt) -> GenerateRequest:
        """Return a request of an evaluation. No step trains on its completion, so its routes are not recorded."""
        key = f"eval/{kind}/p{draw.place}" + (f"/c{draw.sample}" if draw.sample else "")
        request = self.request(key, prompt.token_ids, draw.drawing.temperature)
        return replace(request, top_p=draw.drawing.top_p, record=False)

    def request(self, key: str, prompt_token_ids: tuple[int, ...], temperature: float) -> GenerateRequest:
        """Return a request of the run, see `generate_request`."""
        return generate_request(self.config, key, prompt_token_ids, self.stop_tokens, temperature)

    async def _answered(
        self, prompts: Seq[Prompt], requests: Seq[GenerateRequest], shard: str
    ) -> tuple[list[Completion], Judging]:
        """Sample completions, and begin judging each while others are still sampled.

        Args:
            prompts: the prompt of each request.
        """
        with ExitStack() as stack:
            judging = stack.enter_context(self.verifiers.judging())

            def ended(index: int, completion: Completion) -> None:
                judging.add(index, self.batches.item(prompts[index], completion))

            never = asyncio.Event() if self.config.pipeline.by_group else None
            completions = await sample_all(
                self.sampler,
                requests,
                shard=shard,
                leave=never,
                ended=ended,
                in_flight=self.config.rollout.in_flight,
            )
            judging.calls()
            stack.pop_all()
        return completions, judging


class OwnRollouts:
    """Gives rank 0 the batches of `Rollouts` that it has itself. Use as a context manager.

    Attributes:
        engine: makes the sampler's calls.
        left_behind: the batch of the next step, if an earlier process of this run sampled it.
        unusable: messages about an earlier process's rollouts that are sampled again; always empty.
    """

    def __init__(self, rollouts: Rollouts):
        self.rollouts, self.engine = rollouts, Blocking(rollouts.sampler)
        self.source, self.ledger, self.kept = rollouts.source, rollouts.ledger, rollouts.kept
        self.left_behind: RolloutBatch | None = None
        self.unusable: list[str] = []

    def __enter__(self) -> Self:
        self.engine.run(self.rollouts.open())
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(MoeRLError):  # a call has raised it already
            self.engine.run(self.rollouts.close())

    def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Sample and judge the batch of a step, unless an earlier process of this run has done so."""
        batch, self.left_behind = self.left_behind, None
        if batch is not None:
            clock.seconds |= {"sample": 0.0, "reward": 0.0}
            return batch
        return self.engine.run(self.rollouts.take(step, clock))

    def settle(self, clock: Clock) -> None:
        """Do nothing: nothing is sampled during training."""

    def retain(self, steps: Container[int]) -> None:
        """Delete the kept rollouts of all steps but these, with their trace shards."""
        self.kept.retain(steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation, see Rollouts.evaluate."""
        return self.engine.run(self.rollouts.evaluate(step))


def canary_runs(config: Config, task: TaskPrompts) -> list[tuple[int, ...]]:
    """Return the token runs that sampler and trainer both score after every weight sync.

    The runs are cut from the held-out prompts laid end to end. A run has at most 64 tokens, or fewer if the sampler's
    limit is lower; all runs together have at most 256 tokens.
    """
    limit = min(64, config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens - 1)
    tokens = sum((prompt.token_ids for _, prompt in task.evaluated(config)[:256]), ())[: 256 // limit * limit]
    return [run for start in range(0, len(tokens), limit) if len(run := tokens[start : start + limit]) > 1]


def generate_request(
    config: Config, key: str, prompt_token_ids: tuple[int, ...], stop_tokens: tuple[int, ...], temperature: float
) -> GenerateRequest:
    """Build a request of the run.

    Its random seed is derived from the run's seed and `key` only, so the completion does not depend on when the request
    is decoded or on what else is in the batch. Without rollout.request_seeds it has none. Greedy requests (temperature
    0) do not use top-k, top-p or min-p.
    """
    rollout = config.rollout
    top_k, top_p, min_p = (rollout.top_k, rollout.top_p, rollout.min_p) if temperature else (0, 1.0, 0.0)
    return GenerateRequest(
        key=key,
        prompt_token_ids=prompt_token_ids,
        seed=xxhash.xxh3_64_intdigest(f"{config.run.seed}/{key}".encode()) >> 1 if rollout.request_seeds else None,
        temperature=temperature,
        max_tokens=rollout.max_completion_tokens,
        stop_token_ids=stop_tokens,
        stop=rollout.stop,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
