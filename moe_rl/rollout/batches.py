"""Turns the judged completions of prompts into the batch that a step trains on, with its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.schema import Config
from moe_rl.errors import PipelineError, RewardError
from moe_rl.objectives.advantages import equal, has_spread, overlong_penalty
from moe_rl.rollout.groups import Pieces, all_pieces, joined
from moe_rl.rollout.kept import KeptSample, RolloutBatch, shards_of
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.tasks.verifiers import RewardItem, check_failed_fraction
from moe_rl.types import QUANTILES, Completion, Drawing, InsertedText, Prompt, Sequence, Verdict, seal_of


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Holds the completions of one prompt with their verdicts and rewards.

    Attributes:
        number: Index of the prompt within its step.
        completions: The pieces of each, joined.
        trajectories: The episodes played, if any. The sequences of each are its pieces.
        rewards: One per completion; None where verification failed.
    """

    number: int
    prompt: Prompt
    pieces: Pieces
    completions: Seq[Completion]
    verdicts: Seq[Verdict]
    rewards: Seq[float | None]
    trajectories: Seq[Trajectory] = ()

    @property
    def shards(self) -> list[str]:
        """Return the names of the trace shards that hold the routes, sorted."""
        return shards_of(all_pieces(self.pieces))

    @property
    def scored(self) -> int:
        """Return the number of completions that have a reward."""
        return sum(reward is not None for reward in self.rewards)

    @property
    def informative(self) -> bool:
        """Return whether the rewards that are compared differ: those of the turns, if turns have their own."""
        of_turns = [turn.reward for piece in all_pieces(self.pieces) for turn in piece.turns]
        return has_spread(of_turns or self.rewards)


def choose(groups: Seq[PromptGroup], wanted: int) -> list[PromptGroup]:
    """Choose the first `wanted` groups whose rewards differ, or all such groups if there are fewer.

    If no group has differing rewards, choose the first `wanted` groups that have a reward at all. The step's metrics
    are as usual, but objectives that compare rewards within a group learn nothing from it.
    """
    informative = [group for group in groups if group.informative]
    return (informative or [group for group in groups if group.scored])[:wanted]


