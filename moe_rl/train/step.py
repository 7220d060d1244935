"""One training step on one rank: pack, read the routes, measure sampler against trainer, update.

Every rank holds the whole batch's tokens and only its own sequences' routes. All numbers returned are global: sums over
sequences are taken from one of the ranks that share them, sums over routed rows from every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_rl.config.schema import Config
from moe_rl.errors import ReplayError, describe
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import Microbatch
from moe_rl.megatron.policy import Policy, ReferencePolicy
from moe_rl.objectives import corrections
from moe_rl.objectives.losses import policy_loss, reference_kl
from moe_rl.objectives.mismatch import MismatchSums
from moe_rl.objectives.penalties import entropy_bonus
from moe_rl.replay.plans import peak_rows, plan_dispatch
from moe_rl.replay.session import ReplaySession
from moe_rl.replay.tables import Tally
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.credit import give_credit
from moe_rl.train.experts import ExpertPlacement
from moe_rl.train.guards import Guards
from moe_rl.train.shares import Share, Shares
from moe_rl.types import Sequence

# A run's metrics, and what `MismatchSums.metrics` calls them.
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


class Clock:
    """Seconds spent in named parts of a step; a name used again adds up. begun: told of each part that begins."""

    def __init__(self, begun: Callable[[str], None] = lambda name: None):
        self.seconds: dict[str, float] = {}
        self.begun = begun

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.begun(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(slots=True)
class UpdateSums:
    """Sums over a step's updates on this rank: scalar tensors, once there is something to add."""

    loss: torch.Tensor | int = 0
    kl: torch.Tensor | int = 0
    clip_events: torch.Tensor | int = 0
    clip_units: torch.Tensor | int = 0
    ratio: torch.Tensor | int = 0
    corrections: torch.Tensor | int = 0


