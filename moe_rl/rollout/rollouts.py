"""Does the sampling half of a step: samples completions for prompts and verifies them. Also starts the sampler: a vLLM
engine in a child process, or the servers that the config names."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import xxhash

from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.models.hf import ModelFacts
from moe_rl.rollout.batches import Batches, PromptGroup, choose, digest_of, discarded, recorded
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch, shard_name, shards_of
from moe_rl.rollout.pass_rates import PromptResult, eval_metrics
from moe_rl.rollout.sampler import Sampler
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.tasks.tokenizer import stop_tokens
from moe_rl.tasks.verifiers import VerifierPool
from moe_rl.trace import TraceStore
from moe_rl.types import Completion, GenerateRequest, Prompt, Verdict
from moe_rl.vllm.wire import EngineSettings

Asked = tuple[int, GenerateRequest]
"""A request of an evaluation, with the place of its held-out prompt."""

EVALUATED = ("eval-sampled", "eval-greedy")


def start_sampler(config: Config, facts: ModelFacts, run_dir: Path) -> Sampler:
    """Start the vLLM engine, or connect to the configured servers. Call it on rank 0, from the main thread.

    Raises:
        EngineError: The engine does not start, or a server does not answer.
    """
    if config.rollout.servers:
        return ServerFleet.attach(config, run_dir / "trace")
    return VllmEngine(engine_settings(config, facts, run_dir))


def engine_settings(config: Config, facts: ModelFacts, run_dir: Path) -> EngineSettings:
    """Return the settings that the run's engine starts with. Its trace and its log go into the run folder."""
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
        reads_text=bool(rollout.stop),
    )


