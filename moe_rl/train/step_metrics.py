"""Collects what the passes of a step measured on this rank, and combines all ranks into the step's metrics.

Every metric is global. Sums over sequences are counted once, although several ranks share a sequence; sums over routed
rows are added over all ranks. All ranks call each function together. `report/metrics.py` explains the keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.config.schema import Config
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import ScoredWork, Work
from moe_rl.megatron.policy import UpdateResult
from moe_rl.objectives import corrections
from moe_rl.objectives.lags import LAGS
from moe_rl.objectives.mismatch import MismatchSums
from moe_rl.replay.alignment import Alignment
from moe_rl.replay.tables import Tally
from moe_rl.trace import TraceSpec
from moe_rl.train.loss import LossSums

_NO_EVIDENCE = -1000.0  # stands for a test without any values

# Maps the names of metrics in the log to the names that `MismatchSums.metrics` gives them.
_MISMATCH_METRICS = {
    "policy_kl/k1": "k1",
    "policy_kl/k3": "k3",
    "policy/extreme_fraction": "extreme_fraction_2",
    "policy/extreme_fraction_5": "extreme_fraction_5",
    "policy/logratio_abs_p50": "abs_p50",
    "policy/logratio_abs_p99": "abs_p99",
    "policy/logratio_abs_max": "abs_max",
    "policy/perplexity_train": "perplexity_train",
    "policy/perplexity_rollout": "perplexity_rollout",
    "policy/log_perplexity_diff": "log_perplexity_diff",
    "policy/log_perplexity_abs_diff": "log_perplexity_abs_diff",
    "policy/chi2_token": "chi2_token",
    "policy/chi2_sequence_product": "chi2_sequence_product",
    "policy/chi2_sequence_geometric": "chi2_sequence_geometric",
    "policy/effective_sample_fraction": "effective_sample_fraction",
}


@dataclass(slots=True)
class Shown:
    """Holds what the passes of a step measured on this rank.

    Attributes:
        passes: Those that ran on the step's starting weights, the first update's first.
        native: Measured in the pass with native routing, if there was one.
        tallies: One for each pass in which the routers' own choice is compared with the record.
        results: One per optimizer update.
        sums: Sums for the loss metrics.
        peak_rows: The largest `replay.plans.Plans.peak` over all ranks; 0 without dispatch plans.
        copied_excess: How much fuller the fullest rank is than the mean, minus 1, in the dispatch plans; None unless
            experts may be copied.
        alignment: Result of the alignment tests, if they ran.
    """

    passes: list[ScoredWork] = field(default_factory=list)
    native: tuple[MismatchSums, Tally] | None = None
    tallies: list[Tally] = field(default_factory=list)
    results: list[UpdateResult] = field(default_factory=list)
    sums: LossSums = field(default_factory=LossSums)
    peak_rows: float = 0.0
    copied_excess: float | None = None
    alignment: Alignment | None = None

    def add(self, scored: ScoredWork) -> None:
        """Add a pass on the step's starting weights. The first update's, which is the last, comes first."""
        self.passes.insert(0, scored)

    def align(self, alignment: Alignment | None) -> None:
        """Add the result of an alignment test. A step proves what all of its tests prove."""
        self.alignment = alignment.joined(self.alignment) if alignment is not None else self.alignment


def mismatch_of(scored: Iterable[tuple[Work, torch.Tensor]]) -> MismatchSums:
    """Compare the trainer's logprobs [N] of each microbatch with the sampler's."""
    total = MismatchSums.empty(world.device())
    for work, values in scored:
        batch = work.microbatch
        sequences = len(batch.advantages)
        total = total.merge(MismatchSums.of(values, batch.rollout_logprobs, batch.sequence_ids, sequences, work.lags))
    return total


def step_metrics(config: Config, spec: TraceSpec, shown: Shown, *, by_layer: bool) -> dict[str, float]:
    """Return the metrics of a step's passes. With `by_layer`, add the routing mismatch of each layer."""
    replay, results = config.replay.mode, shown.results
    metrics = loss_metrics(config.objective, shown.sums, len(results))
    if replay != "off":
        metrics |= _replay(shown)
    if replay == "r3" and config.guards.alignment:
        metrics |= _alignment(shown.alignment or Alignment(), shown.tallies)
    name = "shadow" if replay == "r3" else "native"
    metrics |= _compared(shown.tallies, name, spec.top_k)
    if by_layer:
        layers = _by_layer(shown.tallies, spec.moe_layers)
        metrics |= {f"routing/{name}_mismatch_layer/{layer:03d}": fraction for layer, fraction in layers.items()}
    mismatch = _global(mismatch_of(pair for scored in shown.passes for pair in scored.pairs))
    measured = mismatch.metrics()
    metrics |= {key: measured[name] for key, name in _MISMATCH_METRICS.items()}
    metrics |= _by_lag(shown.tallies, name, mismatch, ahead=config.pipeline.lag > 0)
    metrics |= {
        "policy/entropy": _mean_entropy([values for scored in shown.passes for values in scored.entropies]),
        "optim/grad_norm": sum(result.grad_norm for result in results) / len(results),
        "optim/lr": results[-1].lr,
        "optim/skipped": sum(not result.applied for result in results),
    }
    if balances := [result.aux_loss for result in results if result.aux_loss is not None]:
        metrics["objective/aux_loss"] = sum(balances) / len(balances)
    if shown.native is not None:
        natively, tally = shown.native
        measured = _global(natively).metrics()
        metrics |= {
            "policy_kl/k1_native": measured["k1"],
            "policy_kl/k3_native": measured["k3"],
            "policy/extreme_fraction_native": measured["extreme_fraction_2"],
            **_compared([tally], "native", spec.top_k),
        }
    return metrics


