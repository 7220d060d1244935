"""Gives Megatron's all-to-all dispatcher a plan that says how many rows go where.

For each MoE layer and microbatch, Megatron's dispatcher asks all ranks of its group for their counts (an all-gather),
makes the host wait for these counts (the all-to-all needs the sizes of its messages), and sorts a table of rows by
expert. A plan contains all three results beforehand. The exchanged rows and their order are the same as Megatron's, and
the sums over them the same with and without a plan, so the results are equal bit for bit.

Without plans (`replay.plan: false`), Megatron's fused permutation and its flexible dispatcher (DeepEP, HybridEP) can be
used. Both compute as Megatron does.

Also copies each row of a microbatch for its experts, and sums the experts' outputs, in an order that does not change.

Megatron sums with atomic operations, whose order a GPU does not keep. In bfloat16 the same weights then give other
log-probabilities in every pass. Here each sum is that of one row's terms in the order of sending, in float32 at least.
Either function is the other's backward.

Legend: R rows of a microbatch, K experts of a row, H hidden size. `order` int64 [R * K] says which row each sent row is
a copy of, `places` int64 [R, K] where the copies of each row are.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.replay.plans import ChunkPlan, LayerPlan


def places_of(order: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the places of the copies of each of R rows in this sending order, ascending."""
    return order.argsort(stable=True).view(rows, len(order) // max(rows, 1))


def spread(rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows [R, H] in sending order, [R * K, H]."""
    return _Spread.apply(rows, order, places)


def summed(sent: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return [R, H], for each row the sum of its K of the sent rows [R * K, H]."""
    return _Sum.apply(sent, order, places)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _sums(gradient, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sent: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return _sums(sent, places)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def _sums(sent: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if not len(places):
        return sent[:0]
    # One kernel gathers and sums. Sums over [R, K, H] take six times as long on a CPU, atomic ones 1.3 times.
    return F.embedding_bag(places, sent.contiguous(), mode="sum")


class PlannedDispatcher(MoEAlltoAllTokenDispatcher):
    """MoEAlltoAllTokenDispatcher that follows `plan`, which is set before each dispatch. Without a plan it is
    Megatron's own.

    Only the dispatcher knows which slot an expert is in, see `place`. Routing maps and their weights have one column
    per expert number, whatever its slot.

    Attributes:
        copies: The copies of experts, see `ChunkPlan`, to which the next rows go. None if there are none.
    """

    num_local_experts: int
    reversed_local_input_permutation_mapping: torch.Tensor
    _places: torch.Tensor

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._plan: LayerPlan | None = None
        self._own_experts = self.num_local_experts
        self.copies: np.ndarray | None = None
        self.place(np.arange(self.num_experts))

    @property
    def plan(self) -> LayerPlan | None:
        """Return the plan of the next dispatch. Setting a plan for another placement of the experts raises
        ReplayError."""
        return self._plan

    @plan.setter
    def plan(self, plan: LayerPlan | None) -> None:
        if plan is not None and self.config.moe_permute_fusion:
            raise _follows_no_plan("moe_permute_fusion")
        if plan is not None and not np.array_equal(plan.order, self.order):
            raise ReplayError(
                "a dispatch plan was made for another placement of the experts",
                got=plan.order.tolist(),
                expected=self.order.tolist(),
                do="move experts first, then make plans with `Policy.order`",
            )
        self._plan = plan
        self._hold(None)

    def place(self, order: np.ndarray) -> None:
        """Set which expert is in each slot.

        Args:
            order: int64 [E], the expert in each slot. Rank r of R ranks holds E / R slots, the first of them r * E / R.
        """
        self.order = order
        natural = (order == np.arange(len(order))).all()
        self._columns = None if natural else torch.from_numpy(order).to(world.device())

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        """Return the rows [S, B, H] in sending order [S * B * K, H], and their weights [S * B * K]."""
        if self.plan is None:
            if self._columns is not None:
                routing_map, probs = routing_map.index_select(1, self._columns), probs.index_select(1, self._columns)
            permuted, weights = super().dispatch_preprocess(hidden_states, routing_map, probs)
            if self.config.moe_permute_fusion:
                return permuted, weights
            rows, order = hidden_states.view(-1, hidden_states.shape[-1]), self.reversed_local_input_permutation_mapping
            self._places = places_of(order, len(rows))
            return spread(rows, order, self._places), weights
        self.hidden_shape, rows = hidden_states.shape, hidden_states.view(-1, hidden_states.shape[-1])
        self.hidden_shape_before_permute = rows.shape
        (whole,) = self.plan.chunks
        self.follow(whole, routing_map, probs)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.reversed_local_input_permutation_mapping = order = self.send_order(self.plan)
        self._places = places_of(order, len(rows))
        return spread(rows, order, self._places), probs.reshape(-1).index_select(0, self.plan.entries)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Return [S, B, H], the sums of the rows that came back in sending order [S * B * K, H], with or without a
        plan."""
        if self.config.moe_permute_fusion:
            return super().combine_postprocess(permutated_local_input_tokens)
        order = self.reversed_local_input_permutation_mapping
        output = summed(permutated_local_input_tokens, order, self._places).view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()

    def send_order(self, plan: LayerPlan) -> torch.Tensor:
        """Return int64 [S * B * K], the rows of the microbatch in the order in which the plan sends them."""
        return torch.div(plan.entries, self.num_experts, rounding_mode="floor").long()

    def follow(self, chunk: ChunkPlan, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Take the message sizes of the next rows from the plan instead of computing them from the map; both are
        equal."""
        self.routing_map, self.probs = routing_map, probs
        self.input_splits, self.output_splits, self.output_splits_tp = chunk.sent, chunk.got, chunk.gathered
        self.num_global_tokens_per_local_expert, self.tokens_per_expert = chunk.received, chunk.per_expert
        self._hold(chunk.copies)

    def _hold(self, copies: np.ndarray | None) -> None:
        """Expect rows for this rank's experts and for the given copies on all ranks, see `ChunkPlan`."""
        here = self._own_experts + (0 if copies is None else copies.shape[1])
        if here != self.num_local_experts:
            # Megatron's two orders of the runs of rows: by rank, then expert, and by expert, then rank.
            runs = torch.arange(here * self.ep_size * self.tp_size, device=self.permute_idx_device)
            self.sort_input_by_local_experts = runs.view(-1, here).T.ravel()
            self.restore_output_by_local_experts = runs.view(here, -1).T.ravel()
            self.num_local_experts = here
        self.copies = copies

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert=None):
        # A plan's sizes are on the host already: there is nothing to copy or to wait for.
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert) if self.plan is None else tokens_per_expert


class FlexDispatcher(MoEFlexTokenDispatcher):
    """MoEFlexTokenDispatcher that says which experts it really exchanges rows with.

    Its managers of DeepEP and NCCL EP do not read the routing map. They take the K experts with the largest weights, so
    that a recorded expert whose live weight underflowed to 0 may be replaced by any other expert of weight 0.

    Attributes:
        copies, order: As of a PlannedDispatcher. No expert is copied or moved.
    """

    copies = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.order = np.arange(self.config.num_moe_experts)

    @property
    def plan(self) -> None:
        return None

    @plan.setter
    def plan(self, plan: LayerPlan | None) -> None:
        if plan is not None:
            raise _follows_no_plan("moe_token_dispatcher_type")

    @property
    def probs(self) -> torch.Tensor | None:
        """Return the weights of the last dispatched rows."""
        return self._comm_manager.token_probs

    @probs.setter
    def probs(self, probs: None) -> None:
        self._comm_manager.token_probs = probs

    def exchanged(self, rows: int) -> torch.Tensor:
        """Return bool [R, E], the experts of each of the `rows` R of `dispatch_preprocess`, at any tensor-parallel
        rank."""
        manager, ranks = self._comm_manager, self.tp_size * self.ep_size
        if (chosen := getattr(manager, "token_indices", None)) is None:
            experts = manager.routing_map[:rows]  # some rows of padding may follow
        else:
            shape = rows, ranks * self.num_local_experts
            experts = torch.zeros(shape, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)
        return experts.view(rows, self.ep_size, self.tp_size, -1).any(2).view(rows, -1)


def _follows_no_plan(setting: str) -> ReplayError:
    return ReplayError(
        "a dispatch plan was made for a dispatcher that follows none",
        where={"setting": setting},
        do="set replay.plan to false, or leave out the setting",
    )
