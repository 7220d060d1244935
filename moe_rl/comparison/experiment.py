"""Runs the whole comparison: loads weights, gets rollouts, runs passes, plants faults, and collects the results.

All ranks run it together.

Also decides whether replay lowers the policy KL, from the paired difference of k3, native less replayed.

The difference is tested in a few looks, each with about twice as many tokens. Repeated looks raise the chance of a
false decision, so their number is planned before the first one, and each interval has confidence 1 - 5% / looks
(Bonferroni). Whichever look decides, the decision is wrong with a probability of about 5% at most.

Whole prompts are resampled, because completions of a prompt are correlated. A bootstrap interval of few prompts is too
narrow, so it is widened by the ratio of Student's quantile to the normal one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from moe_rl.comparison import faults, quantities, sources
from moe_rl.comparison.measurement import Measurement, policy_sums
from moe_rl.comparison.passes import Pass, Scorer, TokenOwners, other_budget
from moe_rl.comparison.quantities import CONFIDENCE, Bootstrap, Estimate, widening
from moe_rl.comparison.sources import LiveSampler, Source, Weights
from moe_rl.config.schema import Config
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.policy import Policy
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_model
from moe_rl.trace import TraceSpec
from moe_rl.train.run_folder import RunFolder

# The limits of a high-confidence interval are far out, where 2,000 resamples would leave only a handful.
RESAMPLES = 10_000

Outcome = Literal["lower", "higher", "undecided"]


@dataclass(frozen=True, slots=True)
class Sums:
    """Holds one sequence's sums over its completion tokens, as a look needs them.

    Attributes:
        prompt: token ids.
        less: k3 natively routed less k3 under replay, in nats.
    """

    prompt: tuple[int, ...]
    tokens: int
    less: float


@dataclass(frozen=True, slots=True)
class Look:
    """Holds the paired difference over all tokens so far, in nats per token. difference: with its interval."""

    sequences: int
    prompts: int
    tokens: int
    difference: Estimate

    @property
    def outcome(self) -> Outcome:
        """Return whether the interval shows that replay lowers or raises k3."""
        return "lower" if self.difference.low > 0 else "higher" if self.difference.high < 0 else "undecided"


@dataclass(frozen=True, slots=True)
class Decision:
    """Describes how the question was decided.

    Attributes:
        confidence: confidence of each interval.
        planned: token counts of the planned looks.
        budget: maximum number of tokens to compare.
    """

    outcome: Outcome
    looks: list[Look]
    planned: list[int]
    confidence: float
    budget: int


def plan_looks(tokens: int, budget: int) -> list[int]:
    """Return the token counts of the looks: first all existing tokens, then doubled each time, last the budget."""
    planned = [tokens]
    while 2 * planned[-1] < budget:
        planned.append(2 * planned[-1])
    return [*planned, budget] if budget > planned[-1] else planned


def decide(first: Sequence[Sums], budget: int, more: Callable[[int], Sequence[Sums]], *, seed: int) -> Decision:
    """Look, and get more sequences until the difference is decided or the budget is spent.

    Args:
        first: the existing sequences.
        budget: number of completion tokens, including those of `first`.
        more: samples and scores about this many further tokens.
        seed: seed of the bootstrap.
    """
    planned = plan_looks(sum(sequence.tokens for sequence in first), budget)
    confidence = 1 - (1 - CONFIDENCE) / len(planned)
    sequences, looks = list(first), [look(first, confidence, seed)]
    for target in planned[1:]:
        if looks[-1].outcome != "undecided" or not math.isfinite(looks[-1].difference.value):
            break
        missing = target - looks[-1].tokens
        if missing > 0:  # otherwise the last round was longer than planned
            sequences += more(missing)
        looks.append(look(sequences, confidence, seed))
    return Decision(looks[-1].outcome, looks, planned, confidence, budget)


def look(sequences: Sequence[Sums], confidence: float, seed: int) -> Look:
    """Estimate the difference from these sequences. With a single prompt its sequences are resampled, and the interval
    covers no other prompts."""
    by_prompt: dict[tuple[int, ...], list[Sums]] = {}
    for sequence in sequences:
        by_prompt.setdefault(sequence.prompt, []).append(sequence)
    groups = list(by_prompt.values()) if len(by_prompt) > 1 else [[sequence] for sequence in sequences]
    less = np.array([sum(sequence.less for sequence in group) for group in groups])
    tokens = np.array([sum(sequence.tokens for sequence in group) for group in groups])
    estimate = Bootstrap(len(groups), seed=seed, resamples=RESAMPLES, confidence=confidence).mean(less, tokens)
    wider = widening(len(groups), confidence)
    low, high = (estimate.value + wider * (end - estimate.value) for end in (estimate.low, estimate.high))
    return Look(len(sequences), len(by_prompt), int(tokens.sum()), Estimate(estimate.value, low, high))


def sums_of(
    prompts: Sequence[tuple[int, ...]], owners: TokenOwners, before: np.ndarray, after: np.ndarray
) -> list[Sums]:
    """Return one entry per sequence. before, after: sums [B] of k3, natively routed and under replay."""
    return [
        Sums(prompt, int(tokens), float(less))
        for prompt, tokens, less in zip(prompts, owners.lengths, before - after, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Asked:
    """Describes what to compare.

    Attributes:
        run: The folder of a run; None: sample now.
        precisions: The precisions of the samplers for sampling now.
        out: Folder for results.
        budget_tokens: While the verdict is open, sample up to this many completion tokens.
    """

    config: Config
    run: RunFolder | None
    precisions: tuple[str, ...]
    out: Path
    budget_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Detail:
    """Holds further data for the plots: the passes of the result's first three rows, and their tokens."""

    owners: TokenOwners
    before: Pass
    after: Pass
    token_ids: list[list[int]]


