"""Runs the whole comparison: loads weights, gets rollouts, runs passes, plants faults, and collects the results.

All ranks run it together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.comparison import faults, quantities, sources
from moe_rl.comparison.decision import Decision, Sums, decide, sums_of
from moe_rl.comparison.passes import Pass, Scorer, TokenOwners, other_budget
from moe_rl.comparison.quantities import Bootstrap, Estimate
from moe_rl.comparison.sources import LiveSampler, Source, Weights
from moe_rl.config.schema import Config
from moe_rl.errors import DataError, describe
from moe_rl.megatron import checkpoint, world
from moe_rl.megatron.policy import Policy
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_model
from moe_rl.objectives.mismatch import MismatchSums
from moe_rl.trace import TraceSpec
from moe_rl.train.run_folder import RunFolder

POLICY = ("k1", "k3", "F(2)", "F(5)", "abs")
# Quantities that a run also logs at each step, under their names in `MismatchSums.metrics`. They get no interval.
LOGGED = (
    "perplexity_train",
    "perplexity_rollout",
    "log_perplexity_diff",
    "log_perplexity_abs_diff",
    "chi2_token",
    "chi2_sequence_product",
    "chi2_sequence_geometric",
    "effective_sample_fraction",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Says what to compare.

    Attributes:
        run: The folder of a run; None samples now.
        precisions: The precisions of the samplers to sample with now.
        out: Folder for results.
        budget_tokens: Number of completion tokens up to which more are sampled while the verdict is open.
    """

    config: Config
    run: RunFolder | None
    precisions: tuple[str, ...]
    out: Path
    budget_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Detail:
    """Holds what the plots need beside the result: the passes of the first three rows, and their tokens."""

    owners: TokenOwners
    before: Pass
    after: Pass
    token_ids: list[list[int]]


def compare(asked: Asked) -> tuple[dict[str, Any], Detail]:
    """Run the comparison. All ranks call this together.

    Returns:
        The result as it is written to routing_kl.json, and what the plots need.

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
    found = [] if asked.run is None else [sources.stored(config, asked.run, step)]
    prompts = [(s.key, s.prompt_token_ids) for s in found[0].sequences] if found else None
    prompts = prompts or sources.prompts_of_config(config)
    sampling = _Sampling(config, facts, policy, spec, weights[0].version, asked)
    found += [sampling.once(prompts, precision) for precision in asked.precisions]
    first = _Measured(config, policy, spec, found[0], weights[0].version)
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
        other = Scorer(config, policy, found[0].store, spec, found[0].sequences, weights[0].version, budget)
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
    for source in found[1:]:
        rows += _Measured(config, policy, spec, source, weights[0].version).rows(0)
    for later in weights[1:]:
        rows += first.rescored(f"after step {later.version}", _load(policy, later) - updates)
    result["rows"] = rows
    result["setup"] = _setup(asked, facts, first, step, budget, spec)
    result["verdict"] = verdict(result)
    tokens = [[*s.prompt_token_ids, *s.token_ids][: s.forwarded] for s in found[0].sequences]
    return _finite(result), Detail(first.owners, first.passes["native"], first.passes["R3"], tokens)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Holds what it takes to sample with the weights that the comparison is about, and to score what was sampled."""

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
        before, after = (policy_k3(one, scorer.owners) for one in passes)
        return sums_of([s.prompt_token_ids for s in source.sequences], scorer.owners, before, after)


def _decide(first: _Measured, sampling: _Sampling, step: int) -> Decision:
    """Look at the first sequences, and sample on with the same weights until the paired difference is decided.

    More prompts are taken from the training prompts, in an order of their own.
    """
    config, asked = sampling.config, sampling.asked
    size = config.rollout.group_size
    mean_tokens = first.lengths.mean()
    with ExitStack() as stack:
        ask = cache(lambda: stack.enter_context(closing(sampling.live(precision, "more"))))
        source = cache(lambda: sources.prompt_source(config, config.run.seed + 1))
        precision = sources.own_precision(config.rollout) if asked.run else asked.precisions[0]
        rounds = itertools.count(1)

        def more(tokens: int) -> list[Sums]:
            name = f"more{next(rounds)}"
            if dist.get_rank() == 0:
                print(f"k3, native less R3, is undecided; sampling about {tokens:,} tokens more", flush=True)
            prompts = source().take(max(1, round(tokens / mean_tokens / size)))
            asked_for = sources.asked_of(f"s{step}/{name}", prompts, config)
            return sampling.scored(ask().sample(asked_for), name)

        begun = [policy_k3(first.passes[route], first.owners) for route in ("native", "R3")]
        sums = sums_of([s.prompt_token_ids for s in first.source.sequences], first.owners, *begun)
        return decide(sums, asked.budget_tokens, more, seed=config.run.seed)


