"""The trained policy: log-probabilities, optimizer updates and weights; and the frozen one it may be held close to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ReplayError, describe
from moe_rl.megatron import hf_map, rng, schedule, world
from moe_rl.megatron.expert_order import checksum, move
from moe_rl.megatron.live_weights import LiveWeights
from moe_rl.megatron.microbatch import Microbatch
from moe_rl.megatron.model import (
    build_model,
    moe_layers,
    recomputed_layers,
    replay_session,
    transformer_config,
    unwrap,
    wrap_for_training,
)
from moe_rl.megatron.router import ReplayMoELayer, ReplayRouter
from moe_rl.megatron.schedule import LossFunction
from moe_rl.models.hf import ModelFacts, expected_tensors
from moe_rl.planning.expert_placement import check_order, natural_order
from moe_rl.replay.plans import LayerPlan, plan_dispatch
from moe_rl.replay.session import Mode, ReplaySession
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.weights.conservation import Content, parts_of
from moe_rl.weights.stream import Round


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """grad_norm: global, before clipping. lr: of this update, also if it was skipped. nonfinite: what was not finite,
    and on which ranks, where that made all ranks skip the update; "" otherwise.

    aux_loss: load-balancing loss without its weight, mean of the MoE layers, 1 when balanced; None without one.
    """

    grad_norm: float
    lr: float
    nonfinite: str
    aux_loss: float | None

    @property
    def applied(self) -> bool:
        return not self.nonfinite


def learning_rate(settings: OptimizerConfig, update: int) -> float:
    """Linear warm-up over `warmup_steps` updates, then constant. update counts from 0."""
    return settings.lr * min(1.0, (update + 1) / max(1, settings.warmup_steps))


class Policy:
    """A GPTModel with replay, its optimizer, and the passes the loop needs. All ranks call every method together."""

    def __init__(
        self, facts: ModelFacts, train: TrainConfig, parallel: ParallelConfig, checkpoint, *, temperature: float
    ):
        self.facts = facts
        self.temperature = temperature
        self.settings = train.optimizer
        self.balances = train.router_aux_loss > 0
        config = transformer_config(facts, train, parallel)
        self.chunks, self.optimizer = wrap_for_training(build_model(facts, config, checkpoint), config, train)
        self.placement = natural_order(len(facts.moe_layers), facts.num_experts)
        self.updates = self.moves = 0
        self._live = LiveWeights(map(unwrap, self.chunks), facts, self.parts)

    @property
    def layers(self) -> tuple[int, ...]:
        """Global 0-based numbers of the MoE layers this rank holds, ascending."""
        return moe_layers(self.chunks)

    @property
    def recomputed_layers(self) -> frozenset[int]:
        """Those of `layers` that an update runs a second time, in its backward pass."""
        return recomputed_layers(self.chunks)

    def plan_dispatch(
        self, tables: list[MicrobatchRoutes], *, overlap_chunks: int = 0
    ) -> list[dict[int, LayerPlan] | None]:
        """How the dispatchers are to send the rows of these microbatches, see `replay.plans.plan_dispatch`. The ranks
        exchange their counts, once for all of the tables."""
        group = world.dispatch_group(self.facts.num_experts)
        return plan_dispatch(
            tables, self.layers, group, world.gather_over_dispatch, self.order, overlap_chunks=overlap_chunks
        )

    def session(self, tables: Seq[MicrobatchRoutes], *, mode: Mode, name: str, **options: Any) -> ReplaySession:
        """Make the session of one pass of this policy. options: see `replay_session`."""
        return replay_session(self.chunks, tables, mode=mode, name=name, **options)

    def logprobs(
        self, microbatches: list[Microbatch], session: ReplaySession | None, temperature: float | None = None
    ) -> list[torch.Tensor]:
        """Log-probabilities [N] float32 of the completion tokens of each microbatch, no gradient.

        session: replays or observes; None routes natively, uncompared. temperature: None is that of sampling.
        """
        return [values[0] for values in self._scores(microbatches, session, temperature or self.temperature)]

    def logprobs_and_entropies(
        self, microbatches: list[Microbatch], session: ReplaySession | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`logprobs`, and the entropy [N] float32 in nats of the distribution that each completion token is drawn from.

        Both are over the tokens' supports where the microbatches have them.
        """
        scores = self._scores(microbatches, session, self.temperature, entropy=True)
        return [values[0] for values in scores], [values[1] for values in scores]

    def _scores(self, microbatches, session, temperature, *, entropy=False) -> list[torch.Tensor]:
        for chunk in self.chunks:
            chunk.eval()
        try:
            return schedule.logprobs(self.chunks, microbatches, session, temperature, entropy=entropy)
        finally:
            for chunk in self.chunks:
                chunk.train()

    def update(
        self,
        microbatches: list[Microbatch],
        session: ReplaySession | None,
        loss: LossFunction,
        *,
        entropy: bool = False,
    ) -> UpdateResult:
        """One optimizer step on the gradient of the summed losses. A loss or gradient that is not finite on any rank
        changes nothing on any: parameters, optimizer, `updates`, expert biases and random generators stay as they are.

        loss: called on the last pipeline stage only. entropy: give it the entropies too.
        """
        generators = rng.state()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron moves them as soon as all gradients are there, before anyone has seen whether these are finite.
        biases = [(r.expert_bias, r.expert_bias.clone()) for r in self._routers() if r.expert_bias is not None]
        self._start_aux_loss(microbatches)
        finite_losses = get_forward_backward_func()(
            **schedule.training_pass(self.chunks, microbatches, session, loss, self.temperature, entropy=entropy)
        )
        if session is not None:
            session.conclude()  # nothing is learned from a pass that took wrong routes
        lr = learning_rate(self.settings, self.updates)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        # Megatron's step would scale by a non-finite norm and write it into every weight.
        nonfinite = self._nonfinite(finite_losses, grad_norm)
        if nonfinite:
            for bias, before in biases:
                bias.copy_(before)
            rng.set_state(generators)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.updates += 1
            self.moves += grad_norm > 0
        return UpdateResult(grad_norm=grad_norm, lr=lr, nonfinite=nonfinite, aux_loss=self._finish_aux_loss())

    def _nonfinite(self, finite_losses: list[torch.Tensor], grad_norm: float) -> str:
        """What is not finite, and on which ranks, in the same words on all of them; "" when everything is.

        For gradients it names the ranks whose own part, before ranks sum theirs, is not finite. Weights are looked at
        once something else is not.
        """
        found = self._where({"loss": finite_losses, "gradient": [chunk.own_gradients_finite for chunk in self.chunks]})
        if not math.isfinite(grad_norm):  # all ranks have the same one: if it is alone, the sum over ranks overflowed
            found.append(f"gradient norm {grad_norm}")
        if found:
            weights = [weight.isfinite().all() for chunk in self.chunks for weight in chunk.parameters()]
            found += self._where({"weight": weights})
        return ", ".join(found)

    def _where(self, parts: dict[str, list[torch.Tensor]]) -> list[str]:
        """Names each of the parts that is not finite on a rank, and the ranks. parts: of this rank, what is finite."""
        ranks = dist.get_world_size()
        mine = [0] * (len(parts) * ranks)
        for row, flags in enumerate(parts.values()):
            mine[row * ranks + dist.get_rank()] = int(bool(flags) and not torch.stack(flags).all())
        wrong, found = world.all_reduce(mine), []
        for row, what in enumerate(parts):
            where = [str(rank) for rank in range(ranks) if wrong[row * ranks + rank]]
            if where:
                found.append(f"{what} on rank{'s' if len(where) > 1 else ''} {', '.join(where)}")
        return found

    def release(self) -> None:
        """Let go of the model, so that it and its process groups can be freed.

        Two references would keep both for good, in circles through autograd's nodes where Python cannot see them: the
        hooks by which megatron learns of gradients, and the weights of the last dispatched tokens.
        """
        for chunk in self.chunks:
            chunk.grad_accs.clear()
            for layer in unwrap(chunk).decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.token_dispatcher.probs = None
        self.chunks = []
        del self._live

    def _start_aux_loss(self, microbatches: list[Microbatch]) -> None:
        if not self.balances:
            return
        mine = sum(m.real_tokens for m in microbatches) if world.speaks_for_its_sequences() else 0
        (total,) = world.all_reduce([mine])
        for router in self._routers():
            router.tokens_of_update = total
            router.aux_loss.zero_()

    def _finish_aux_loss(self) -> float | None:
        if not self.balances:
            return None
        (total,) = world.all_reduce([sum(float(router.aux_loss) for router in self._routers())])
        return total / len(self.facts.moe_layers)

    def _routers(self) -> list[ReplayRouter]:
        return [layer.router for layer in self._moe_layers()]

    def _moe_layers(self) -> list[ReplayMoELayer]:
        layers = (layer for chunk in self.chunks for layer in unwrap(chunk).decoder.layers)
        return [layer.mlp for layer in layers if layer.is_moe_layer]

    @property
    def optimizers(self) -> list[MegatronOptimizer]:
        """One for all parameters, or one for the dense ones and one for the experts, as the layout asks."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    @property
    def order(self) -> np.ndarray:
        """int64 [L, E]: the expert in each slot, of each of `layers`; the rows of `placement` for them."""
        return self.placement[[self.facts.moe_layers.index(layer) for layer in self.layers]]

    def place(self, placement: np.ndarray) -> None:
        """Move experts between ranks, with all that the optimizer keeps of them, so that they lie as placement says.

        placement: int64 [L, E], the expert in each slot, for all MoE layers of the model; the same on all ranks. Only
        where experts lie changes: their numbers, names, values and the checkpoint stay what they are, bit for bit.
        Raises ReplayError on all ranks, before anything moves, when placements differ between ranks, and afterwards
        when weights are not where tokens of their expert are sent to. ValueError when it is no placement.
        """
        check_order(placement, *self.placement.shape)
        same = xxhash.xxh3_64_intdigest(np.ascontiguousarray(placement, np.int64)) >> 12  # exact as a float64
        least, most = world.all_reduce([-same, same], dist.ReduceOp.MAX)
        if -least != most:
            raise ReplayError(
                describe(
                    "ranks were told different placements of the experts",
                    got=f"digest {same:013x} on rank {dist.get_rank()}",
                    expected="the same on all ranks",
                    do="plan on one rank and send the plan to the others",
                )
            )
        for optimizer in self.optimizers:
            # Adam has no moments before its first step.
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        layers, rows = self._moe_layers(), placement[[self.facts.moe_layers.index(layer) for layer in self.layers]]
        moved = [(moe, row) for moe, row in zip(layers, rows, strict=True) if (moe.token_dispatcher.order != row).any()]
        before = [checksum(moe) for moe, _ in moved]
        for moe, row in moved:
            move(moe, row, self.optimizers)
        wrong = [int(checksum(moe) != old) for (moe, _), old in zip(moved, before, strict=True)]
        (lost,) = world.all_reduce([sum(wrong)])
        if lost:
            raise ReplayError(
                describe(
                    "experts are not where their tokens are sent to",
                    got=f"{sum(wrong)} such layers on rank {dist.get_rank()}, {lost:.0f} on all",
                    expected="every expert's weights under its own number, as before it moved",
                    do="report this: the run cannot go on with these weights",
                )
            )
        self.placement = np.array(placement, np.int64)

    @cached_property
    def parts(self) -> dict[str, int]:
        """The number of each part of the model by its name, see `weights.conservation`."""
        return parts_of(expected_tensors(self.facts))

    def content(self, dtype: torch.dtype, *, updated: bool) -> Content:
        """What all ranks hold of each part of the model, see `LiveWeights.content`."""
        return self._live.content(dtype, self.optimizers, updated=updated)

    def export(self, dtype: torch.dtype, *, dense: bool, experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights under Hugging Face names, in the sampler's precision, on the host; see `hf_map.export`."""
        (only,) = self._rounds(dtype, math.inf, dense=dense, experts=experts, device=torch.device("cpu"))
        return only.tensors

    def export_rounds(self, dtype: torch.dtype, limit: float, *, host: bool) -> list[Round]:
        """What this rank gives so that each tensor comes from one rank of one replica, in rounds of at most `limit`
        bytes, see `hf_map.export_rounds`. host: on the host, or where the model is."""
        dense, experts = world.holds_first_replica()
        device = torch.device("cpu") if host else world.device()
        return self._rounds(dtype, limit, dense=dense, experts=experts, device=device)

    def _rounds(self, dtype: torch.dtype, limit: float, **which) -> list[Round]:
        return hf_map.export_rounds(map(unwrap, self.chunks), self.facts, dtype, limit, **which)


class ReferencePolicy:
    """The frozen initial policy. It always routes natively: its own choices are what it is a reference for."""

    def __init__(
        self, facts: ModelFacts, train: TrainConfig, parallel: ParallelConfig, checkpoint, *, temperature: float
    ):
        self.temperature = temperature
        config = transformer_config(facts, train, parallel)
        self.chunks = [chunk.eval().requires_grad_(False) for chunk in build_model(facts, config, checkpoint)]

    def logprobs(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """As Policy.logprobs, natively routed."""
        return [values[0] for values in schedule.logprobs(self.chunks, microbatches, None, self.temperature)]
