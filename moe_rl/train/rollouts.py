"""Does the sampling half of a step, on rank 0: sample completions for prompts, verify them, and turn them into
sequences with rewards. Also starts the sampler: a vLLM engine in a child process, or the servers that the config
names."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from moe_rl.config.schema import Config
from moe_rl.errors import RewardError, describe
from moe_rl.models.hf import ModelFacts
from moe_rl.objectives.advantages import has_spread, overlong_penalty
from moe_rl.report.metric import QUANTILES
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.sampler import Sampler
from moe_rl.tasks import prompt_ledger
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.tasks.tokenizer import stop_tokens
from moe_rl.tasks.verifiers import RewardItem, VerifierPool, check_failed_fraction
from moe_rl.trace import TraceStore
from moe_rl.train.kept import KeptSample, RolloutBatch, shard_name
from moe_rl.train.pass_rates import PromptResult, eval_metrics
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step_metrics import Clock
from moe_rl.types import Completion, GenerateRequest, Prompt, Sequence, Verdict
from moe_rl.vllm.wire import EngineSettings


def start_sampler(config: Config, facts: ModelFacts, folder: RunFolder) -> Sampler:
    """Start the vLLM engine, or connect to the configured servers. Call it on rank 0, from the main thread.

    Raises:
        EngineError: The engine does not start, or a server does not answer.
    """
    if config.rollout.servers:
        return ServerFleet.attach(config, folder.trace)
    return VllmEngine.start(engine_settings(config, facts, folder))


def engine_settings(config: Config, facts: ModelFacts, folder: RunFolder) -> EngineSettings:
    """Return the settings that the run's engine starts with. Its trace and its log go into the run folder."""
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
        reads_text=bool(rollout.stop),
    )


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Holds the completions of one prompt with their verdicts and rewards.

    Attributes:
        number: Index of the prompt within its step.
        rewards: One per completion; None where verification failed.
    """

    number: int
    prompt: Prompt
    completions: Seq[Completion]
    verdicts: Seq[Verdict]
    rewards: Seq[float | None]

    @property
    def scored(self) -> int:
        """Return the number of completions that have a reward."""
        return sum(reward is not None for reward in self.rewards)

    @property
    def informative(self) -> bool:
        """Return whether the rewards differ, so that group-relative advantages are not all zero."""
        return has_spread(self.rewards)


def choose(groups: Seq[PromptGroup], wanted: int) -> list[PromptGroup]:
    """Choose the first `wanted` groups whose rewards differ, or all such groups if there are fewer.

    If no group has differing rewards, choose the first `wanted` groups that have a reward at all. The step is then
    measured as usual, but objectives that compare rewards within a group learn nothing from it.
    """
    informative = [group for group in groups if group.informative]
    return (informative or [group for group in groups if group.scored])[:wanted]


class Rollouts:
    """Owns the prompts and the verifiers, and calls the sampler. Exists on rank 0 only."""

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
        self.trace_root = run_dir / "trace"
        self.stop_tokens = stop_tokens(config, facts)
        self.codec = task.codec
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger(run_dir / prompt_ledger.FILE)
        self.heldout = task.evaluated(config)

    def collect(self, step: int, clock: Clock) -> RolloutBatch:
        """Sample and verify the groups of one step, record them in the prompt ledger, and choose those to train on."""
        rollout, cursor, before = self.config.rollout, self.source.cursor, self._witnessed()
        groups: list[PromptGroup] = []
        shards: list[str] = []
        lacking = rollout.prompts_per_step
        while lacking > 0 and len(shards) < rollout.dynamic_sampling_rounds:
            shards.append(shard_name(step, len(shards)))
            groups += self._sample(step, len(groups), shards[-1], clock)
            lacking = rollout.prompts_per_step - sum(group.informative for group in groups)
        completions = [c for group in groups for c in group.completions]
        verdicts = [v for group in groups for v in group.verdicts]
        digest = _digest(completions)
        self.ledger.record(step - 1, cursor, [group.prompt.id for group in groups], digest)
        check_failed_fraction(verdicts, self.config.task.max_failed_fraction)
        metrics = self._metrics(completions, verdicts, clock)
        chosen = groups
        if rollout.dynamic_sampling_rounds > 1:
            chosen = choose(groups, rollout.prompts_per_step)
            metrics |= {
                "group/sampled": len(groups),
                "group/discarded": len(groups) - len(chosen),
                "group/lacking": max(0, lacking),
            }
        trained = [
            (group, index, reward)
            for group in chosen
            for index, reward in enumerate(group.rewards)
            if reward is not None
        ]
        sequences = [Sequence.of(group.completions[index], reward) for group, index, reward in trained]
        if self.config.task.overlong is not None:
            metrics["reward/overlong_penalty"] = _mean([self._overlong(c) for c in completions])
        recorded = [completion.routes for completion in completions if completion.routes is not None]
        written = {part.shard for routes in recorded for part in routes.parts}
        trace_bytes = sum((self.trace_root / f"{shard}.safetensors").stat().st_size for shard in written)
        same = sum(group.scored > 1 and not group.informative for group in groups)
        metrics |= {
            "trace/bytes": trace_bytes,
            "trace/bytes_per_token": trace_bytes / sum(routes.rows for routes in recorded),
            "rollout/witnessed_rows": max(0, self._witnessed() - before),
            "group/zero_variance": same,
            "group/zero_variance_fraction": same / len(groups),
        }
        drawn = np.random.default_rng([self.config.run.seed, step]).permutation(len(trained))
        shown = [trained[i] for i in sorted(drawn[: self.config.report.samples_per_step])]
        samples = [self._sample_of(group, index) for group, index, _ in shown]
        return RolloutBatch(sequences, [group.number for group, *_ in trained], metrics, digest, samples)

    def _sample_of(self, group: PromptGroup, index: int) -> KeptSample:
        """Return what samples.jsonl shows of a completion."""
        completion = group.completions[index]
        return KeptSample(
            key=completion.key,
            prompt=group.prompt.text,
            completion=self.codec.text(completion),
            pieces=[self.codec.decode([token]) for token in completion.token_ids],
            parts=group.verdicts[index].parts,
            finish_reason=completion.finish_reason,
        )

    def _witnessed(self) -> int:
        return self.engine.counts().get("witnessed", 0)

    def _sample(self, step: int, first: int, shard: str, clock: Clock) -> list[PromptGroup]:
        """Sample and verify one round of prompts. Group numbers start at `first`."""
        rollout = self.config.rollout
        prompts = self.source.take(rollout.prompts_per_step)
        requests = [
            self._request(f"s{step}/p{p}/c{c}", prompt, rollout.temperature)
            for p, prompt in enumerate(prompts, start=first)
            for c in range(rollout.group_size)
        ]
        with clock("sample"):
            completions = self.engine.generate(requests, shard=shard)
        with clock("reward"):
            verdicts = self._judge([p for p in prompts for _ in range(rollout.group_size)], completions)
        members = [slice(start, start + rollout.group_size) for start in range(0, len(requests), rollout.group_size)]
        return [
            PromptGroup(
                number,
                prompt,
                completions[of],
                verdicts[of],
                [
                    v.reward + self._overlong(c) if v.reward is not None else None
                    for c, v in zip(completions[of], verdicts[of], strict=True)
                ],
            )
            for number, (prompt, of) in enumerate(zip(prompts, members, strict=True), start=first)
        ]

    def _overlong(self, completion: Completion) -> float:
        overlong, limit = self.config.task.overlong, self.config.rollout.max_completion_tokens
        if overlong is None:
            return 0.0
        return overlong_penalty(
            len(completion.token_ids), limit=limit, cache=overlong.cache_tokens, penalty=overlong.penalty
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Return pass rates on held-out prompts, as each source asks for them. Prompts and seeds are the same at every
        call."""
        rollout = self.config.rollout
        sampled: list[tuple[int, GenerateRequest]] = []
        greedy: list[tuple[int, GenerateRequest]] = []
        for p, (source, prompt) in enumerate(self.heldout):
            temperature = rollout.temperature if source.temperature is None else source.temperature
            if temperature:
                top_p = rollout.top_p if source.top_p is None else source.top_p
                for c in range(source.samples):
                    key = f"eval/sampled/p{p}" + (f"/c{c}" if c else "")
                    sampled.append((p, replace(self._request(key, prompt, temperature), top_p=top_p)))
            if source.greedy or not temperature:
                greedy.append((p, self._request(f"eval/greedy/p{p}", prompt, 0.0)))
        passed = self._passed(sampled, f"eval-sampled-step{step:06d}")
        passed_greedy = self._passed(greedy, f"eval-greedy-step{step:06d}")
        return eval_metrics(
            [
                PromptResult(source, prompt.level, samples or at_zero, at_zero)
                for (source, prompt), samples, at_zero in zip(self.heldout, passed, passed_greedy, strict=True)
            ]
        )

    def _passed(self, asked: Seq[tuple[int, GenerateRequest]], shard: str) -> list[list[bool | None]]:
        """Send requests, each with the place of its held-out prompt. Return for every such prompt which of its
        completions passed."""
        passed: list[list[bool | None]] = [[] for _ in self.heldout]
        if not asked:
            return passed
        # Nothing trains on these completions.
        completions = self.engine.generate([replace(one, record=False) for _, one in asked], shard=shard)
        verdicts = self._judge([self.heldout[p][1] for p, _ in asked], completions)
        for (p, _), verdict in zip(asked, verdicts, strict=True):
            passed[p].append(self._passes(verdict))
        return passed

    def canary_runs(self) -> list[tuple[int, ...]]:
        """Return the token runs that sampler and trainer both score after every weight sync.

        The runs are cut from the held-out prompts laid end to end. A run has at most 64 tokens, or fewer if the
        sampler's limit is lower; all runs together have at most 256 tokens.
        """
        limit = min(64, self.config.rollout.max_prompt_tokens + self.config.rollout.max_completion_tokens - 1)
        tokens = sum((prompt.token_ids for _, prompt in self.heldout[:256]), ())[: 256 // limit * limit]
        return [run for at in range(0, len(tokens), limit) if len(run := tokens[at : at + limit]) > 1]

    def _request(self, key: str, prompt: Prompt, temperature: float) -> GenerateRequest:
        return generate_request(self.config, key, prompt.token_ids, self.stop_tokens, temperature)

    def _judge(self, prompts: Seq[Prompt], completions: Seq[Completion]) -> list[Verdict]:
        return self.verifiers.score(
            [
                RewardItem(
                    prompt=p.text,
                    completion=self.codec.text(c),
                    columns=p.columns,
                    finish_reason=c.finish_reason,
                    stop_token_id=c.stop_token_id,
                    stop_string=c.stop_string,
                    completion_token_ids=c.text_token_ids,
                    messages=p.messages,
                )
                for p, c in zip(prompts, completions, strict=True)
            ]
        )

    def _passes(self, verdict: Verdict) -> bool | None:
        return verdict.parts[self.config.task.pass_reward] == 1.0 if verdict.scored else None

    def _metrics(self, completions: Seq[Completion], verdicts: Seq[Verdict], clock: Clock) -> dict[str, float]:
        scored = [v for v in verdicts if v.scored]
        if not scored:
            raise RewardError(
                describe(
                    "no completion of a step could be verified", got=verdicts[0].detail, do="fix the reward functions"
                )
            )
        lengths = [len(c.token_ids) for c in completions]
        tokens = sum(lengths)
        return {
            "reward/mean": _mean([v.reward for v in scored]),
            **_quantiles("reward/quantile", [v.reward for v in scored if v.reward is not None]),
            "reward/pass_rate": _mean([self._passes(v) for v in scored]),
            "reward/failed_verdicts": len(verdicts) - len(scored),
            **{f"reward/part/{name}": _mean([v.parts[name] for v in scored]) for name in self.config.task.rewards},
            "rollout/sequences": len(completions),
            "rollout/completion_tokens_mean": tokens / len(completions),
            **_quantiles("rollout/completion_tokens_quantile", lengths),
            "rollout/truncated_fraction": _mean([float(c.finish_reason == "length") for c in completions]),
            "rollout/weight_version": max(c.newest_version for c in completions),
            **({"rollout/lost_servers": len(self.engine.lost)} if isinstance(self.engine, ServerFleet) else {}),
            "throughput/sampled_tokens_per_second": tokens / clock.seconds["sample"],
        }


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


def _mean(values: Seq[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")


def _quantiles(family: str, values: Seq[float]) -> dict[str, float]:
    """Return the members of a family of metrics: the values below which 5, 25, 50, 75 and 95% lie."""
    found = np.percentile(values, QUANTILES)
    return {f"{family}/p{part:02d}": float(value) for part, value in zip(QUANTILES, found, strict=True)}


def _digest(completions: Seq[Completion]) -> str:
    digest = xxhash.xxh3_64()
    for completion in completions:
        digest.update(np.asarray(completion.token_ids, dtype="<i4").tobytes())
        digest.update(completion.logprobs.tobytes())
    return digest.hexdigest()