def policy_k3(one: Pass, owners: TokenOwners) -> np.ndarray:
    """Return the sums [B] of k3 over the completion tokens of each sequence."""
    return quantities.policy_sums(one.logprobs, owners.rollout_logprobs, owners.tokens, owners.sequences)["k3"]


class _Measured:
    """Measures one set of sequences with one set of weights: natively routed, under R2 and under R3."""

    def __init__(self, config: Config, policy: Policy, spec: TraceSpec, source: Source, version: int):
        versions = {s.weight_version for s in source.sequences}
        if versions != {version}:
            raise DataError(
                describe(
                    "the weights that score the rollouts are not those that sampled them",
                    got=versions,
                    expected=version,
                )
            )
        self.source, self.trainer_dtype = source, config.train.dtype
        self.scorer = Scorer(config, policy, source.store, spec, source.sequences, version)
        self.owners, self.lengths = self.scorer.owners, self.scorer.owners.lengths
        self.seed = config.run.seed
        self.bootstrap = Bootstrap(self.owners.sequences, seed=self.seed)
        # A recording pass routes natively and also keeps the chosen experts, which R2 replays.
        native, session = self.scorer.run("record", "native", router_kl=True)
        self.recorded = session.recorded_routes()
        self.passes = {"native": native} | self._replays()

    def rows(self, staleness: int) -> list[dict[str, Any]]:
        """Return the table rows of all passes."""
        native = self.passes["native"]
        return [self._row(name, one, native, staleness) for name, one in self.passes.items()]

    def rescored(self, name: str, staleness: int) -> list[dict[str, Any]]:
        """Return the table rows with the policy's current weights and the routes of the weights that sampled."""
        native, _ = self.scorer.run("observe", f"native {name}", router_kl=True)
        passes = {"native": native} | self._replays(name)
        return [self._row(route, one, native, staleness) for route, one in passes.items()]

    def _replays(self, name: str = "") -> dict[str, Pass]:
        own, _ = self.scorer.run("replay", f"R2 {name}".strip(), tables=self.recorded, router_kl=True)
        sampled, _ = self.scorer.run("replay", f"R3 {name}".strip(), router_kl=True)
        return {"R2": own, "R3": sampled}

    def _row(self, route: str, one: Pass, native: Pass, staleness: int) -> dict[str, Any]:
        """Return one table row: the four quantities of a pass, and their paired differences from the native pass."""
        sums, native_sums = self._sums(one, "all"), self._sums(native, "all")
        pairs = (
            ("k1", self.lengths),
            ("k3", self.lengths),
            ("F(2)", self.lengths),
            ("set_mismatch", sums["positions"]),
        )
        return {
            "source": self.source.name,
            "sampler": self.source.sampler,
            "trainer_dtype": self.trainer_dtype,
            "staleness_updates": staleness,
            "routing": route,
            "sequences": self.owners.sequences,
            "tokens": int(self.lengths.sum()),
            "policy": self.policy(one),
            "router_choice": _estimates(quantities.routing(self.bootstrap, sums)),
            "applied": None if route == "native" else _applied(one),
            "router_kl": self.router_kl(one, "all"),
            "native_less_this": _estimates(
                {name: self.bootstrap.difference(native_sums[name], sums[name], count) for name, count in pairs}
            ),
        }

    def policy(self, one: Pass) -> dict[str, Any]:
        """Return the policy KL and related quantities against the sampler's logprobs, over the completion tokens."""
        sums = self._policy_sums(one)
        means = {name: self.bootstrap.mean(sums[name], self.lengths) for name in POLICY}
        logged = MismatchSums.of(
            torch.from_numpy(one.logprobs),
            torch.from_numpy(self.owners.rollout_logprobs),
            torch.from_numpy(self.owners.tokens),
            self.owners.sequences,
        ).metrics()
        quantiles = quantities.quantiles(one.logprobs, self.owners.rollout_logprobs)
        return _estimates(means) | quantiles | {name: logged[name] for name in LOGGED}

    def quantities(self, part: str) -> dict[str, Any]:
        """Return values before and after replay and their paired differences, over the "all", "prompt" or "completion"
        rows."""
        before, after = (self._sums(self.passes[route], part) for route in ("native", "R3"))
        found: dict[str, Any] = {"tokens": int(before["tokens"].sum()), "positions": int(before["positions"].sum())}
        counts = {name: before["tokens" if name.startswith("token_") else "positions"] for name in quantities.ROUTING}
        means = _estimates(quantities.routing(self.bootstrap, before))
        replayed = _estimates(quantities.routing(self.bootstrap, after))
        differences = {
            name: self.bootstrap.difference(before[name], after[name], counts[name]) for name in quantities.ROUTING
        }
        found["routing"] = _three(means, replayed, _estimates(differences))
        kl = [self.router_kl(self.passes[route], part) for route in ("native", "R3")]
        found["router_kl"] = None if None in kl else dict(zip(("before", "after"), kl, strict=True))
        if part == "completion":
            differences = {name: self.bootstrap.difference(before[name], after[name], self.lengths) for name in POLICY}
            found["policy"] = _three(
                self.policy(self.passes["native"]), self.policy(self.passes["R3"]), _estimates(differences)
            )
            found["k3_by_prompt"] = self._by_prompt(before["k3"], after["k3"])
        return found

    def _by_prompt(self, before: np.ndarray, after: np.ndarray) -> dict[str, Any] | None:
        """Return intervals from resampling whole prompts, because completions of a prompt are alike; None for a single
        prompt."""
        owners = self.owners
        if owners.prompts.max() == 0:
            return None
        bootstrap = Bootstrap(owners.sequences, seed=self.seed, clusters=owners.prompts)
        return _estimates(
            {
                "before": bootstrap.mean(before, self.lengths),
                "after": bootstrap.mean(after, self.lengths),
                "before_less_after": bootstrap.difference(before, after, self.lengths),
            }
        )

    def noise(self, again: Pass) -> dict[str, Any]:
        """Compare another native pass with the first: this is the noise without any replay."""
        native = self.passes["native"]
        distance = np.abs(again.logprobs.astype(np.float64) - native.logprobs)
        both = self._policy_sums(again), self._policy_sums(native)
        return {
            "bitwise_equal": bool(np.array_equal(again.logprobs, native.logprobs)),
            "abs_logprob_change_mean": float(distance.mean()),
            "abs_logprob_change_max": float(distance.max()),
            "k3_between_the_passes": float(_k3(again.logprobs, native.logprobs)),
            "choices_changed": float((again.choices.shared != native.choices.shared).mean()),
            "k3": asdict(self.bootstrap.mean(both[0]["k3"], self.lengths)),
            "k3_native_less_this": asdict(self.bootstrap.difference(both[1]["k3"], both[0]["k3"], self.lengths)),
        }

    def worse(self, one: Pass) -> dict[str, Any]:
        """Compare a pass with wrong routes with the honest replay, paired. Values above 0 mean that it got worse."""
        honest, wrong = self._sums(self.passes["R3"], "all"), self._sums(one, "all")
        counts = {"k3": self.lengths, "F(2)": self.lengths, "set_mismatch": honest["positions"]}
        return {
            name: {
                "honest": self.bootstrap.mean(honest[name], count).value,
                "planted": self.bootstrap.mean(wrong[name], count).value,
                "worse_by": asdict(self.bootstrap.difference(wrong[name], honest[name], count)),
            }
            for name, count in counts.items()
        }

    def layers(self, spec: TraceSpec) -> list[dict[str, Any]]:
        """Return the quantities of each MoE layer before and after replay, for prompt and completion separately."""
        found: list[dict[str, Any]] = [{"layer": layer} for layer in spec.moe_layers]
        for part in quantities.PARTS:
            rows = self.owners.part(part)
            for when, route in (("before", "native"), ("after", "R3")):
                one = self.passes[route]
                values = [
                    ("set_mismatch", one.choices.differs, rows),
                    ("overlap", one.choices.shared / one.choices.top_k, rows),
                    ("replay_margin", one.choices.margin, rows),
                ]
                if one.router_kl is not None and (known := rows & np.isfinite(one.router_kl).all(0)).any():
                    values.append(("router_kl", one.router_kl, known))
                for name, value, where in values:
                    for entry, mean in zip(found, quantities.by_layer(value, where), strict=True):
                        entry.setdefault(part, {}).setdefault(name, {})[when] = mean
        return found

    def router_kl(self, one: Pass, part: str) -> dict[str, Any] | None:
        """Return the soft router KL over the rows whose logits the sampler stored; None if there are none."""
        if one.router_kl is None:
            return None
        rows = self.owners.part(part) & np.isfinite(one.router_kl).all(0)
        if not rows.any():
            return None
        values, owners = one.router_kl[:, rows], self.owners.rows[rows]
        sums = quantities.by_sequence(values.sum(0), owners, self.owners.sequences)
        counts = quantities.by_sequence(np.full(rows.sum(), len(values)), owners, self.owners.sequences)
        return asdict(self.bootstrap.mean(sums, counts)) | {"rows": int(rows.sum())}

    def _policy_sums(self, one: Pass) -> dict[str, np.ndarray]:
        owners = self.owners
        return quantities.policy_sums(one.logprobs, owners.rollout_logprobs, owners.tokens, owners.sequences)

    def _sums(self, one: Pass, part: str) -> dict[str, np.ndarray]:
        rows = self.owners.part(part)
        return self._policy_sums(one) | quantities.routing_sums(
            one.choices, self.owners.rows, rows, self.owners.sequences
        )


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Decide from the result whether replay was exact and helped; list every reason if not."""
    reasons = []
    applied = [(row, row["applied"]) for row in result["rows"] if row["applied"]]
    for row, counts in applied:
        if counts["mismatch"] or counts["consumed"] != counts["expected"]:
            reasons.append(f"{row['routing']} on {row['source']}: routes were not applied exactly: {counts}")
    if (outcome := result["decision"]["outcome"]) != "lower":
        last, confidence = result["decision"]["looks"][-1], result["decision"]["confidence"]
        said = "replay raises it" if outcome == "higher" else "undecided, and the budget of tokens is spent"
        reasons.append(
            f"policy KL k3: {said}: on {last['tokens']:,} tokens, native less replay is "
            f"{last['difference']['value']:.3g}, its {confidence:.1%} interval {last['difference']['low']:.3g} to "
            f"{last['difference']['high']:.3g}"
        )
    reasons += [f"self-test: {problem}" for problem in result["self_test"]["problems"]]
    return {"passed": not reasons, "exit_code": 3 if reasons else 0, "reasons": reasons}


def _setup(asked: Asked, facts, measured: _Measured, step: int, budget: int | None, spec: TraceSpec) -> dict[str, Any]:
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
    """Load these weights into the policy. Returns the number of the run's optimizer updates that made them."""
    updates = 0 if weights.path is None else checkpoint.load_weights(weights.path, policy)["updates"]
    return updates if weights.version else 0


def _applied(one: Pass) -> dict[str, int]:
    return {
        "mismatch": one.applied_mismatch,
        "checked": one.applied_checked,
        "consumed": one.consumed,
        "expected": one.expected,
    }


def _k3(one: np.ndarray, other: np.ndarray) -> float:
    d = one.astype(np.float64) - other
    return (np.expm1(d) - d).mean()


def _estimates(means: dict[str, Estimate]) -> dict[str, Any]:
    return {name: asdict(one) for name, one in means.items()}


def _three(before: dict, after: dict, difference: dict) -> dict[str, Any]:
    """Return {quantity: {before, after, before_less_after}}, the last only where a difference was computed."""
    return {
        name: {"before": before[name], "after": after[name]}
        | ({"before_less_after": difference[name]} if name in difference else {})
        for name in before
    }


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, Seq) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