class Batches:
    """Makes groups from judged completions, and a step's batch from its groups.

    Args:
        trace_root: folder of the run's trace store.
    """

    def __init__(self, config: Config, codec: TextCodec, trace_root: Path):
        self.config, self.codec, self.trace_root = config, codec, trace_root

    def item(self, prompt: Prompt, completion: Completion) -> RewardItem:
        """Return what the verifiers need to judge a completion."""
        return RewardItem(
            prompt=prompt.text,
            completion=self.codec.text(completion),
            columns=prompt.columns,
            finish_reason=completion.finish_reason,
            stop_token_id=completion.stop_token_id,
            stop_string=completion.stop_string,
            completion_token_ids=completion.text_token_ids,
            messages=prompt.messages,
            seal=completion.seal,
        )

    def passes(self, verdict: Verdict) -> bool | None:
        """Return whether a verdict is a pass; None if the verification failed."""
        task = self.config.task
        if verdict.reward is None:
            return None
        if task.environment is not None:
            threshold = task.environment.pass_threshold
            return verdict.reward >= threshold or equal(verdict.reward, threshold)
        assert task.pass_reward is not None  # set when there is no environment
        return equal(verdict.parts[task.pass_reward], 1.0)

    def group(self, number: int, prompt: Prompt, pieces: Pieces, verdicts: Seq[Verdict]) -> PromptGroup:
        """Return a group, with the verifiers' rewards plus the penalty for long completions.

        Raises:
            RewardError: A verdict belongs to another completion, or a completion to another prompt.
            PipelineError: Tokens were sampled with other parameters than the config's.
        """
        completions = [joined(parts) for parts in pieces]
        check_drawing(all_pieces(pieces), self.config)
        for completion in completions:
            if completion.prompt_token_ids != prompt.token_ids:
                raise RewardError(
                    "a completion belongs to another prompt than its group",
                    where={"request": completion.key, "group": number},
                    got=f"a prompt of {len(completion.prompt_token_ids)} other tokens",
                    expected=f"those of prompt {prompt.id}",
                    do="look for what swaps or repeats groups between the sampler and the verifiers",
                    fault="another prompt",
                )
        rewards = [
            v.reward + self._overlong(c) if v.reward is not None else None
            for c, v in zip(completions, verdicts, strict=True)
        ]
        return _check_whose(PromptGroup(number, prompt, pieces, completions, verdicts, rewards))

    def played(self, number: int, prompt: Prompt, trajectories: Seq[Trajectory]) -> PromptGroup:
        """Return a group of episodes. Raises as `group` does."""
        return _check_whose(
            PromptGroup(
                number,
                prompt,
                [trajectory.sequences for trajectory in trajectories],
                [trajectory.whole for trajectory in trajectories],
                [trajectory.verdict for trajectory in trajectories],
                [trajectory.verdict.reward for trajectory in trajectories],
                trajectories,
            )
        )

    def make(
        self, step: int, groups: Seq[PromptGroup], chosen: Seq[PromptGroup], *, exact: bool = False
    ) -> RolloutBatch:
        """Return the batch of a step.

        Args:
            groups: all groups sampled for the step; the metrics cover these.
            chosen: the groups to train on.
            exact: whether each piece of a completion is its own sequence, after the earlier pieces.

        Raises:
            RewardError: too many verifications failed.
        """
        completions = [c for group in groups for c in group.completions]
        verdicts = [v for group in groups for v in group.verdicts]
        self.check(verdicts)
        metrics = self._metrics(completions, verdicts) | episode_metrics([t for g in groups for t in g.trajectories])
        trained = [
            (group, index, piece, reward)
            for group in chosen
            for index, reward in enumerate(group.rewards)
            if reward is not None
            for piece in (group.pieces[index] if exact or group.trajectories else [_continued(group, index)])
        ]
        sequences, played = [], self.config.task.environment
        alone = played is not None and played.credit == "branch"
        for group, index, piece, reward in trained:
            whole = group.completions[index]
            part_of = whole.key if (exact or group.trajectories) and piece is not whole else ""
            sequence = Sequence.of(piece, reward, part_of, alone=alone)
            sequences.append(sequence.judged(group.number))
        if self.config.task.overlong is not None:
            metrics["reward/overlong_penalty"] = _mean([self._overlong(c) for c in completions])
        stored = (
            part
            for group in groups
            for part in (all_pieces(group.pieces) if exact or group.trajectories else group.completions)
        )
        recorded = [part.routes for part in stored if part.routes is not None]
        written = {shard for group in groups for shard in group.shards}
        trace_bytes = sum((self.trace_root / f"{shard}.safetensors").stat().st_size for shard in written)
        same = sum(group.scored > 1 and not group.informative for group in groups)
        metrics |= {
            "trace/bytes": trace_bytes,
            "trace/bytes_per_token": trace_bytes / sum(routes.rows for routes in recorded),
            "group/zero_variance": same,
            "group/zero_variance_fraction": same / len(groups),
        }
        drawn = np.random.default_rng([self.config.run.seed, step]).permutation(len(trained))
        shown = [trained[i] for i in sorted(drawn[: self.config.report.samples_per_step])]
        samples = [self._sample_of(group, index, piece) for group, index, piece, _ in shown]
        return RolloutBatch(
            sequences, [group.number for group, *_ in trained], metrics, digest_of(completions), samples
        )

    def check(self, verdicts: Seq[Verdict]) -> None:
        """Raise RewardError if all or too many verifications failed."""
        if self.config.task.environment is None:
            what, do = ("verifications", "no completion of a step could be verified"), "fix the reward functions"
        else:
            what, do = ("episodes", "all episodes of a step failed"), "fix the environment"
        check_failed_fraction(verdicts, self.config.task.max_failed_fraction, f"too many {what[0]} failed")
        if not any(verdict.scored for verdict in verdicts):
            raise RewardError(what[1], got=verdicts[0].detail, do=do)

    def _sample_of(self, group: PromptGroup, index: int, piece: Completion) -> KeptSample:
        """Return the samples.jsonl entry of a completion, or of one piece that follows earlier ones."""
        before = piece.prompt_token_ids[len(group.completions[index].prompt_token_ids) :]
        return KeptSample(
            key=piece.key,
            prompt=("" if group.trajectories else group.prompt.text) + self.codec.decode(before),
            completion=self.codec.text(piece),
            pieces=[self.codec.decode([token]) for token in piece.token_ids],
            parts=group.verdicts[index].parts,
            finish_reason=piece.finish_reason,
            inserted=[
                InsertedText(insertion.after, len(insertion.token_ids), self.codec.decode(insertion.token_ids))
                for insertion in piece.inserted
            ],
        )

    def _overlong(self, completion: Completion) -> float:
        overlong, limit = self.config.task.overlong, self.config.rollout.max_completion_tokens
        if overlong is None:
            return 0.0
        return overlong_penalty(
            len(completion.token_ids), limit=limit, cache=overlong.cache_tokens, penalty=overlong.penalty
        )

    def _metrics(self, completions: Seq[Completion], verdicts: Seq[Verdict]) -> dict[str, float]:
        scored = [v for v in verdicts if v.scored]
        lengths = [len(c.token_ids) for c in completions]
        return {
            "reward/mean": _mean([v.reward for v in scored]),
            **_quantiles("reward/quantile", [v.reward for v in scored if v.reward is not None]),
            "reward/pass_rate": _mean([self.passes(v) for v in scored]),
            "reward/failed_verdicts": len(verdicts) - len(scored),
            **{f"reward/part/{name}": _mean([v.parts[name] for v in scored]) for name in self.config.task.rewards},
            "rollout/sequences": len(completions),
            "rollout/completion_tokens_mean": sum(lengths) / len(completions),
            **_quantiles("rollout/completion_tokens_quantile", lengths),
            "rollout/truncated_fraction": _mean([float(c.finish_reason == "length") for c in completions]),
            "rollout/weight_version": max(span.weight_version for c in completions for span in c.versions),
        }


