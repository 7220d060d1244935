"""Measures how far sampler and trainer are apart on one set of sequences, before and after replay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from moe_rl.comparison import quantities
from moe_rl.comparison.passes import Pass, Scorer, TokenOwners
from moe_rl.comparison.quantities import Bootstrap, Estimate
from moe_rl.comparison.sources import Source
from moe_rl.config.schema import Config
from moe_rl.errors import DataError
from moe_rl.megatron.policy import Policy
from moe_rl.objectives.mismatch import MismatchSums
from moe_rl.trace import TraceSpec

POLICY = ("k1", "k3", "F(2)", "F(5)", "abs")
# Quantities that a run also logs at each step, by their names in `MismatchSums.metrics`. They get no interval.
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


def policy_sums(forward: Pass, owners: TokenOwners) -> dict[str, np.ndarray]:
    """Return the sums [B] of each policy quantity over the completion tokens of each sequence."""
    return quantities.policy_sums(forward.logprobs, owners.rollout_logprobs, owners.tokens, owners.sequences)


class Measurement:
    """Measures one set of sequences with one set of weights: natively routed, under R2 and under R3."""

    def __init__(self, config: Config, policy: Policy, spec: TraceSpec, source: Source, version: int):
        versions = {span.weight_version for s in source.sequences for span in s.versions}
        if versions != {version}:
            raise DataError(
                "the weights that score the rollouts are not those that sampled them", got=versions, expected=version
            )
        self.source, self.trainer_dtype = source, config.train.dtype
        self.scorer = Scorer(config, policy, source.store, spec, source.sequences, version)
        self.owners, self.lengths = self.scorer.owners, self.scorer.owners.lengths
        self.seed = config.run.seed
        self.bootstrap = Bootstrap(self.owners.sequences, seed=self.seed)
        # A recording pass routes natively and also keeps the chosen experts, which R2 replays.
        native, seen = self.scorer.run("record", "native", router_kl=True)
        self.recorded = seen.recorded
        self.passes = {"native": native} | self._replays()

    def rows(self, staleness: int) -> list[dict[str, Any]]:
        """Return the table rows of all passes."""
        native = self.passes["native"]
        return [self._row(name, forward, native, staleness) for name, forward in self.passes.items()]

    def rescored(self, name: str, staleness: int) -> list[dict[str, Any]]:
        """Return the table rows with the policy's current weights and the routes from the sampling weights."""
        native, _ = self.scorer.run("observe", f"native {name}", router_kl=True)
        passes = {"native": native} | self._replays(name)
        return [self._row(route, forward, native, staleness) for route, forward in passes.items()]

    def _replays(self, name: str = "") -> dict[str, Pass]:
        r2, _ = self.scorer.run("replay", f"R2 {name}".strip(), tables=self.recorded, router_kl=True)
        sampled, _ = self.scorer.run("replay", f"R3 {name}".strip(), router_kl=True)
        return {"R2": r2, "R3": sampled}

    def _row(self, route: str, forward: Pass, native: Pass, staleness: int) -> dict[str, Any]:
        """Return one table row: the four quantities of a pass, and their paired differences from the native pass."""
        sums, native_sums = self._sums(forward, "all"), self._sums(native, "all")
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
            "policy": self.policy(forward),
            "router_choice": _estimates(quantities.routing(self.bootstrap, sums)),
            "applied": None if route == "native" else _applied(forward),
            "router_kl": self.router_kl(forward, "all"),
            "native_less_this": _estimates(
                {name: self.bootstrap.difference(native_sums[name], sums[name], count) for name, count in pairs}
            ),
        }

    def policy(self, forward: Pass) -> dict[str, Any]:
        """Return the policy KL and related quantities against the sampler's logprobs, over the completion tokens."""
        sums = policy_sums(forward, self.owners)
        means = {name: self.bootstrap.mean(sums[name], self.lengths) for name in POLICY}
        logged = MismatchSums.of(
            torch.from_numpy(forward.logprobs),
            torch.from_numpy(self.owners.rollout_logprobs),
            torch.from_numpy(self.owners.tokens),
            self.owners.sequences,
        ).metrics()
        quantiles = quantities.quantiles(forward.logprobs, self.owners.rollout_logprobs)
        return _estimates(means) | quantiles | {name: logged[name] for name in LOGGED}

    def quantities(self, part: str) -> dict[str, Any]:
        """Return values before and after replay and their paired differences, over the "all", "prompt" or "completion"
        rows."""
        before, after = (self._sums(self.passes[route], part) for route in ("native", "R3"))
        values: dict[str, Any] = {"tokens": int(before["tokens"].sum()), "positions": int(before["positions"].sum())}
        counts = {name: before["tokens" if name.startswith("token_") else "positions"] for name in quantities.ROUTING}
        means = _estimates(quantities.routing(self.bootstrap, before))
        replayed = _estimates(quantities.routing(self.bootstrap, after))
        differences = {
            name: self.bootstrap.difference(before[name], after[name], counts[name]) for name in quantities.ROUTING
        }
        values["routing"] = _three(means, replayed, _estimates(differences))
        kl = [self.router_kl(self.passes[route], part) for route in ("native", "R3")]
        values["router_kl"] = None if None in kl else dict(zip(("before", "after"), kl, strict=True))
        if part == "completion":
            differences = {name: self.bootstrap.difference(before[name], after[name], self.lengths) for name in POLICY}
            values["policy"] = _three(
                self.policy(self.passes["native"]), self.policy(self.passes["R3"]), _estimates(differences)
            )
            values["k3_by_prompt"] = self._by_prompt(before["k3"], after["k3"])
        return values

    def _by_prompt(self, before: np.ndarray, after: np.ndarray) -> dict[str, Any] | None:
        """Return intervals from resampling whole prompts, because completions of a prompt are correlated; None for a
        single prompt."""
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
        """Compare another native pass with the first, which gives the noise without replay."""
        native = self.passes["native"]
        distance = np.abs(again.logprobs.astype(np.float64) - native.logprobs)
        sums = policy_sums(again, self.owners), policy_sums(native, self.owners)
        return {
            "bitwise_equal": bool(np.array_equal(again.logprobs, native.logprobs)),
            "abs_logprob_change_mean": float(distance.mean()),
            "abs_logprob_change_max": float(distance.max()),
            "k3_between_the_passes": float(_k3(again.logprobs, native.logprobs)),
            "choices_changed": float((again.choices.shared != native.choices.shared).mean()),
            "k3": asdict(self.bootstrap.mean(sums[0]["k3"], self.lengths)),
            "k3_native_less_this": asdict(self.bootstrap.difference(sums[1]["k3"], sums[0]["k3"], self.lengths)),
        }

    def worse(self, forward: Pass) -> dict[str, Any]:
        """Compare a pass with wrong routes to the honest replay, paired. Values above 0 mean that it is worse."""
        honest, wrong = self._sums(self.passes["R3"], "all"), self._sums(forward, "all")
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
        entries: list[dict[str, Any]] = [{"layer": layer} for layer in spec.moe_layers]
        for part in quantities.PARTS:
            rows = self.owners.part(part)
            for when, route in (("before", "native"), ("after", "R3")):
                forward = self.passes[route]
                values = [
                    ("set_mismatch", forward.choices.differs, rows),
                    ("overlap", forward.choices.shared / forward.choices.top_k, rows),
                    ("replay_margin", forward.choices.margin, rows),
                ]
                if forward.router_kl is not None and (known := rows & np.isfinite(forward.router_kl).all(0)).any():
                    values.append(("router_kl", forward.router_kl, known))
                for name, value, where in values:
                    for entry, mean in zip(entries, quantities.by_layer(value, where), strict=True):
                        entry.setdefault(part, {}).setdefault(name, {})[when] = mean
        return entries

    def router_kl(self, forward: Pass, part: str) -> dict[str, Any] | None:
        """Return the soft router KL over the rows whose logits the sampler stored; None if there are none."""
        if forward.router_kl is None:
            return None
        rows = self.owners.part(part) & np.isfinite(forward.router_kl).all(0)
        if not rows.any():
            return None
        values, owners = forward.router_kl[:, rows], self.owners.rows[rows]
        sums = quantities.by_sequence(values.sum(0), owners, self.owners.sequences)
        counts = quantities.by_sequence(np.full(rows.sum(), len(values)), owners, self.owners.sequences)
        return asdict(self.bootstrap.mean(sums, counts)) | {"rows": int(rows.sum())}

    def _sums(self, forward: Pass, part: str) -> dict[str, np.ndarray]:
        rows = self.owners.part(part)
        return policy_sums(forward, self.owners) | quantities.routing_sums(
            forward.choices, self.owners.rows, rows, self.owners.sequences
        )


def _applied(forward: Pass) -> dict[str, int]:
    return {
        "mismatch": forward.applied_mismatch,
        "checked": forward.applied_checked,
        "consumed": forward.consumed,
        "expected": forward.expected,
    }


def _k3(logprobs: np.ndarray, other: np.ndarray) -> float:
    d = logprobs.astype(np.float64) - other
    return (np.expm1(d) - d).mean()


def _estimates(means: dict[str, Estimate]) -> dict[str, Any]:
    return {name: asdict(estimate) for name, estimate in means.items()}


def _three(before: dict, after: dict, difference: dict) -> dict[str, Any]:
    """Return {quantity: {before, after, before_less_after}}, the last only where a difference was computed."""
    return {
        name: {"before": before[name], "after": after[name]}
        | ({"before_less_after": difference[name]} if name in difference else {})
        for name in before
    }