class TrainStep:
    """The training half of the loop on one rank."""

    def __init__(
        self, config: Config, policy: Policy, reference: ReferencePolicy | None, store: TraceStore, spec: TraceSpec
    ):
        self.config, self.policy, self.reference, self.spec = config, policy, reference, spec
        self.shares = Shares(config, policy.layers, store, spec, vocabulary=policy.facts.vocab)
        self.placement = ExpertPlacement(config, policy, store, spec)
        self.guards = Guards(config.guards)
        self.peak_rows = 0.0  # of the step's plans

    def run(
        self,
        sequences: list[Sequence],
        group_ids: list[int],
        *,
        step: int,
        weight_version: int,
        measure_native: bool,
        clock: Clock,
    ) -> dict[str, float]:
        """Learn from one rollout batch; returns the step's metrics (see report/metrics.py), equal on every rank.

        group_ids: the prompt each sequence belongs to. measure_native: also score the batch with native routing.
        """
        replay = self.config.replay.mode
        first_mode = {"r3": "replay", "r2": "record", "off": "observe"}[replay]
        with clock("placement"):
            placement = self.placement.start_step(step, sequences)
        with clock("routes"):
            shares, fallback = self.shares.of(sequences, group_ids, weight_version, self.policy.placement)
            if replay == "r3":
                self._plan(shares, step)
        everything = [m for share in shares for m in share.microbatches]
        tables, plans = ([one for share in shares for one in getattr(share, name)] for name in ("tables", "plans"))
        tallies: list[Tally] = []
        mismatch, native = MismatchSums.empty(world.device()), None
        entropies: list[torch.Tensor] = []
        with clock("logprobs"):
            if self.config.objective.old_logprobs == "trainer":
                name = f"step {step} old logprobs"
                with self._session(tables, plans, first_mode, name, compare_native=True) as session:
                    old, entropies = self.policy.logprobs_and_entropies(everything, session)
                tallies.append(session.tally)
                mismatch = _mismatch(everything, old)
                self._hand_out(shares, old, "old_logprobs")
                if replay == "r2":
                    self._hand_out(shares, session.recorded_routes(), "tables")
                    self._plan(shares, step)
            if measure_native and replay == "r3":
                name = f"step {step} native logprobs"
                with self._session(tables, [], "observe", name, compare_native=True) as session:
                    native_logprobs = self.policy.logprobs(everything, session)
                native = _mismatch(everything, native_logprobs), session.tally
            if self.reference is not None:
                self._hand_out(shares, self.reference.logprobs(everything), "ref_logprobs")
        credit = give_credit(self.config.objective, sequences, group_ids, shares)
        sums, grad_norms, aux_losses, skipped, lr = UpdateSums(), [], [], 0, 0.0
        with clock("train"):
            for number, share in enumerate(shares):
                # Without an old-logprob pass the first update's forward is the one that ran on the sampler's weights.
                observe_here = number == 0 and self.config.objective.old_logprobs == "sampler"
                name = f"step {step} update {number}"
                mode = "observe" if replay == "off" else "replay"
                with self._session(
                    share.tables, share.plans, mode, name, compare_native=observe_here, training=True
                ) as session:
                    seen: dict[int, tuple[torch.Tensor, ...]] = {}
                    result = self.policy.update(
                        share.microbatches,
                        session,
                        self._loss(share, sums, seen),
                        entropy=observe_here or self.config.objective.entropy_coef > 0,
                    )
                tallies.append(session.tally)
                if observe_here and world.is_last_stage():
                    values = [seen[i] for i in range(len(share.microbatches))]
                    mismatch = _mismatch(share.microbatches, [logprobs for logprobs, _ in values])
                    entropies = [of_tokens for _, of_tokens in values]
                grad_norms.append(result.grad_norm)
                aux_losses.append(result.aux_loss)
                skipped += not result.applied
                lr = result.lr
                self.guards.after_update(result, step=step, update=number)
        metrics = self._reduce(sums, tallies, len(shares), replay, by_layer=measure_native)
        if replay != "off":
            metrics |= fallback
        metrics |= credit | placement
        measured = _global(mismatch).metrics()
        metrics |= {key: measured[name] for key, name in _MISMATCH_METRICS.items()}
        metrics |= {
            "policy/entropy": _mean_entropy(entropies),
            "optim/grad_norm": sum(grad_norms) / len(grad_norms),
            "optim/lr": lr,
            "optim/updates": self.policy.updates,
            "optim/skipped": skipped,
        }
        if self.config.train.router_aux_loss:
            metrics["objective/aux_loss"] = sum(aux_losses) / len(aux_losses)
        if native is not None:
            n = _global(native[0]).metrics()
            metrics |= {
                "policy_kl/k1_native": n["k1"],
                "policy_kl/k3_native": n["k3"],
                "policy/extreme_fraction_native": n["extreme_fraction_2"],
                **self._compared([native[1]], "native"),
            }
        return metrics

    def _plan(self, shares: list[Share], step: int) -> None:
        """Give the microbatches dispatch plans of their routes, with one exchange between the ranks for all of them.

        Raises ReplayError on all ranks when a rank would get more rows than `replay.max_rows`.
        """
        if self.config.replay.plan is False:
            return
        tables, group = [t for share in shares for t in share.tables], world.dispatch_group(self.spec.num_experts)
        order, chunks = self.policy.order, self.config.replay.overlap_chunks
        plans = plan_dispatch(
            tables, self.policy.layers, group, world.gather_over_dispatch, order, overlap_chunks=chunks
        )
        limit, (peak,) = self.config.replay.max_rows, world.all_reduce([peak_rows(plans)], dist.ReduceOp.MAX)
        if limit is not None and peak > limit:
            raise ReplayError(
                describe(
                    "the routes would bring a rank more rows than it may get in a layer of a microbatch",
                    where=f"step {step}",
                    got=f"{peak:.0f} (token, expert) pairs",
                    expected=f"at most {limit} (replay.max_rows)",
                    do="lower train.microbatch_tokens, try train.packing: load, or raise replay.max_rows",
                )
            )
        self.peak_rows = peak
        self._hand_out(shares, plans, "plans")

    def _session(self, tables, plans, mode, name, *, compare_native=False, training=False) -> ReplaySession:
        return ReplaySession(
            tables,
            self.policy.layers,
            mode=mode,
            name=name,
            rank=dist.get_rank(),
            compare_native=compare_native,
            recomputed_layers=self.policy.recomputed_layers if training else frozenset(),
            any_stage=world.any_stage,
            plans=plans,
        )

    @staticmethod
    def _hand_out(shares: list[Share], values: list[torch.Tensor], name: str) -> None:
        values = iter(values)
        for share in shares:
            setattr(share, name, [next(values) for _ in share.microbatches])

    def _loss(self, share: Share, sums: UpdateSums, seen: dict[int, tuple[torch.Tensor, ...]]):
        objective = self.config.objective

        def loss(number: int, logprobs: torch.Tensor, *entropies: torch.Tensor) -> torch.Tensor:
            microbatch = share.microbatches[number]
            seen[number] = tuple(values.detach() for values in (logprobs, *entropies))
            result = policy_loss(
                objective.name,
                logprobs,
                share.old_logprobs[number],
                microbatch.advantages,
                microbatch.sequence_ids,
                rollout_logprobs=microbatch.rollout_logprobs,
                denominator=share.denominator,
                weights=self._weights(share, number, logprobs, sums),
                **objective.parameters,
            )
            total = result.loss
            if self.reference is not None and objective.kl_in == "loss":
                kl = reference_kl(
                    logprobs,
                    share.ref_logprobs[number],
                    microbatch.sequence_ids,
                    share.sequences,
                    estimator=objective.kl_estimator,
                    old_logprobs=share.old_logprobs[number] if objective.kl_unbiased else None,
                )
                total = total + objective.kl_coef * kl
                sums.kl += kl.detach().double()
            if objective.entropy_coef > 0:
                total = total - objective.entropy_coef * entropy_bonus(*entropies, share.tokens)
            # Nothing is read here: the host would wait for the device after every microbatch.
            sums.loss += total.detach().double()
            sums.clip_events += result.clip_events
            sums.clip_units += result.clip_units
            sums.ratio += result.ratio_sum
            return total

        return loss

    def _weights(self, share: Share, number: int, logprobs: torch.Tensor, sums: UpdateSums) -> torch.Tensor | None:
        """[N] of a microbatch's tokens by the config's corrections; None without any."""
        objective, microbatch = self.config.objective, share.microbatches[number]
        if not objective.corrected:
            return None
        weights = corrections.token_weights(
            objective.corrections,
            objective.off_policy_delta,
            logprobs=logprobs,
            old_logprobs=share.old_logprobs[number],
            rollout_logprobs=microbatch.rollout_logprobs,
            advantages=microbatch.advantages,
            sequence_ids=microbatch.sequence_ids,
        )
        sums.corrections += weights.sums
        return weights.values

    def _reduce(
        self, sums: UpdateSums, tallies: list[Tally], updates: int, replay: str, *, by_layer: bool
    ) -> dict[str, float]:
        sums = sums if world.speaks_for_its_sequences() else UpdateSums()
        loss, kl, events, units, ratio, consumed, expected, applied, planned, dispatched = world.all_reduce(
            [
                *map(float, (sums.loss, sums.kl, sums.clip_events, sums.clip_units, sums.ratio)),
                sum(t.consumed for t in tallies),
                sum(t.expected for t in tallies),
                sum(t.applied_mismatch for t in tallies),
                sum(t.planned for t in tallies),
                sum(t.dispatched for t in tallies),
            ]
        )
        metrics = {
            "objective/loss": loss / updates,
            "objective/clip_fraction": events / max(units, 1),
            "objective/ratio_mean": ratio / max(units, 1),
        }
        if self.config.objective.corrected:
            mine = torch.as_tensor(sums.corrections, dtype=torch.float64).expand(corrections.SUMS).tolist()
            corrected = corrections.metrics(world.all_reduce(mine))
            metrics |= {f"correction/{name}": value for name, value in corrected.items()}
        if self.reference is not None and self.config.objective.kl_in == "loss":
            metrics["objective/kl_ref"] = kl / updates
        if replay != "off":
            metrics |= {
                "routing/applied_mismatch": applied,
                "routing/consumed": consumed,
                "routing/expected": expected,
                "routing/planned_fraction": planned / max(dispatched, 1),
                "routing/peak_rows": self.peak_rows,
            }
        name = "shadow" if replay == "r3" else "native"
        metrics |= self._compared(tallies, name)
        if by_layer:
            layers = self._by_layer(tallies)
            metrics |= {f"routing/{name}_mismatch_layer/{layer:03d}": fraction for layer, fraction in layers.items()}
        return metrics

    def _compared(self, tallies: list[Tally], name: str) -> dict[str, float]:
        """The routers' own choice against the record, over all (token, layer) positions."""
        counts = ("native_mismatch", "native_shared", "native_margin", "native_positions")
        counts += ("native_token_mismatch", "native_tokens")
        sums = world.all_reduce([sum(getattr(tally, count) for tally in tallies) for count in counts])
        wrong, shared, margin, positions, wrong_tokens, tokens = sums
        metrics = {
            f"routing/{name}_mismatch": wrong / max(positions, 1),
            f"routing/{name}_overlap": shared / max(positions * self.spec.top_k, 1),
            f"routing/{name}_margin": margin / max(positions, 1),
        }
        if name == "native":
            metrics["routing/native_token_mismatch"] = wrong_tokens / max(tokens, 1)
        return metrics

    def _by_layer(self, tallies: list[Tally]) -> dict[int, float]:
        """Of each MoE layer of the model: fraction of the tokens where the router's choice is not the recorded one."""
        layers = self.spec.moe_layers
        wrong = [sum(t.native_by_layer.get(layer, 0) for t in tallies) for layer in layers]
        tokens = [sum(t.native_tokens for t in tallies if layer in t.native_by_layer) for layer in layers]
        reduced = world.all_reduce([*wrong, *tokens])
        fractions = zip(reduced[: len(layers)], reduced[len(layers) :], strict=True)
        return {layer: w / max(n, 1) for layer, (w, n) in zip(layers, fractions, strict=True)}


def _mismatch(microbatches: list[Microbatch], logprobs: list[torch.Tensor]) -> MismatchSums:
    total = MismatchSums.empty(world.device())
    for microbatch, values in zip(microbatches, logprobs, strict=True):
        sequences = len(microbatch.indices)
        total = total.merge(MismatchSums.of(values, microbatch.rollout_logprobs, microbatch.sequence_ids, sequences))
    return total


def _mean_entropy(entropies: list[torch.Tensor]) -> float:
    """Nats per completion token, over all ranks. entropies: of each microbatch [N]."""
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