def compare(asked: Asked) -> tuple[dict[str, Any], Detail]:
    """Run the comparison. All ranks call this together.

    Returns:
        The result as written to routing_kl.json, and the further data for the plots.

    Raises:
        DataError, CheckpointError, TraceError, EngineError: The input cannot be compared.
        ReplayError: Replay was not exact.
    """
    config = asked.config
    facts = read_model(config.model.path)
    spec = TraceSpec.of(facts)
    policy = Policy(facts, config.train, config.parallel, config.model.path, temperature=config.rollout.temperature)
    step, weights = (0, [sources.initial(config)]) if asked.run is None else sources.of_run(asked.run, config)
    updates = _load(policy, weights[0])
    rollouts = [] if asked.run is None else [sources.stored(config, asked.run, step)]
    prompts = [(s.key, s.prompt_token_ids) for s in rollouts[0].sequences] if rollouts else None
    prompts = prompts or sources.prompts_of_config(config)
    sampling = _Sampling(config, facts, policy, spec, weights[0].version, asked)
    rollouts += [sampling.once(prompts, precision) for precision in asked.precisions]
    first = Measurement(config, policy, spec, rollouts[0], weights[0].version)
    rows = first.rows(0)
    result: dict[str, Any] = {
        "weights": {
            "version": weights[0].version,
            "path": str(weights[0].path or config.model.path),
            "fingerprint": facts.fingerprint,
            "digest": sources.weights_digest(policy, config.train.dtype),
        }
    }
    repeated, _ = first.scorer.run("observe", "native again")
    repacked = None
    if budget := other_budget(first.source.sequences, config.train.microbatch_tokens):
        other = Scorer(config, policy, rollouts[0].store, spec, rollouts[0].sequences, weights[0].version, budget)
        repacked, _ = other.run("observe", "native, packed otherwise")
    result |= {
        "quantities": {part: first.quantities(part) for part in quantities.PARTS},
        "noise": {
            "repeated": first.noise(repeated),
            "repacked": repacked and first.noise(repacked) | {"microbatch_tokens": budget},
        },
        "layers": first.layers(spec),
        "self_test": faults.self_test(first.scorer, spec, weights[0].version, first.worse),
    }
    result["decision"] = asdict(_decide(first, sampling, step))
    for source in rollouts[1:]:
        rows += Measurement(config, policy, spec, source, weights[0].version).rows(0)
    for later in weights[1:]:
        rows += first.rescored(f"after step {later.version}", _load(policy, later) - updates)
    result["rows"] = rows
    result["setup"] = _setup(asked, facts, first, step, budget, spec)
    result["verdict"] = verdict(result)
    tokens = [list(s.ids[: s.forwarded]) for s in rollouts[0].sequences]
    return _finite(result), Detail(first.owners, first.passes["native"], first.passes["R3"], tokens)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Samples with the weights under comparison, and scores the samples."""

    config: Config
    facts: ModelFacts
    policy: Policy
    spec: TraceSpec
    version: int
    asked: Asked

    def live(self, precision: str, name: str) -> LiveSampler:
        """Start a sampler. Its traces go to `routing_kl-<name>` in the folder for results."""
        folder = self.asked.out / f"routing_kl-{name}"
        return LiveSampler(
            self.config, self.facts, self.policy, version=self.version, precision=precision, folder=folder
        )

    def once(self, prompts: list[tuple[str, tuple[int, ...]]], precision: str) -> Source:
        with closing(self.live(precision, f"sampler-{precision}")) as sampler:
            return sampler.sample(prompts)

    def scored(self, source: Source, name: str) -> list[Sums]:
        """Score the sequences, natively routed and under their own routes."""
        scorer = Scorer(self.config, self.policy, source.store, self.spec, source.sequences, self.version)
        passes = [scorer.run(mode, f"{mode} {name}")[0] for mode in ("observe", "replay")]
        before, after = (policy_sums(forward, scorer.owners)["k3"] for forward in passes)
        return sums_of([s.prompt_token_ids for s in source.sequences], scorer.owners, before, after)


def _decide(first: Measurement, sampling: _Sampling, step: int) -> Decision:
    """Look at the first sequences, and continue sampling with the same weights until the paired difference is decided.

    Further prompts come from the training prompts, in a separate order.
    """
    config, asked = sampling.config, sampling.asked
    size = config.rollout.group_size
    mean_tokens = first.lengths.mean()
    with ExitStack() as stack:
        ask = cache(lambda: stack.enter_context(closing(sampling.live(precision, "more"))))
        source = cache(lambda: sources.prompt_source(config, config.run.seed + 1))
        precision = sources.own_precision(config.rollout) if asked.run else asked.precisions[0]
        rounds, used = itertools.count(1), 0

        def more(tokens: int) -> list[Sums]:
            name = f"more{next(rounds)}"
            if dist.get_rank() == 0:
                print(f"k3, native less R3, is undecided; sampling about {tokens:,} tokens more", flush=True)
            nonlocal used
            prompts = source().at(used, max(1, round(tokens / mean_tokens / size)))
            used += len(prompts)
            asked_for = sources.asked_of(f"s{step}/{name}", prompts, config)
            return sampling.scored(ask().sample(asked_for), name)

        begun = [policy_sums(first.passes[route], first.owners)["k3"] for route in ("native", "R3")]
        sums = sums_of([s.prompt_token_ids for s in first.source.sequences], first.owners, *begun)
        return decide(sums, asked.budget_tokens, more, seed=config.run.seed)


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Decide from the result whether replay was exact and helped; list every reason if not."""
    reasons = []
    applied = [(row, row["applied"]) for row in result["rows"] if row["applied"]]
    for row, counts in applied:
        if counts["mismatch"] or counts["consumed"] != counts["expected"]:
            reasons.append(f"{row['routing']} on {row['source']}: routes were not applied exactly: {counts}")
    if (outcome := result["decision"]["outcome"]) != "lower":
        last, confidence = result["decision"]["looks"][-1], result["decision"]["confidence"]
        why = "replay raises it" if outcome == "higher" else "undecided, and the budget of tokens is spent"
        reasons.append(
            f"policy KL k3: {why}: on {last['tokens']:,} tokens, native less replay is "
            f"{last['difference']['value']:.3g}, its {confidence:.1%} interval {last['difference']['low']:.3g} to "
            f"{last['difference']['high']:.3g}"
        )
    reasons += [f"self-test: {problem}" for problem in result["self_test"]["problems"]]
    return {"passed": not reasons, "exit_code": 3 if reasons else 0, "reasons": reasons}