def loss_metrics(objective: ObjectiveConfig, sums: LossSums, updates: int) -> dict[str, float]:
    """Return the loss metrics of a step that made this many updates."""
    sums = sums if world.speaks_for_its_sequences() else LossSums()
    loss, kl, events, units, ratio = world.all_reduce(
        [*map(float, (sums.loss, sums.kl, sums.clip_events, sums.clip_units, sums.ratio))]
    )
    metrics = {
        "objective/loss": loss / updates,
        "objective/clip_fraction": events / max(units, 1),
        "objective/ratio_mean": ratio / max(units, 1),
    }
    if objective.corrected:
        mine = torch.as_tensor(sums.corrections, dtype=torch.float64).expand(corrections.SUMS).tolist()
        corrected = corrections.metrics(world.all_reduce(mine))
        metrics |= {f"correction/{name}": value for name, value in corrected.items()}
    if objective.score_centering is not None:
        (mass,) = world.all_reduce([float(sums.head_mass)])
        metrics["objective/head_mass"] = mass / max(units, 1)
    if objective.kl_coef > 0 and objective.kl_in == "loss":
        metrics["objective/kl_ref"] = kl / updates
    return metrics


def _replay(shown: Shown) -> dict[str, float]:
    """Return the metrics that prove that routes were taken, and that show how they were dispatched."""
    consumed, expected, applied, planned, dispatched = _sums(
        shown.tallies, "consumed", "expected", "applied_mismatch", "planned", "dispatched"
    )
    copied = {} if shown.copied_excess is None else {"placement/excess_copied": shown.copied_excess}
    return copied | {
        "routing/applied_mismatch": applied,
        "routing/consumed": consumed,
        "routing/expected": expected,
        "routing/planned_fraction": planned / max(dispatched, 1),
        "routing/peak_rows": shown.peak_rows,
    }