def drawing_of(rollout: RolloutConfig) -> Drawing:
    """Return how a run samples the completions that it trains on."""
    return Drawing(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)


def check_drawing(pieces: Iterable[Completion], config: Config) -> None:
    """Check that training completions were sampled with the config's parameters, for which the trainer computes
    probabilities.

    Raises:
        PipelineError: an earlier process of the run sampled a piece with other parameters.
    """
    wanted = drawing_of(config.rollout)
    for piece in pieces:
        if piece.drawing != wanted:
            raise PipelineError(
                "tokens were drawn with other sampling parameters than those of the config",
                where={"request": piece.key, "key": "rollout"},
                got=piece.drawing or "unknown ones",
                expected=wanted,
                do="continue with the run's first parameters, or delete the folder groups of the run, to "
                "sample its unfinished groups again",
                fault="drawing",
            )


def _continued(group: PromptGroup, index: int) -> Completion:
    """Return a completion under the key of its last piece, to which its routes are bound."""
    whole, parts = group.completions[index], group.pieces[index]
    return whole if len(parts) == 1 else replace(whole, key=parts[-1].key, seal="")


def _check_whose(group: PromptGroup) -> PromptGroup:
    """Check that a group's verdicts belong to its completions, and that these match the sampler's seals. Return it."""
    parts = {id(part): part for part in (*all_pieces(group.pieces), *group.completions)}.values()
    wrong = [part.key for part in parts if part.seal != seal_of(part.key, part.token_ids, part.logprobs)]
    if wrong:
        raise RewardError(
            "a completion was changed after sampling",
            where={"request": wrong[0], "group": group.number},
            got="tokens or log-probabilities that do not match its seal",
            expected="those that the sampler returned",
            do="look for what changes completions between the sampler and the batch",
            fault="seal",
        )
    for completion, verdict in zip(group.completions, group.verdicts, strict=True):
        if verdict.of != completion.seal:
            raise RewardError(
                "a verdict belongs to another completion",
                where={"request": completion.key, "group": group.number},
                got=f"the verdict of a completion with the seal {verdict.of or 'none'}",
                expected=completion.seal,
                do="look for what swaps verdicts between the verifiers and the batch",
                fault="another verdict",
            )
    return group


def episode_metrics(trajectories: Seq[Trajectory]) -> dict[str, float]:
    """Return the metrics of episodes; none without any."""
    if not trajectories:
        return {}
    sampled = sum(len(sequence.token_ids) for played in trajectories for sequence in played.sequences)
    inserted = sum(trajectory.inserted for trajectory in trajectories)
    turns = [trajectory.turns for trajectory in trajectories]
    return {
        "episode/turns_mean": _mean(turns),
        **_quantiles("episode/turns_quantile", turns),
        "episode/undelivered": sum(trajectory.undelivered for trajectory in trajectories),
        "episode/other_system": sum(trajectory.other_system for trajectory in trajectories),
        "episode/branches_mean": _mean([trajectory.branches for trajectory in trajectories]),
        "episode/sequences_mean": _mean([len(trajectory.sequences) for trajectory in trajectories]),
        "episode/inserted_fraction": inserted / max(1, inserted + sampled),
        "episode/failed": sum(not trajectory.verdict.scored for trajectory in trajectories),
    }


def discarded(sampled: int, chosen: int, lacking: int) -> dict[str, float]:
    """Return the metrics of dynamic sampling, from numbers of groups."""
    return {"group/sampled": sampled, "group/discarded": sampled - chosen, "group/lacking": lacking}


def recorded(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of the recorders' counts in a step. A new engine starts counting from 0."""
    names = ("witnessed", "write_waits", "drafts", "accepted_drafts")
    rows, waits, drafts, accepted = (max(0, now.get(name, 0) - before.get(name, 0)) for name in names)
    acceptance = {"rollout/draft_acceptance": accepted / drafts} if drafts else {}
    return {"rollout/witnessed_rows": rows, "rollout/write_waits": waits, **acceptance}


def digest_of(completions: Seq[Completion]) -> str:
    """Return the digest of the completions of a step, for the prompt ledger."""
    digest = xxhash.xxh3_64()
    for completion in completions:
        digest.update(np.asarray(completion.token_ids, dtype="<i4").tobytes())
        digest.update(completion.logprobs.tobytes())
        for insertion in completion.inserted:
            digest.update(np.asarray([insertion.after, *insertion.token_ids], dtype="<i4").tobytes())
    return digest.hexdigest()


def _mean(values: Seq[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")


def _quantiles(family: str, values: Seq[float]) -> dict[str, float]:
    """Return a family of metrics: the 5, 25, 50, 75 and 95% quantiles."""
    quantiles = np.percentile(values, QUANTILES)
    return {f"{family}/p{part:02d}": float(value) for part, value in zip(QUANTILES, quantiles, strict=True)}
