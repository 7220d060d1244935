"""Holds the trained policy, with its logprobs, optimizer updates and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.errors import ConfigError, ReplayError
from moe_rl.megatron import hf_map, lora, rng, router_gradients, schedule, world
from moe_rl.megatron.cpu import mode_left_behind, without_mode
from moe_rl.megatron.expert_order import checksum, move
from moe_rl.megatron.layers import GroupedExperts
from moe_rl.megatron.live_weights import LiveWeights
from moe_rl.megatron.microbatch import Microbatch, ScoredWork, Work
from moe_rl.megatron.model import (
    build_model,
    learning_rate_schedule,
    moe_layers,
    recomputed_layers,
    replay_pass,
    transformer_config,
    unwrap,
    wrap_for_training,
)
from moe_rl.megatron.router import ReplayMoELayer, ReplayRouter
from moe_rl.megatron.schedule import LossFunction
from moe_rl.models.hf import ModelFacts, expected_tensors
from moe_rl.planning.expert_placement import check_order, natural_order
from moe_rl.planning.packing import row_multiple
from moe_rl.replay.plans import DispatchRules
from moe_rl.replay.replay_pass import Mode, PassSeen, ReplayPass, Watch
from moe_rl.weights.conservation import Content, parts_of
from moe_rl.weights.stream import Round


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Holds the result of one optimizer update.

    Attributes:
        grad_norm: Global gradient norm before clipping.
        lr: Learning rate of this update, even if it was skipped.
        nonfinite: What was not finite, and on which ranks, so that all ranks skipped the update; "" if all was finite.
        aux_loss: Load-balancing loss without its coefficient, mean over the MoE layers, 1 when balanced; None without
            one.
    """

    grad_norm: float
    lr: float
    nonfinite: str
    aux_loss: float | None

    @property
    def applied(self) -> bool:
        return not self.nonfinite