def _setup(
    asked: Asked, facts: ModelFacts, measured: Measurement, step: int, budget: int | None, spec: TraceSpec
) -> dict[str, Any]:
    config, scorer = asked.config, measured.scorer
    return {
        "rollouts": f"step {step} of {asked.run.path}" if asked.run else "sampled now from the prompts of a first step",
        "sequences": measured.owners.sequences,
        "sequences_left_out": measured.source.left_out,
        "completion_tokens": len(measured.owners.tokens),
        "forwarded_tokens": len(measured.owners.rows),
        "coverage": scorer.coverage["routing/coverage"],
        "router_logits": scorer.has_router_logits,
        "model": str(config.model.path),
        "moe_layers": len(spec.moe_layers),
        "experts": spec.num_experts,
        "top_k": spec.top_k,
        "router": facts.score_function,
        "margin_unit": "nats" if facts.score_function == "softmax" and facts.norm_topk_prob else "router score",
        "sampler": measured.source.sampler,
        "trainer_dtype": config.train.dtype,
        "temperature": config.rollout.temperature,
        "microbatch_tokens": config.train.microbatch_tokens,
        "microbatches_on_rank_0": len(scorer.microbatches),
        "other_packing_microbatch_tokens": budget,
        "ranks": dist.get_world_size(),
        "layout": {name: size for name, size in config.parallel if size not in (1, ())},
        "seed": config.run.seed,
        "bootstrap_resamples": quantities.RESAMPLES,
        "confidence": quantities.CONFIDENCE,
        "versions": {name: installed(name) for name in ("torch", "megatron-core")},
        "device": str(world.device()),
    }


def _load(policy: Policy, weights: Weights) -> int:
    """Load these weights into the policy. Returns the number of optimizer updates that made them."""
    updates = 0 if weights.path is None else checkpoint.load_weights(weights.path, policy)["updates"]
    return updates if weights.version else 0


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Seq) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