class Rollouts:
    """Owns the prompts and the verifiers, and calls the sampler. One process of a run has it.

    Attributes:
        left_behind: the batch of the next step, if an earlier process of this run sampled it.
        unusable: what an earlier process has left and is sampled again, as messages.
    """

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        task: TaskPrompts,
        engine: Sampler,
        verifiers: VerifierPool,
        run_dir: Path,
        store: TraceStore,
    ):
        self.config, self.engine, self.verifiers, self.store = config, engine, verifiers, store
        self.stop_tokens = stop_tokens(config, facts)
        self.batches = Batches(config, task.codec, run_dir / "trace")
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger.of_run(run_dir, config.pipeline)
        self.kept = KeptRollouts(run_dir / "rollouts", store)
        self.heldout = task.evaluated(config)
        self.left_behind: RolloutBatch | None = None
        self.unusable: list[str] = []

    def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Collect the batch of a step, and keep it on disk with its routes."""
        batch, self.left_behind = self.left_behind, None
        if batch is not None:
            clock.seconds |= {"sample": 0.0, "reward": 0.0}
            return batch
        batch = self.collect(step, clock)
        self.store.check_published(shards_of(batch.sequences))
        self.kept.save(step, batch)
        return batch

    def collect(self, step: int, clock: Clock) -> RolloutBatch:
        """Sample and verify the groups of one step, record them in the prompt ledger, and choose those to train on."""
        rollout, before = self.config.rollout, self.engine.counts()
        first = self.ledger.ended(step - 1).floor
        groups: list[PromptGroup] = []
        shards: list[str] = []
        lacking = rollout.prompts_per_step
        while lacking > 0 and len(shards) < rollout.dynamic_sampling_rounds:
            shards.append(shard_name(step, len(shards)))
            groups += self._sample(step, first, len(groups), shards[-1], clock)
            lacking = rollout.prompts_per_step - sum(group.informative for group in groups)
        digest = digest_of([c for group in groups for c in group.completions])
        ids = [group.prompt.id for group in groups]
        self.ledger.record(step - 1, range(first, first + len(groups)), ids, digest)
        discards = rollout.dynamic_sampling_rounds > 1
        chosen = choose(groups, rollout.prompts_per_step) if discards else groups
        batch = self.batches.make(step, groups, chosen)
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        batch.metrics["throughput/sampled_tokens_per_second"] = tokens / clock.seconds["sample"]
        if discards:
            batch.metrics.update(discarded(len(groups), len(chosen), max(0, lacking)))
        batch.metrics.update(recorded(before, self.engine.counts()))
        batch.metrics.update(self.lost_servers())
        return batch

    def lost_servers(self) -> dict[str, int]:
        """Return how many servers are lost, as a metric; nothing for an engine."""
        return {"rollout/lost_servers": len(self.engine.lost)} if isinstance(self.engine, ServerFleet) else {}

    def _sample(self, step: int, cursor: int, done: int, shard: str, clock: Clock) -> list[PromptGroup]:
        """Sample and verify one round of prompts of a step.

        Args:
            cursor: the place of the step's first prompt in the order of all prompts.
            done: how many groups the earlier rounds gave.
        """
        rollout = self.config.rollout
        prompts = self.source.at(cursor + done, rollout.prompts_per_step)
        requests = [
            self.request(f"s{step}/p{p}/c{c}", prompt.token_ids, rollout.temperature)
            for p, prompt in enumerate(prompts, start=done)
            for c in range(rollout.group_size)
        ]
        repeated = [prompt for prompt in prompts for _ in range(rollout.group_size)]
        completions, verdicts = self._judged(repeated, requests, shard, clock)
        members = [slice(start, start + rollout.group_size) for start in range(0, len(requests), rollout.group_size)]
        return [
            self.batches.group(number, prompt, [[one] for one in completions[of]], verdicts[of])
            for number, (prompt, of) in enumerate(zip(prompts, members, strict=True), start=done)
        ]

    def settle(self, clock: Clock) -> None:
        """Do nothing: nothing is sampled beside training."""

    def retain(self, steps: Container[int]) -> None:
        """Delete the kept rollouts of all steps but these, with their trace shards."""
        self.kept.retain(steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return pass rates on held-out prompts, as each source asks for them. Prompts and seeds are the same at every
        call."""
        answers = []
        for name, asked in zip(EVALUATED, self.evaluation(), strict=True):
            places, requests = [place for place, _ in asked], [one for _, one in asked]
            prompts = [self.heldout[place][1] for place in places]
            answers.append((places, self._judged(prompts, requests, f"{name}-step{step:06d}", Clock())[1]))
        return self.rates(answers)

    def evaluation(self) -> list[list[Asked]]:
        """Return the requests of an evaluation for sampled completions and for greedy ones. Nothing trains on what they
        give, so it is not recorded."""
        rollout = self.config.rollout
        sampled: list[Asked] = []
        greedy: list[Asked] = []
        for p, (source, prompt) in enumerate(self.heldout):
            temperature = rollout.temperature if source.temperature is None else source.temperature
            if temperature:
                top_p = rollout.top_p if source.top_p is None else source.top_p
                for c in range(source.samples):
                    key = f"eval/sampled/p{p}" + (f"/c{c}" if c else "")
                    sampled.append((p, replace(self.request(key, prompt.token_ids, temperature), top_p=top_p)))
            if source.greedy or not temperature:
                greedy.append((p, self.request(f"eval/greedy/p{p}", prompt.token_ids, 0.0)))
        return [[(p, replace(request, record=False)) for p, request in asked] for asked in (sampled, greedy)]

    def rates(self, answers: Seq[tuple[Seq[int], Seq[Verdict]]]) -> dict[str, float]:
        """Return the metrics of an evaluation.

        Args:
            answers: for sampled and for greedy completions, the places of their held-out prompts, and their verdicts.
        """
        passed: list[list[list[bool | None]]] = []
        for places, verdicts in answers:
            passed.append([[] for _ in self.heldout])
            for place, verdict in zip(places, verdicts, strict=True):
                passed[-1][place].append(self.batches.passes(verdict))
        return eval_metrics(
            [
                PromptResult(source, prompt.level, samples or at_zero, at_zero)
                for (source, prompt), samples, at_zero in zip(self.heldout, *passed, strict=True)
            ]
        )

    def request(self, key: str, prompt_token_ids: tuple[int, ...], temperature: float) -> GenerateRequest:
        """Return a request of the run, see `generate_request`."""
        return generate_request(self.config, key, prompt_token_ids, self.stop_tokens, temperature)

    def _judged(
        self, prompts: Seq[Prompt], requests: Seq[GenerateRequest], shard: str, clock: Clock
    ) -> tuple[list[Completion], list[Verdict]]:
        """Sample completions, and have each judged while others are still sampled.

        Args:
            prompts: of each request.
        """
        with self.verifiers.judging() as judging:

            def ended(at: int, completion: Completion) -> None:
                judging.add(at, self.batches.item(prompts[at], completion))

            with clock("sample"):
                completions = self.engine.generate(requests, shard=shard, ended=ended)
            with clock("reward"):
                return completions, judging.verdicts()


def canary_runs(config: Config, task: TaskPrompts) -> list[tuple[int, ...]]:
    """Return the token runs that sampler and trainer both score after every weight sync.

    The runs are cut from the held-out prompts laid end to end. A run has at most 64 tokens, or fewer if the sampler's
    limit is lower; all runs together have at most 256 tokens.
    """
    limit = min(64, config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens - 1)
    tokens = sum((prompt.token_ids for _, prompt in task.evaluated(config)[:256]), ())[: 256 // limit * limit]
    return [run for at in range(0, len(tokens), limit) if len(run := tokens[at : at + limit]) > 1]


def generate_request(
    config: Config, key: str, prompt_token_ids: tuple[int, ...], stop_tokens: tuple[int, ...], temperature: float
) -> GenerateRequest:
    """Build a request of the run.

    Its random seed is derived from the run's seed and `key` only, so the completion does not depend on when the request
    is decoded or on what else is in the batch. Greedy requests (temperature 0) do not use top-k, top-p or min-p.
    """
    rollout = config.rollout
    top_k, top_p, min_p = (rollout.top_k, rollout.top_p, rollout.min_p) if temperature else (0, 1.0, 0.0)
    return GenerateRequest(
        key=key,
        prompt_token_ids=prompt_token_ids,
        seed=xxhash.xxh3_64_intdigest(f"{config.run.seed}/{key}".encode()) >> 1,
        temperature=temperature,
        max_tokens=rollout.max_completion_tokens,
        stop_token_ids=stop_tokens,
        stop=rollout.stop,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