def _alignment(alignment: Alignment, tallies: list[Tally]) -> dict[str, float]:
    """Return the metrics of the alignment test: how certain it is that each row got its own routes."""
    tested = sum(tally.native_positions for tally in tallies) > 0
    proven = [claim.status == "proven" for claim in alignment.claims]
    ranks, power, *shares = world.all_reduce([tested * value for value in (1.0, alignment.power, *proven)])
    largest = [max(alignment.evidence, _NO_EVIDENCE), alignment.moved]
    evidence, moved = world.all_reduce(largest, dist.ReduceOp.MAX)
    return {
        "routing/alignment_power": power / max(ranks, 1),
        "routing/alignment_evidence": evidence,
        "routing/alignment_moved": moved,
        **{
            f"routing/proven/{claim.name.replace(' ', '_')}": share / max(ranks, 1)
            for claim, share in zip(alignment.claims, shares, strict=True)
        },
    }


def _compared(tallies: list[Tally], name: str, top_k: int) -> dict[str, float]:
    """Return how far the routers' own choice differs from the record, over all (token, layer) positions."""
    counts = ("mismatch", "shared", "margin", "positions", "token_mismatch", "tokens")
    wrong, shared, margin, positions, wrong_tokens, tokens = _sums(tallies, *(f"native_{count}" for count in counts))
    metrics = {
        f"routing/{name}_mismatch": wrong / max(positions, 1),
        f"routing/{name}_overlap": shared / max(positions * top_k, 1),
        f"routing/{name}_margin": margin / max(positions, 1),
    }
    if name == "native":
        metrics["routing/native_token_mismatch"] = wrong_tokens / max(tokens, 1)
    return metrics


def _sums(tallies: list[Tally], *fields: str) -> list[float]:
    """Return the sums of these fields of the tallies over all ranks."""
    return world.all_reduce([sum(getattr(tally, field) for tally in tallies) for field in fields])


def _by_layer(tallies: list[Tally], layers: Seq[int]) -> dict[int, float]:
    """Return, for each MoE layer of the model, the fraction of tokens whose router choice differs from the record."""
    wrong = [sum(t.native_by_layer.get(layer, 0) for t in tallies) for layer in layers]
    tokens = [sum(t.native_tokens for t in tallies if layer in t.native_by_layer) for layer in layers]
    reduced = world.all_reduce([*wrong, *tokens])
    fractions = zip(reduced[: len(layers)], reduced[len(layers) :], strict=True)
    return {layer: w / max(n, 1) for layer, (w, n) in zip(layers, fractions, strict=True)}


def _by_lag(tallies: list[Tally], name: str, mismatch: MismatchSums, *, ahead: bool) -> dict[str, float]:
    """Return the policy KL, its tokens and the routing mismatch of each lag that occurs.

    Return nothing if the only lag is 0 and the run does not sample `ahead` of training.
    """
    flat = world.all_reduce(
        [sum(t.native_by_lag[n][which] for t in tallies) for n in range(len(LAGS)) for which in (0, 1)]
    )
    routes = {lag: wrong / rows for lag, wrong, rows in zip(LAGS, flat[::2], flat[1::2], strict=True) if rows}
    policy = mismatch.by_lag()
    if not ahead and not {*routes, *policy} - {LAGS[0]}:
        return {}
    return {
        **{f"policy_kl/k3_lag/{lag}": value for lag, (value, _) in policy.items()},
        **{f"policy_kl/tokens_lag/{lag}": tokens for lag, (_, tokens) in policy.items()},
        **{f"routing/{name}_mismatch_lag/{lag}": value for lag, value in routes.items()},
    }


def _mean_entropy(entropies: list[torch.Tensor]) -> float:
    """Return nats per completion token over all ranks. `entropies` holds one tensor [N] per microbatch."""
    mine = torch.cat([torch.empty(0, device=world.device()), *entropies])
    if not world.speaks_for_its_sequences():
        mine = mine[:0]
    total, tokens = world.all_reduce([float(mine.double().sum()), len(mine)])
    return total / max(tokens, 1)


def _global(sums: MismatchSums) -> MismatchSums:
    if not world.speaks_for_its_sequences():
        sums = MismatchSums.empty(world.device())
    rows = [torch.empty_like(sums.to_tensor()) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sums.to_tensor())
    return MismatchSums.from_tensor(torch.stack(rows))