class Policy:
    """Holds a GPTModel with replay, its optimizer, and the passes that the loop needs. All ranks call every method
    together."""

    def __init__(
        self,
        facts: ModelFacts,
        train: TrainConfig,
        parallel: ParallelConfig,
        checkpoint,
        *,
        temperature: float,
        run_updates: int = 1,
    ):
        """Args: `run_updates` is the number of updates of the run, over which the learning rate may fall."""
        self.facts = facts
        self.temperature = temperature
        self.balances = train.router_aux_loss > 0
        self.trains_adapters = train.lora is not None
        self.row_multiple = row_multiple(train, parallel)
        config = transformer_config(facts, train, parallel)
        self.chunks, self.optimizer = wrap_for_training(
            build_model(facts, config, checkpoint, train.lora), config, train
        )
        self.placement = natural_order(len(facts.moe_layers), facts.num_experts)
        self.schedule = learning_rate_schedule(self.optimizer, train, run_updates)
        self.moves = 0
        self._live = LiveWeights(map(unwrap, self.chunks), facts, self.parts)

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates since the start of the run. The learning rate follows from it."""
        return self.schedule.num_steps

    @updates.setter
    def updates(self, made: int) -> None:
        self.schedule.step(made - self.schedule.num_steps)

    @property
    def lr(self) -> float | None:
        """Return the learning rate of the last update; None before the first."""
        return self.schedule.get_lr({}) if self.updates else None

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the global 0-based numbers of the MoE layers that this rank holds, ascending."""
        return moe_layers(self.chunks)

    @property
    def recomputed_layers(self) -> frozenset[int]:
        """Return the layers among `layers` that an update runs a second time, in its backward pass."""
        return recomputed_layers(self.chunks)

    def dispatch_rules(
        self,
        *,
        overlap_chunks: int = 0,
        copies: int = 0,
        least_copied_rows: int | None = None,
        node_ranks: int | None = None,
    ) -> DispatchRules:
        """Return how `plan_dispatch` plans for the experts' present places.

        Args:
            copies, least_copied_rows, node_ranks: See `PlacementConfig`.
        """
        return DispatchRules(
            self.layers,
            world.dispatch_group(self.facts.num_experts),
            world.gather_over_dispatch,
            self.order,
            overlap_chunks=overlap_chunks,
            copies=copies,
            # An expert has three matrices of its width, sent once forward, and once backward as gradients. A row goes
            # there and back, twice.
            least=least_copied_rows or -(-3 * self.facts.moe_intermediate_size // 2),
            nodes=world.dispatch_nodes(node_ranks) if copies else None,
        )

    def check_copies(self) -> None:
        """Raise ConfigError if the model's experts are of a kind that cannot be copied (`placement.copies`)."""
        for moe in self._moe_layers():
            if not isinstance(moe.experts, GroupedExperts):
                raise ConfigError(
                    "experts of this kind cannot be copied",
                    where={"key": "placement.copies", "layer": moe.layer_number - 1},
                    got=type(moe.experts).__name__,
                    expected=f"{GroupedExperts.__name__}: no TransformerEngine, and no biases of experts",
                    do="set placement.copies to 0",
                )

    @contextmanager
    def _replay(
        self, work: Seq[Work], mode: Mode | None, name: str, watch: Watch, *, training: bool = False
    ) -> Iterator[ReplayPass | None]:
        if mode is None:
            yield None
            return
        try:
            with replay_pass(
                self.chunks,
                [item.table for item in work],
                mode=mode,
                name=name,
                plans=[item.plan for item in work],
                watch=watch,
                training=training,
                agreed=lambda: world.agreed("routes that it replays"),
                lr=self.lr,
            ) as replay:
                yield replay
        finally:
            for router in self._routers():  # else they keep the pass, and all its routes, until the next one
                router.handle = router.seq_params = None

    def score(
        self,
        work: Seq[Work],
        mode: Mode | None,
        name: str,
        watch: Watch = Watch(),  # noqa: B008 - frozen
        *,
        entropies: bool = False,
        temperature: float | None = None,
    ) -> ScoredWork:
        """Score the completion tokens of these microbatches, without gradients.

        Args:
            mode: As in `ReplayPass`; None routes natively and compares nothing.
            name: Names the pass in error messages.
            temperature: None means the sampling temperature.
        """
        microbatches = [item.microbatch for item in work]
        for chunk in self.chunks:
            chunk.eval()
        try:
            with self._replay(work, mode, name, watch) as replay:
                values = schedule.logprobs(
                    self.chunks, microbatches, replay, temperature or self.temperature, entropy=entropies
                )
        finally:
            for chunk in self.chunks:
                chunk.train()
        seen = PassSeen() if replay is None else replay.seen
        return ScoredWork(work, [rows[0] for rows in values], [rows[1] for rows in values] if entropies else [], seen)

    @without_mode()
    def update(
        self,
        work: Seq[Work],
        loss: LossFunction,
        mode: Mode | None,
        name: str,
        watch: Watch = Watch(),  # noqa: B008 - frozen
        *,
        entropies: bool = False,
        learned: Callable[[], object] | None = None,
    ) -> tuple[UpdateResult, PassSeen]:
        """Make one optimizer step on the gradient of the summed losses. Nothing is learned from a pass that took wrong
        routes.

        If a loss or gradient is not finite on any rank, nothing changes on any rank: parameters, optimizer, `updates`,
        expert biases and random generators stay as they are.

        Args:
            loss: Called on the last pipeline stage only.
            mode, name: As in `score`.
            entropies: Also pass entropies to the loss.
            learned: Called after the gradient is computed, before anything changes. It may refuse the update, on all
                ranks.
        """
        microbatches = [item.microbatch for item in work]
        generators = rng.state()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron updates the biases as soon as all gradients are computed, before it is checked that these are finite.
        biased = [router for router in self._routers() if router.expert_bias is not None]
        biases = [(router.expert_bias, router.expert_bias.clone()) for router in biased]
        for router in biased:
            router.local_tokens_per_expert.zero_()  # an update that failed leaves its own
        self._start_aux_loss(microbatches)
        try:
            with self._replay(work, mode, name, watch, training=True) as replay, mode_left_behind() as begun:
                finite_losses = get_forward_backward_func()(
                    **schedule.training_pass(
                        self.chunks, microbatches, replay, loss, self.temperature, begun, entropy=entropies
                    )
                )
            if learned is not None:
                learned()
            self._check_router_gradients()
        except BaseException:
            for bias, before in biases:
                bias.copy_(before)
            raise
        self.updates += 1
        lr = self.schedule.get_lr({})
        self.optimizer.prepare_grads()
        grad_norm = self._gradient_norm()
        # Megatron's step would scale by a non-finite norm and so write it into every weight.
        nonfinite = self._nonfinite(finite_losses, grad_norm)
        if nonfinite:
            for bias, before in biases:
                bias.copy_(before)
            rng.set_state(generators)
            self.updates -= 1
        else:
            self._step(grad_norm)
            self.moves += grad_norm > 0
        result = UpdateResult(grad_norm, lr, nonfinite, aux_loss=self._finish_aux_loss())
        return result, PassSeen() if replay is None else replay.seen

    def _check_router_gradients(self) -> None:
        """Raise ReplayError if a rank's part of a router's gradient is lost, see `router_gradients.check`. Beside
        adapters, routers are frozen."""
        if self.trains_adapters:
            return
        parts = [chunk.own_gradients.routers for chunk in self.chunks]
        config, whole = unwrap(self.chunks[0]).config, self.chunks[0].ddp_config.grad_reduce_in_fp32
        router_gradients.check(
            self.facts.moe_layers,
            dict(zip(self.layers, (router.weight for router in self._routers()), strict=True)),
            torch.cat(parts),
            self.optimizers,
            sequence_parallel=config.sequence_parallel,
            summed_in=torch.float32 if whole else config.params_dtype,
        )

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Return the norm of the whole model's gradient. Megatron measures one tensor after the other."""
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            group_gradients = by_group.setdefault(optimizer.get_grad_stats_parallel_group(), [])
            group_gradients += optimizer.get_grads_for_grad_norm()
        squares = []
        for group, gradients in by_group.items():
            norms = torch._foreach_norm(gradients, dtype=torch.float32) if gradients else [torch.zeros([])]
            squares.append(torch.stack(norms).to(world.device()).norm().square())
            dist.all_reduce(squares[-1], group=group)
        return math.sqrt(sum(squares))

    @torch.no_grad()
    def _step(self, norm: float) -> None:
        """Clip the gradients, which have this norm, and move the weights.

        Megatron's step would prepare all gradients and measure their norm a second time.
        """
        for optimizer in self.optimizers:
            settings = optimizer.config
            name = "decoupled_grad" if settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
            candidates = (getattr(parameter, name, None) for parameter in optimizer.get_parameters())
            gradients, scale = [grad for grad in candidates if grad is not None], settings.clip_grad / (norm + 1e-6)
            if gradients and 0 < scale < 1:
                torch._foreach_mul_(gradients, scale)
        self.optimizer.step_with_ready_grads()

    def _nonfinite(self, finite_losses: list[torch.Tensor], grad_norm: float) -> str:
        """Return what is not finite and on which ranks, in the same words on all ranks; "" if everything is finite.

        For gradients it names the ranks whose own part, before the sum over ranks, is not finite. Weights are checked
        only if something else is not finite.
        """
        wrong = self._where({"loss": finite_losses, "gradient": [chunk.own_gradients.finite for chunk in self.chunks]})
        # all ranks have the same norm: if nothing else is wrong, the sum over ranks overflowed
        if not math.isfinite(grad_norm):
            wrong.append(f"gradient norm {grad_norm}")
        if wrong:
            weights = [weight.isfinite().all() for chunk in self.chunks for weight in chunk.parameters()]
            wrong += self._where({"weight": weights})
        return ", ".join(wrong)

    def _where(self, parts: dict[str, list[torch.Tensor]]) -> list[str]:
        """Name each part that is not finite on some rank, and the ranks. `parts` holds this rank's flags: True is
        finite."""
        ranks = dist.get_world_size()
        mine = [0] * (len(parts) * ranks)
        for row, flags in enumerate(parts.values()):
            mine[row * ranks + dist.get_rank()] = int(bool(flags) and not torch.stack(flags).all())
        wrong, problems = world.all_reduce(mine), []
        for row, what in enumerate(parts):
            where = [str(rank) for rank in range(ranks) if wrong[row * ranks + rank]]
            if where:
                problems.append(f"{what} on rank{'s' if len(where) > 1 else ''} {', '.join(where)}")
        return problems

    def release(self) -> None:
        """Drop the model, so that it and its process groups can be freed.

        Two references must be cut first. Through autograd nodes they form cycles that Python's garbage collector cannot
        see: the hooks by which Megatron learns of gradients, and the weights of the last dispatched tokens.
        """
        for chunk in self.chunks:
            chunk.grad_accs.clear()
            for layer in unwrap(chunk).decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.token_dispatcher.probs = None
        self.chunks = []
        del self._live

    def _start_aux_loss(self, microbatches: Seq[Microbatch]) -> None:
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
        """Return the optimizers: one for all trained parameters, or one for the dense ones and one for the experts',
        depending on the layout."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [optimizer for optimizer in optimizers if not optimizer.is_stub_optimizer]  # a stub has no parameters

    @property
    def order(self) -> np.ndarray:
        """Return int64 [L, E], the expert in each slot of each layer in `layers`: their rows of `placement`."""
        return self.placement[[self.facts.moe_layers.index(layer) for layer in self.layers]]

    def place(self, placement: np.ndarray) -> None:
        """Move experts between ranks, with their optimizer state, to the given placement.

        Only the ranks that hold experts change: expert numbers, names, values and the checkpoint stay the same, bit for
        bit.

        Args:
            placement: int64 [L, E], the expert in each slot, for all MoE layers of the model; the same on all ranks.

        Raises:
            ReplayError: Placements differ between ranks (raised before anything moves), or weights are not where tokens
                for their expert are sent (raised afterwards). Raised on all ranks.
            ValueError: `placement` is not a placement of the experts.
        """
        check_order(placement, *self.placement.shape)
        same = xxhash.xxh3_64_intdigest(np.ascontiguousarray(placement, np.int64)) >> 12  # exact as a float64
        least, most = world.all_reduce([-same, same], dist.ReduceOp.MAX)
        if -least != most:
            raise ReplayError(
                "ranks got different placements of the experts",
                got=f"digest {same:013x} on rank {dist.get_rank()}",
                expected="the same on all ranks",
                do="plan on one rank and send the plan to the others",
            )
        for optimizer in self.optimizers:
            # Adam has no moments before its first step; create them, so that they can be moved.
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
                "the weights of experts are not where their tokens are sent",
                got=f"{sum(wrong)} wrong layers on rank {dist.get_rank()}, {lost:.0f} on all ranks",
                expected="every expert's weights under its own number, as before the move",
                do="report this as a bug, and resume from a checkpoint: these weights cannot be used",
            )
        self.placement = np.array(placement, np.int64)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Return {part of the model: its number}, see `weights.conservation`."""
        return parts_of(expected_tensors(self.facts))

    def content(self, dtype: torch.dtype, *, updated: bool) -> Content:
        """Return, for each part of the model, the values that all ranks hold, see `LiveWeights.content`."""
        return self._live.content(dtype, self.optimizers, updated=updated)

    def export(self, dtype: torch.dtype, *, dense: bool, experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights under Hugging Face names, in the sampler's precision, on the host; see
        `hf_map.export`."""
        (only,) = self._rounds(dtype, math.inf, dense=dense, experts=experts, device=torch.device("cpu"))
        return only.tensors

    def export_rounds(self, dtype: torch.dtype, limit: float, *, host: bool) -> list[Round]:
        """Return this rank's weights in rounds of at most `limit` bytes, see `hf_map.export_rounds`.

        Each tensor comes from one rank of one replica. With `host`, tensors are on the host, else where the model is.
        """
        dense, experts = world.holds_first_replica()
        device = torch.device("cpu") if host else world.device()
        return self._rounds(dtype, limit, dense=dense, experts=experts, device=device)

    def adapter_rounds(self, limit: float, *, host: bool) -> list[Round]:
        """Return this rank's adapters in rounds, as `export_rounds` does weights. See `lora.export_rounds`."""
        dense, experts = world.holds_first_replica()
        device = torch.device("cpu") if host else world.device()
        return lora.export_rounds(map(unwrap, self.chunks), self.facts, limit, device, dense=dense, experts=experts)

    def _rounds(self, dtype: torch.dtype, limit: float, **which) -> list[Round]:
        return hf_map.export_rounds(map(unwrap, self.chunks), self.facts, dtype, limit, **which)
