"""The sampling half of the loop, on rank 0: prompts -> completions -> verdicts -> sequences with advantages."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from moe_rl.config.hf import ModelFacts
from moe_rl.config.schema import Config
from moe_rl.data.ledger import PromptLedger
from moe_rl.data.prompts import PromptSource, TextCodec, load_prompts
from moe_rl.errors import RewardError, describe
from moe_rl.objectives.advantages import group_advantages
from moe_rl.rewards.pool import RewardItem, VerifierPool, check_failed_fraction
from moe_rl.rollout.engine import VllmEngine
from moe_rl.trace import TraceStore
from moe_rl.train.kept import RolloutBatch, shard_name
from moe_rl.train.step import Clock
from moe_rl.types import Completion, GenerateRequest, Prompt, Sequence, Verdict


class Rollouts:
    """Owns the prompts, the verifiers and the use of the engine. Lives on rank 0."""

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        engine: VllmEngine,
        verifiers: VerifierPool,
        run_dir: Path,
        store: TraceStore,
    ):
        tokenizer = config.model.path / "tokenizer.json"
        limit = config.rollout.max_prompt_tokens
        self.config, self.engine, self.verifiers, self.store = config, engine, verifiers, store
        self.trace_root = run_dir / "trace"
        self.stop_tokens = facts.eos_token_ids
        self.codec = TextCodec(tokenizer, facts.eos_token_ids[0])
        self.source = PromptSource(load_prompts(config.task.train, tokenizer, max_prompt_tokens=limit), config.run.seed)
        self.ledger = PromptLedger(run_dir / "prompts.jsonl")
        heldout = load_prompts(config.task.heldout, tokenizer, max_prompt_tokens=limit)
        chosen = np.random.default_rng(config.run.seed).permutation(len(heldout))[: config.eval.prompts]
        self.heldout = [heldout[i] for i in chosen]

    def collect(self, step: int, clock: Clock) -> RolloutBatch:
        """Sample and judge the groups of one step, and enter them into the ledger."""
        rollout = self.config.rollout
        cursor = self.source.cursor
        prompts = self.source.take(rollout.prompts_per_step)
        requests = [
            self._request(f"s{step}/p{p}/c{c}", prompt, rollout.temperature)
            for p, prompt in enumerate(prompts)
            for c in range(rollout.group_size)
        ]
        group_ids = [p for p in range(len(prompts)) for _ in range(rollout.group_size)]
        with clock("sample"):
            completions = self.engine.generate(requests, shard=shard_name(step))
        with clock("reward"):
            verdicts = self._judge([prompts[p] for p in group_ids], completions)
        self.ledger.record(step - 1, cursor, [p.id for p in prompts], _digest(completions))
        check_failed_fraction(verdicts, self.config.task.max_failed_fraction)
        advantages = group_advantages(
            [v.reward for v in verdicts], group_ids, normalize_std=self.config.objective.normalize_std
        )
        kept = [i for i, advantage in enumerate(advantages.advantages) if advantage is not None]
        sequences = [
            Sequence(
                key=c.key,
                prompt_token_ids=c.prompt_token_ids,
                token_ids=c.token_ids,
                rollout_logprobs=c.logprobs,
                advantage=advantages.advantages[i],
                weight_version=c.weight_version,
                routes=c.routes,
            )
            for i in kept
            for c in (completions[i],)
        ]
        trace_bytes = (self.trace_root / f"{shard_name(step)}.safetensors").stat().st_size
        metrics = self._metrics(completions, verdicts, clock) | {
            "trace/bytes": trace_bytes,
            "trace/bytes_per_token": trace_bytes / sum(c.routes.rows for c in completions),
            "group/zero_variance": advantages.zero_variance_groups,
            "group/zero_variance_fraction": advantages.zero_variance_groups / advantages.groups,
        }
        return RolloutBatch(sequences, [group_ids[i] for i in kept], metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Pass rates on held-out prompts, sampled as in training and greedily; the same prompts and seeds each time."""
        passed = {}
        for name, temperature in (("sampled", self.config.rollout.temperature), ("greedy", 0.0)):
            requests = [
                # Nothing trains on these.
                replace(self._request(f"eval/{name}/p{p}", prompt, temperature), record=False)
                for p, prompt in enumerate(self.heldout)
            ]
            completions = self.engine.generate(requests, shard=f"eval-{name}-step{step:06d}")
            passed[name] = [self._passes(v) for v in self._judge(self.heldout, completions)]
        levels: dict[str, list[float | None]] = {}
        for prompt, result in zip(self.heldout, passed["sampled"], strict=True):
            levels.setdefault(prompt.level, []).append(result)
        return {
            "eval/pass_rate": _mean(passed["sampled"]),
            "eval/pass_rate_greedy": _mean(passed["greedy"]),
            **{f"eval/level/{level}": _mean(results) for level, results in sorted(levels.items())},
        }

    def canary_tokens(self) -> tuple[int, ...]:
        """A fixed run of tokens that both engines score after every sync."""
        limit = min(64, self.config.rollout.max_prompt_tokens + self.config.rollout.max_completion_tokens - 1)
        return sum((p.token_ids for p in self.heldout[:limit]), ())[:limit]

    def _request(self, key: str, prompt: Prompt, temperature: float) -> GenerateRequest:
        return generate_request(self.config, key, prompt.token_ids, self.stop_tokens, temperature)

    def _judge(self, prompts: Seq[Prompt], completions: Seq[Completion]) -> list[Verdict]:
        return self.verifiers.score(
            [
                RewardItem(prompt=p.text, completion=self.codec.decode(c.token_ids), answer=p.answer)
                for p, c in zip(prompts, completions, strict=True)
            ]
        )

    def _passes(self, verdict: Verdict) -> float | None:
        return float(verdict.parts[self.config.task.pass_reward] == 1.0) if verdict.scored else None

    def _metrics(self, completions: Seq[Completion], verdicts: Seq[Verdict], clock: Clock) -> dict[str, float]:
        scored = [v for v in verdicts if v.scored]
        if not scored:
            raise RewardError(
                describe(
                    "no completion of a step could be verified", got=verdicts[0].detail, do="mend the reward functions"
                )
            )
        tokens = sum(len(c.token_ids) for c in completions)
        versions = {c.weight_version for c in completions}
        return {
            "reward/mean": _mean([v.reward for v in scored]),
            "reward/pass_rate": _mean([self._passes(v) for v in scored]),
            "reward/failed_verdicts": len(verdicts) - len(scored),
            **{f"reward/part/{name}": _mean([v.parts[name] for v in scored]) for name in self.config.task.rewards},
            "rollout/sequences": len(completions),
            "rollout/completion_tokens_mean": tokens / len(completions),
            "rollout/truncated_fraction": _mean([float(c.finish_reason == "length") for c in completions]),
            "rollout/weight_version": max(versions),
            "throughput/sampled_tokens_per_second": tokens / clock.seconds["sample"],
        }




def generate_request(
    config: Config, key: str, prompt_token_ids: tuple[int, ...], stop_tokens: tuple[int, ...], temperature: float
) -> GenerateRequest:
    """A request as the run makes it: its randomness follows from the run's seed and its own key, not from when or with
    whom it is decoded."""
    return GenerateRequest(
        key=key,
        prompt_token_ids=prompt_token_ids,
        seed=xxhash.xxh3_64_intdigest(f"{config.run.seed}/{key}".encode()) >> 1,
        temperature=temperature,
        max_tokens=config.rollout.max_completion_tokens,
        stop_token_ids=stop_tokens,
    )


def _mean(values: Seq[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")


def _digest(completions: Seq[Completion]) -> str:
    digest = xxhash.xxh3_64()
    for completion in completions:
        digest.update(np.asarray(completion.token_ids, dtype="<i4").tobytes())
        digest.update(completion.logprobs.tobytes())
    return digest.hexdigest()
